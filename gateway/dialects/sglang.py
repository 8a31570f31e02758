"""SGLang's native ``/generate``."""

from functools import cache

import msgspec
from msgspec import UNSET, UnsetType

from gateway.dialects import Reading, Route, Usage
from gateway.dialects.chat import text_or_tokens, token_ids
from gateway.dialects.fields import Common, Field, read_common, value_of
from gateway.dialects.openai import error_in, namespace_of
from gateway.errors import Fault
from gateway.http.sse import payload
from gateway.prompt import Prompt


class Generate(Common):
    """``/generate``."""

    text: Field = UNSET
    input_ids: Field = UNSET
    image_data: Field = UNSET


_generate = msgspec.json.Decoder(Generate)


class SGLang:
    """Text or token ids in, cumulative text and ``meta_info`` out."""

    name = "sglang"
    routes = {b"/generate": Route("generate")}

    def read(self, route: Route, body: bytes, light: bool = False) -> Reading:
        """One typed decode; batches are routed by their first prompt."""
        reading = Reading()
        request = read_common(_generate, reading, body, True)
        if request is None:
            return reading
        reading.namespace = namespace_of(request)
        reading.ids = cache(lambda: token_ids(request.input_ids))
        reading.make_prompt = lambda thinking: _prompt(request)
        return reading

    def error(self, fault: Fault) -> bytes:
        """``{"error": {"message", "type", "code"}}``."""
        error = {"message": fault.message, "type": fault.kind, "code": fault.status}
        return msgspec.json.encode({"error": error})

    def error_event(self, fault: Fault, route: Route) -> bytes:
        """An error event and no ``[DONE]``."""
        return b"data: " + self.error(fault) + b"\n\n"

    def opens(self, event: bytes) -> bool:
        """Its first event has the first token."""
        return False

    def failure(self, event: bytes) -> tuple[int, str] | None:
        """An error object in the first event."""
        return error_in(payload(event)[1])

    def usage(self, tail: bytes, streamed: bool) -> Usage | None:
        """The last event's ``meta_info``: its counts are cumulative."""
        counts = {key: _last_number(tail, key) for key in (b"prompt_tokens", b"completion_tokens", b"cached_tokens")}
        if counts[b"prompt_tokens"] is None:
            return None
        return Usage(counts[b"prompt_tokens"], counts[b"completion_tokens"], counts[b"cached_tokens"])


def _last_number(tail: bytes, key: bytes) -> int | None:
    at = tail.rfind(b'"' + key + b'":')
    if at < 0:
        return None
    rest = tail[at + len(key) + 3 : at + len(key) + 24].lstrip()
    digits = rest[: len(rest) - len(rest.lstrip(b"0123456789"))]
    return int(digits) if digits else None


def _prompt(request: Generate) -> Prompt:
    for field in (request.input_ids, request.text):
        if not isinstance(field, UnsetType):
            return Prompt([text_or_tokens(value_of(field))], [])
    return Prompt([], [])


DIALECT = SGLang()
