"""Request kinds: what to read of a body, what to splice into it, how errors look. One dialect a file.

A dialect is an object called ``DIALECT`` in a module of this package. It lists its routes; the gateway finds it by them.
Reading is one typed decode; the body itself is never serialised again.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple, Protocol

from gateway.errors import Fault
from gateway.http.sse import events
from gateway.prompt import Prompt, Thinking


class Usage(NamedTuple):
    """Token counts as the engine reports them; ``None`` where it does not say."""

    prompt: int | None
    completion: int | None
    cached: int | None


class Route(NamedTuple):
    """One path of a dialect."""

    kind: str
    """Short word, a metric label."""
    generates: bool = True
    """Whether an answer is generated token by token; otherwise the request is routed by load alone."""
    opaque: bool = False
    """Whether the body is not JSON that we understand."""
    methods: tuple[bytes, ...] = (b"POST",)


class Reading:
    """What routing needs of one request's body."""

    __slots__ = (
        "apart",
        "canonical",
        "conversation",
        "field",
        "guarded",
        "ids",
        "labelled",
        "make_prompt",
        "model",
        "named",
        "namespace",
        "opaque",
        "opened",
        "previous",
        "ranked",
        "salt",
        "session",
        "slotted",
        "stateful",
        "stream",
        "tool",
        "untold",
    )

    def __init__(self) -> None:
        self.canonical: tuple[str, ...] = ()
        """How its body was brought into one form before it was read."""
        self.model: str | None = None
        self.opaque = False
        """The body was not read: any worker may do."""
        self.stream = False
        self.guarded: tuple[str, ...] = ()
        """Fields found that only the gateway may set."""
        self.namespace: bytes = b""
        """Adapter, salt: what separates caches of one model."""
        self.session: Callable[[], Iterable[tuple[str, str]]] = tuple
        """(source, value) of each of the body's own namings of its session, the most telling first."""
        self.field: Callable[[str], str | None] = no_field
        """A field of the body by which an operator may have sessions told apart (`fields.NAMING`)."""
        self.labelled = False
        """The body has a ``session_id`` of its own."""
        self.stateful: str | None = None
        """The session of the engine's that the client drives by itself (SGLang's ``session_params``); empty if it is not
        named as it should be."""
        self.named: str | None = None
        """The name that the client gave the request (SGLang's ``rid``)."""
        self.opened: object | None = None
        """The engine's own session that it is a turn of, where the gateway knows it."""
        self.ranked = False
        """The client gave the request a priority."""
        self.slotted = False
        """The client chose a slot of the engine's (llama.cpp's ``id_slot``)."""
        self.tool: Callable[[], str | None] | None = None
        """The tool whose result this prompt brings; ``None``: a user spoke."""
        self.previous: str | None = None
        """``previous_response_id``: state that one worker has."""
        self.conversation: str | None = None
        """``conversation``: state that one worker has."""
        self.salt: Callable[[], str | None] | None = None
        """The client's own ``cache_salt``; ``None`` when it gave none."""
        self.apart = False
        """Its cache is kept apart by something that engines do not tell in their events."""
        self.ids: Callable[[], bytes | None] | None = None
        """The prompt's token ids, little-endian u32 each, where the client gave those: read when first asked for."""
        self.untold = False
        """It streams and did not ask for usage, in a dialect in which the gateway may."""
        self.make_prompt: Callable[[Thinking], Prompt] | None = None
        """Builds the canonical prompt, told what the template does with thinking; ``None`` when there is none."""


def no_field(name: str) -> str | None:
    """Of a body that was not read."""
    return None


class Dialect(Protocol):
    """How one family of clients speaks."""

    name: str
    routes: Mapping[bytes, Route]

    def read(self, route: Route, body: bytes, light: bool = False) -> Reading:
        """Read a body. Raises `BadRequest` only for what no engine could read.

        ``light``: nobody is expected to ask for the prompt, so reading it may wait until somebody does.
        """
        ...

    def error(self, fault: Fault) -> bytes:
        """A JSON body."""
        ...

    def error_event(self, fault: Fault, route: Route) -> bytes:
        """Complete SSE events that end a stream which failed."""
        ...

    def failure(self, event: bytes) -> tuple[int, str] | None:
        """(status, message) if the first event of a stream says that nothing was begun."""
        ...

    def opens(self, event: bytes) -> bool:
        """Whether an event of a stream tells nothing yet that was generated."""
        ...

    def usage(self, tail: bytes, streamed: bool) -> Usage | None:
        """Token counts from the last bytes of an answer."""
        ...


def broken(dialect: Dialect, tail: bytes) -> tuple[int, bytes] | None:
    """The status and the error event with which an engine itself ended a stream that had begun well; ``None``: it did not."""
    if b'"error"' not in tail and b'"abort"' not in tail:
        return None
    for event in events(tail):
        failure = dialect.failure(event)
        if failure is not None:
            return failure[0], event
    return None


def all_dialects() -> dict[str, Dialect]:
    """Every dialect of this package, by name."""
    found: dict[str, Dialect] = {}
    for module in sorted(iter_modules(__path__), key=lambda module: module.name):
        dialect = getattr(import_module(f"{__name__}.{module.name}"), "DIALECT", None)
        if dialect is not None:
            found[dialect.name] = dialect
    return found
