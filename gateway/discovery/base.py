"""What a source of workers has to do, and what it is given.

``watch()`` yields the complete list of its workers, for the first time as soon as it is known and then whenever it changes.
What a source can get over by itself it tells its `Contact` and goes on; what it cannot it raises as `Lost`, and is asked to
``watch()`` again after a pause. Neither changes the list: what is known stays until something else is known, for an API server
or a name server that is away says nothing about engines. That a list is empty has to be said, not to be guessed from silence.

A worker that is not in the list any more drains and is forgotten. One that is in the list but not `Found.serving` (its pod
terminates, or is not ready) drains too, and serves again when the source says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gateway.config_reader import duration
from gateway.workers import WorkerSpec, id_of

if TYPE_CHECKING:
    from gateway.config import WorkerConfig

MOST = 10_000
"""Workers of one source."""


class BadOption(ValueError):
    """``option`` of a source is unknown, missing or wrong; dots lead into it."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


class Lost(Exception):
    """A source cannot be asked, or what it says cannot be used. ``reason``: a word of a small set, for metrics.

    ``again``: seconds after which it may be asked again, if it says so.
    """

    def __init__(self, reason: str, message: str, again: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.again = again


@dataclass(frozen=True, slots=True)
class Found:
    """One worker of a list."""

    spec: WorkerSpec
    serving: bool = True
    """Whether it is to get anything new."""
    identity: str | None = None
    """Who is at that address, if the source tells: another one has nothing of what its forerunner held."""
    id: str = field(init=False, compare=False, default="")
    """What the worker is called."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", id_of(self.spec.url))


class Contact:
    """How a source gets on with whom it asks; ``part``: of what it asks, if that is several things.

    ``failed`` is told of each failure, and whether it is another one than before; ``recovered`` of the end of the last.
    """

    def __init__(
        self,
        failed: Callable[[Lost, bool], None] = lambda lost, new: None,
        recovered: Callable[[], None] = lambda: None,
    ) -> None:
        self.heard: float | None = None
        """When it was last known that the list is what there is, seconds on the monotonic clock."""
        self.troubles: dict[str, Lost] = {}
        """What is wrong now, by part."""
        self._failed = failed
        self._recovered = recovered

    def well(self, part: str = "") -> None:
        """It answered."""
        trouble = self.troubles.pop(part, None)
        if not self.troubles:
            self.heard = monotonic()
            if trouble is not None:
                self._recovered()

    def lost(self, lost: Lost, part: str = "") -> None:
        """It did not, or not so that it can be used."""
        before = self.troubles.get(part)
        self.troubles[part] = lost
        self._failed(lost, before is None or before.message != lost.message)


class Template:
    """Makes workers: ``told`` is what the configuration says of all of them, ``protocol`` that of workers that name none."""

    def __init__(self, told: WorkerConfig | None = None, protocol: str | None = None) -> None:
        self.told = told
        self.protocol = protocol

    def spec(self, url: str, **said: Any) -> WorkerSpec:
        """A worker at ``url``, of which ``said`` is known. Raises `ValueError` for what cannot be one.

        ``{host}`` in addresses of the template is the worker's own host.
        """
        from gateway.config import WorkerConfig

        told = self.told or WorkerConfig("")
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host

        def here(text: str | None) -> str | None:
            return None if text is None else text.replace("{host}", host)

        events = replace(told.events, endpoint=here(told.events.endpoint), replay=here(told.events.replay))
        made = replace(told, url=url, events=events, bootstrap=here(told.bootstrap), kv_source=here(told.kv_source))
        return replace(made, **said).spec(self.protocol)


class Source:
    """One source. Options are its constructor's; it opens nothing before it is watched."""

    template: Template
    contact: Contact
    """Set by whoever runs it, before it is watched."""

    def watch(self) -> AsyncIterator[list[Found]]:
        """Lists, see the module's head. Raises `Lost`."""
        raise NotImplementedError


def listed(found: list[Found]) -> list[Found]:
    """``found`` with each worker once: who serves before who does not. Raises `Lost` if they are too many."""
    by_id: dict[str, Found] = {}
    for each in found:
        known = by_id.get(each.id)
        if known is None or (each.serving and not known.serving):
            by_id[each.id] = each
    if len(by_id) > MOST:
        raise Lost("too_many", f"it lists {len(by_id)} workers: at most {MOST} of one source are followed")
    return [by_id[id_] for id_ in sorted(by_id)]


# -- options -----------------------------------------------------------------------------------------------------------


def text(option: str, value: Any) -> str:
    """A word or a name. Raises `BadOption`."""
    if not isinstance(value, str) or not value.strip():
        raise BadOption(f"{option} must be some text, not {value!r}", option)
    return value


def seconds(option: str, value: Any, low: float, high: float) -> float:
    """A duration: a number of seconds, or ``500ms``, ``30s``, ``5m``, ``1h``. Raises `BadOption`."""
    found = None if isinstance(value, bool) else duration(str(value))
    if found is None or not low <= found <= high:
        raise BadOption(f"{option} must be a duration from {low:g}s to {high:g}s, such as 30s, not {value!r}", option)
    return found


def port(option: str, value: Any) -> int:
    """Raises `BadOption`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
        raise BadOption(f"{option} must be a port from 1 to 65535, not {value!r}", option)
    return value


def one_of(option: str, value: Any, known: tuple[str, ...]) -> str:
    """Raises `BadOption`."""
    if value not in known:
        raise BadOption(f"{option} must be one of {', '.join(known)}, not {value!r}", option)
    return str(value)
