"""Prefill/decode protocols: how two engines are made to serve one request. One protocol a file.

A protocol is an object called ``PROTOCOL`` in a module of this package. Its ``steps`` is a generator: it yields lists of
`Send`, of which one element is a step by itself and two are sent at the same time, and it is given the prefill engine's
answer after a step that was sent to that one alone. Nothing here opens a socket: who runs the steps (`gateway.legs`) owns
timeouts, retries, aborts and counting once for all of them.
"""

from collections.abc import Generator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple, Protocol as Typed

import msgspec
from msgspec import UNSET, Raw, UnsetType

from policies.base import Role

BOOTSTRAP_PORT = 8998
"""Of a prefill engine's bootstrap server, by default: SGLang's, and that of vLLM's MooncakeConnector."""


class End(NamedTuple):
    """One of the two engines, as protocols need to know it."""

    host: str
    rank: int = 0
    ranks: int = 1
    bootstrap: tuple[str, int] | None = None
    """Host and port of its bootstrap server, as the other engine reaches it."""
    engine_id: str | None = None
    """The identity of its present process, where the protocol names it."""


@dataclass(slots=True)
class Pair:
    """What a protocol is told of one request."""

    prefill: End
    decode: End
    kind: str
    """The route's."""
    body: bytes
    """As the decode engine would get it without a partner: an object, without guarded fields."""
    request_id: str
    draw: int
    """64 bits, another one for each attempt."""
    lent: bytes | None = None
    """The parameters that the decode engine of the session's last turn answered with, to be given to the prefill engine."""
    tells_ids: bool = False
    """Both engines are to tell the token ids of what they computed."""


class Send(NamedTuple):
    """One request to one of the two."""

    role: Role
    body: bytes


Steps = Generator[list[Send], bytes, None]
"""Yields what to send, is sent the prefill engine's whole answer. Raises `WorkerFault` when that answer is of no use."""


class Protocol(Typed):
    """One way in which engines hand over KV."""

    name: str
    lease: float | None
    """Seconds after the prefill engine's answer within which the decode engine must have its part; ``None``: no limit."""

    tells_cached: bool
    """Whether the decode engine reports the prefill engine's cached tokens; else it may report what was handed over as such."""

    answers_params: bool
    """Whether the decode engine's answer may tell where its KV can be fetched."""

    def takes(self, kind: str, body: bytes) -> bool:
        """Whether a request of that route and body can be split."""
        ...

    def steps(self, pair: Pair) -> Steps:
        """What to send."""
        ...

    def blames(self, message: str) -> Role | None:
        """Whose failure an error of the decode engine tells of; ``None`` where it does not tell."""
        ...

    def abort(self, pair: Pair) -> tuple[str, bytes] | None:
        """Path and body of the explicit abort of this request; ``None``: closing the connection is all there is."""
        ...


def all_protocols() -> dict[str, Protocol]:
    """Every protocol of this package by name."""
    found: dict[str, Protocol] = {}
    for module in sorted(iter_modules(__path__), key=lambda module: module.name):
        protocol = getattr(import_module(f"{__name__}.{module.name}"), "PROTOCOL", None)
        if protocol is not None:
            found[protocol.name] = protocol
    return found


def protocol_of(engine: str) -> str | None:
    """The protocol that engines of that kind speak, as far as their kind tells."""
    return {"vllm": "nixl", "sglang": "sglang", "tensorrt_llm": "tensorrt_llm"}.get(engine)


_mapping = msgspec.json.Decoder(dict[str, Raw])
_NO = (b"null", b"false")


def wants(body: bytes, name: str) -> bool:
    """Whether ``body`` asks for what ``name`` stands for: neither absent nor null nor false, for one of several at least."""
    if name.encode() not in body:
        return False
    try:
        told = _mapping.decode(body).get(name)
        if told is None or bytes(told) in _NO:
            return False
        return not bytes(told).startswith(b"[") or any(bytes(each) not in _NO for each in _list.decode(told))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class Several(msgspec.Struct):
    """What makes of a request several, or asks for what was computed of its prompt."""

    n: int | None = None
    best_of: int | None = None
    prompt: Raw | UnsetType = UNSET
    text: Raw | UnsetType = UNSET
    input_ids: Raw | UnsetType = UNSET
    sampling_params: Raw | UnsetType = UNSET
    echo: bool | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_several = msgspec.json.Decoder(Several)
_list = msgspec.json.Decoder(list[Raw])


class _Sampling(msgspec.Struct):
    n: int | None = None


_sampling = msgspec.json.Decoder(_Sampling | list[Raw] | None)


def several(body: bytes) -> Several | None:
    """Those fields of ``body``; ``None`` if they are not of the types that engines take."""
    try:
        return _several.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def prompts_in(asked: Several) -> int:
    """How many prompts the request holds."""
    for field in (asked.prompt, asked.text, asked.input_ids):
        if isinstance(field, UnsetType) or bytes(memoryview(field)[:1]) != b"[":
            continue
        try:
            rows = _list.decode(field)
        except (msgspec.DecodeError, RecursionError):
            return 1
        if rows and bytes(memoryview(rows[0])[:1]) in (b'"', b"["):
            return len(rows)
    return 1


def answers_to(asked: Several) -> int:
    """How many answers each prompt is to have."""
    if asked.n is not None or isinstance(asked.sampling_params, UnsetType):
        return max(asked.n or 1, asked.best_of or 1)
    try:
        sampling = _sampling.decode(asked.sampling_params)
    except (msgspec.DecodeError, RecursionError):
        return 1
    return (sampling.n or 1) if isinstance(sampling, _Sampling) else 1
