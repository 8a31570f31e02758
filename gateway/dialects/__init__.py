"""Request kinds: what to read of a body, what to splice into it, how errors look. One dialect a file.

A dialect is an object called ``DIALECT`` in a module of this package. It lists its routes; the gateway finds it by them.
Reading is one typed decode; the body itself is never serialised again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple, Protocol

from msgspec import Raw

from gateway.errors import Fault


class Usage(NamedTuple):
    """Token counts as the engine reports them; ``None`` where it does not say."""

    prompt: int | None
    completion: int | None
    cached: int | None


MARKS = 64
"""How many message ends before the last are told: a turn adds an answer, and for each tool two messages more."""


class Prompt:
    """The canonical prompt, in the order in which a chat template renders it.

    ``parts`` are the pieces that ``text`` is joined from; each of ``ends`` is how many of them stand before the end of a
    message, and the last message ends the prompt. Leading system messages are no ends: they are shared, not said.
    ``asks``: the last message is a user's, so that what is said up to here stays as it is when thinking is dropped.
    """

    __slots__ = ("_ends", "_parts", "asks", "messages", "text")

    def __init__(
        self,
        parts: Sequence[bytes | Raw | str],
        ends: Sequence[int],
        text: bytes | None = None,
        asks: bool = False,
        messages: int | None = None,
    ) -> None:
        self.text = b"".join(parts) if text is None else text  # type: ignore[arg-type]
        self.asks = asks
        self.messages = len(ends) if messages is None else messages
        """How many messages it has, those of the system included."""
        self._parts = parts
        self._ends = ends

    @property
    def says(self) -> bool:
        """Whether anybody but the system said anything."""
        return bool(self._ends)

    def earlier_ends(self) -> Iterator[int]:
        """Offsets in ``text`` at which the `MARKS` messages before the last end, the latest first.

        ``text`` up to there does not depend on what follows it, as long as no thinking is dropped before it.
        """
        ends = self._ends
        if len(ends) < 2:
            return
        offset, end = len(self.text), ends[-1]
        for start in ends[-2 : -MARKS - 2 : -1]:
            offset -= sum([_size(part) for part in self._parts[start:end]])
            end = start
            yield offset


def _size(part: bytes | Raw | str) -> int:
    if isinstance(part, str):
        return len(part) if part.isascii() else len(part.encode("utf-8", "surrogatepass"))
    return len(memoryview(part))


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
        "conversation",
        "guarded",
        "make_prompt",
        "model",
        "namespace",
        "opaque",
        "previous",
        "session",
        "stream",
    )

    def __init__(self) -> None:
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
        self.previous: str | None = None
        """``previous_response_id``: state that one worker has."""
        self.conversation: str | None = None
        """``conversation``: state that one worker has."""
        self.make_prompt: Callable[[bool], Prompt] | None = None
        """Builds the canonical prompt, told whether the template keeps all thinking; ``None`` when there is none."""


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

    def error_event(self, fault: Fault) -> bytes:
        """Complete SSE events that end a stream which failed."""
        ...

    def failure(self, event: bytes) -> tuple[int, str] | None:
        """(status, message) if the first event of a stream says that nothing was begun."""
        ...

    def usage(self, tail: bytes, streamed: bool) -> Usage | None:
        """Token counts from the last bytes of an answer."""
        ...


def all_dialects() -> dict[str, Dialect]:
    """Every dialect of this package, by name."""
    found: dict[str, Dialect] = {}
    for module in sorted(iter_modules(__path__), key=lambda module: module.name):
        dialect = getattr(import_module(f"{__name__}.{module.name}"), "DIALECT", None)
        if dialect is not None:
            found[dialect.name] = dialect
    return found
