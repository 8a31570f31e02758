"""vLLM's NixlConnector: the prefill engine answers with parameters, the decode engine pulls the KV that they name.

Sequential. The parameters go on as they came, for they differ between versions. The prefill engine keeps the KV for its lease
(30 s by default) unless the decode engine tells that it waits. With ``bidirectional_kv_xfer`` the decode engine answers with
parameters as well, which the prefill engine of the next turn takes: once, and only for a prompt that goes on, token for token,
from what the decode engine computed, for neither engine checks that.

Source: vllm/distributed/kv_transfer/kv_connector/v1/nixl; what engines trust was measured on vLLM 0.32.
"""

import re
from struct import Struct, error as StructError

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects.fields import splice
from gateway.disagg import Pair, Send, Steps, answers_to, prompts_in, several
from gateway.errors import BadRequest, ServerError
from gateway.http.sse import events, payload, spans
from policies.base import Role

ASKED = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
LENGTHS = {"chat": ("max_tokens", "max_completion_tokens"), "completions": ("max_tokens",), "messages": ("max_tokens",)}
"""Route -> what limits its answer."""
ONE_TOKEN = ("stream_options", "min_tokens", "stop", "stop_token_ids", "stop_sequences")
"""What must not be asked together with a single token and no stream, and what could end the answer before that: engines hand
over the KV of an answer that its length ended, and of no other."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Answer(msgspec.Struct):
    """What is read of an engine's answer, whole or a stream's last event."""

    kv_transfer_params: Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | None = None
    choices: list[_Choice] = []

    @property
    def params(self) -> bytes | None:
        """The parameters as they stand; ``None`` where there are none."""
        told = self.kv_transfer_params
        return None if isinstance(told, UnsetType) or bytes(told) == b"null" else bytes(told)

    @property
    def prompt(self) -> bytes | None:
        """Token ids of the prompt, little-endian u32 each, if told."""
        ids = self.prompt_token_ids or (self.choices[0].prompt_token_ids if self.choices else None)
        return None if ids is None else packed(ids)


_answer = msgspec.json.Decoder(Answer)


def read(answer: bytes) -> Answer | None:
    """An answer; ``None`` for what is none."""
    try:
        return _answer.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def packed(ids: list[int]) -> bytes | None:
    """Token ids as little-endian u32; ``None`` if one of them is no such number."""
    try:
        return Struct(f"<{len(ids)}I").pack(*ids)
    except StructError:
        return None


class _Offer(msgspec.Struct):
    do_remote_decode: bool = False
    remote_num_tokens: int = 0


_offer = msgspec.json.Decoder(_Offer)


def offered(answer: bytes, streamed: bool) -> tuple[int, bytes, bytes] | None:
    """What a decode engine's whole answer offers to hand back: how many tokens, the parameters as they stand, and the ids of
    the tokens that it generated; ``None`` if it offers nothing, or does not tell those."""
    parts = [payload(event)[1] for event in events(answer)] if streamed else [answer]
    params: bytes | None = None
    ids: list[int] = []
    for part in parts:
        told = read(part) if part.startswith(b"{") else None
        if told is None:
            continue
        params = told.params or params
        for choice in told.choices[:1]:
            ids += choice.token_ids or []
    said = packed(ids) if ids else None
    if params is None or said is None:
        return None
    try:
        offer = _offer.decode(params)
    except (msgspec.DecodeError, RecursionError):
        return None
    return (offer.remote_num_tokens, params, said) if offer.do_remote_decode else None


_IDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:null|\[[\d,\s]*\])')
_PARAMS = re.compile(rb'"kv_transfer_params"\s*:\s*\{')


def hidden(answer: bytes, ids: bool) -> bytes:
    """An answer, or whole events of one, without parameters, and without token ids if ``ids``. In text neither can stand:
    quotes are escaped there."""
    if b'"kv_transfer_params"' in answer and _PARAMS.search(answer):
        answer = _without_params(answer)
    return _IDS.sub(b"", answer) if ids else answer


def _without_params(answer: bytes) -> bytes:
    if answer.lstrip().startswith(b"{"):
        return _cut(answer)
    parts, past = [], 0
    for start, end, past in spans(answer):
        event = answer[start:end]
        body = payload(event)[1]
        parts.append(b"data: " + _cut(body) if _PARAMS.search(event) and body.startswith(b"{") else event)
        parts.append(answer[end:past])
    return b"".join(parts) + answer[past:]


def _cut(told: bytes) -> bytes:
    try:
        return splice(told, ("kv_transfer_params",))
    except BadRequest:
        return told


class Nixl:
    """See the module's head."""

    name = "nixl"
    lease: float | None = 25.0
    tells_cached = True
    answers_params = True

    def takes(self, kind: str, body: bytes) -> bool:
        """One prompt with one answer: the parameters name the blocks of one request, and may be used once. What is asked of
        the prompt itself (echo, its logprobs) needs it computed where the answer comes from."""
        if kind not in LENGTHS:
            return False
        asked = several(body)
        if asked is None or asked.echo or asked.prompt_logprobs is not None:
            return False
        return prompts_in(asked) == 1 and answers_to(asked) == 1

    def steps(self, pair: Pair) -> Steps:
        """The prompt with one token to generate, then the whole with what came of it."""
        answer = yield [Send(Role.PREFILL, one_token(pair, {"kv_transfer_params": pair.lent or ASKED}))]
        told = read(answer)
        if told is None:
            raise ServerError("the prefill worker's answer cannot be read")
        add = {} if told.params is None else {"kv_transfer_params": told.params}
        if pair.tells_ids:
            add["return_token_ids"] = b"true"
        yield [Send(Role.DECODE, splice(pair.body, (), add) if add else pair.body)]

    def blames(self, message: str) -> Role | None:
        """It does not tell: a failed load is an internal error like others."""
        return None

    def abort(self, pair: Pair) -> tuple[str, bytes] | None:
        """A closed connection is an abort."""
        return None


def one_token(pair: Pair, add: dict[str, bytes]) -> bytes:
    """The body with which a prefill engine computes the prompt and nothing else."""
    limits = dict.fromkeys(LENGTHS.get(pair.kind, ("max_tokens",)), b"1")
    told = {"return_token_ids": b"true"} if pair.tells_ids else {}
    if pair.kind != "messages":
        told["ignore_eos"] = b"true"
    return splice(pair.body, ONE_TOKEN, {"stream": b"false", **limits, **told, **add})


PROTOCOL = Nixl()
