"""TensorRT-LLM: a context server answers with what the generation server needs, its first token included.

Sequential; ``disaggregated_params`` of the first answer go to the second request as they came, but for their
``request_type``. Source: tensorrt_llm/serve/openai_protocol.py (read, not run).
"""

import msgspec
from msgspec import Raw

from gateway.dialects.fields import splice
from gateway.disagg import Pair, Send, Steps, answers_to, prompts_in, several
from gateway.disagg.nixl import one_token
from gateway.errors import ServerError
from policies.base import Role


class _Choice(msgspec.Struct):
    disaggregated_params: dict[str, Raw] | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_answer = msgspec.json.Decoder(_Answer)


class TensorRT:
    """See the module's head."""

    name = "tensorrt_llm"
    lease: float | None = None
    tells_cached = False
    answers_params = False

    def takes(self, kind: str, body: bytes) -> bool:
        """One prompt with one answer of more than a token."""
        if kind not in ("chat", "completions"):
            return False
        asked = several(body)
        if asked is None or asked.echo or prompts_in(asked) != 1 or answers_to(asked) != 1:
            return False
        return min(asked.max_tokens or 2, asked.max_completion_tokens or 2) > 1

    def steps(self, pair: Pair) -> Steps:
        """Context, then generation."""
        answer = yield [
            Send(Role.PREFILL, one_token(pair, {"disaggregated_params": b'{"request_type":"context_only"}'}))
        ]
        try:
            choices = _answer.decode(answer).choices
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ServerError("the prefill worker's answer cannot be read") from None
        told = choices[0].disaggregated_params if choices else None
        if told is None or choices[0].finish_reason not in ("length", "not_finished", None):
            # It ended with its first token, or has nothing to hand over: the other engine does it all.
            yield [Send(Role.DECODE, pair.body)]
            return
        told["request_type"] = Raw(b'"generation_only"')
        yield [Send(Role.DECODE, splice(pair.body, (), {"disaggregated_params": msgspec.json.encode(told)}))]

    def blames(self, message: str) -> Role | None:
        """It does not tell."""
        return None

    def abort(self, pair: Pair) -> tuple[str, bytes] | None:
        """A closed connection is an abort."""
        return None


PROTOCOL = TensorRT()
