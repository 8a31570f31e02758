"""The doctor: why prompts of a session do not begin with the one before, and why sessions do not share their start.

While requests run only references are kept, of a sample of the sessions that fits into a bound of memory. One task examines
them, one at a time and at most so many a second, in steps of which each has a bound whatever clients sent (`gateway.outline`,
`kv_index.causes.Effort`), so that the event loop is never held for longer than one step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator
from time import perf_counter
from typing import Any, NamedTuple

from gateway.examining import OVERHEAD, Measure, Note as Note, Starts, cost_of, lost_of, rate_of
from gateway.findings import Cost, Findings, Totals, normal, place_of
from gateway.outline import Unread, outline
from kv_index.heads import Break
from kv_index.lineage import Lineage, Relation, compare
from kv_index.outlines import Outline, Place

log = logging.getLogger("warmroute")

LARGEST = 512 * 1024
"""Bytes of a body that is examined."""
BACKLOG = 64
"""Prompts that wait, beyond which those of new sessions are left out."""
SESSIONS = 10_000
"""Sessions of which the last breaks are kept, ..."""
LAST = 4
"""... and so many of each."""
CALM = 60.0
"""Seconds with little kept, after which more sessions are sampled."""
REST = 50.0
"""Times as long as an examination took, nothing is examined: of long prompts fewer than ``rate`` a second."""
BREATH = 0.001
"""Seconds between two steps of one."""
_ALL = 1 << 64


class BreakSeen(NamedTuple):
    """One break of one session, for the page of that session."""

    now: float
    cause: str
    place: Place
    between: bool
    lost: int
    estimated: bool


class _Kept:
    """One session's last body that was examined, and the one that waits."""

    __slots__ = ("base", "totals", "waiting")

    def __init__(self, totals: Totals) -> None:
        self.base: Note | None = None
        self.waiting: Note | None = None
        self.totals = totals


class Doctor:
    """See the head of this file.

    ``rate``: examinations a second; ``share``: of the sessions, at most; ``examples``: findings show some characters around a
    break, of tenants that ``shows`` says yes to; ``counted(tenant, cause, tokens)`` is told each break; ``ideal``: nobody
    tells what was cached, so what prompts share counts as found.
    """

    def __init__(
        self,
        *,
        memory: int = 8 * 1024 * 1024,
        rate: float = 10.0,
        share: float = 1.0,
        examples: bool = False,
        shows: Callable[[str], bool] = lambda tenant: True,
        counted: Callable[[str, str, int], None] = lambda tenant, cause, tokens: None,
        measure: Measure | None = None,
        ideal: bool = False,
    ) -> None:
        self.memory = memory
        self.rate = rate
        self.most_share = share
        self.share = share
        """Of the sessions that are sampled now."""
        self._bodies = 0
        self._held_back = 0
        self.findings = Findings(examples, shows)
        self.skipped: Counter[str] = Counter()
        """Prompts that were not examined, by reason."""
        self.breaks_skipped = 0
        """Of those, how many the gateway saw break."""
        self._bar = int(share * _ALL)
        self._counted = counted
        self._measure = measure
        self._ideal = ideal
        self._kept: dict[int, _Kept] = {}
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._breaks: OrderedDict[int, deque[BreakSeen]] = OrderedDict()
        self._starts = Starts(memory // 4, measure)
        self._under_way = False
        self._now = 0.0
        self._calm: float | None = None

    def reconfigure(self, memory: int, rate: float, share: float, examples: bool) -> None:
        """Other bounds from here on."""
        self.memory, self.rate, self.most_share = memory, rate, share
        self._starts.memory = memory // 4
        self.share = min(self.share, share)
        self._bar = int(self.share * _ALL)
        self.findings.examples = examples
        self._halve()

    @property
    def held(self) -> int:
        """Bytes of bodies that are kept or held by requests, with some for each session and each start."""
        return self._bodies + self._starts.size + self._held_back

    # -- while requests run -------------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether more waits for it than it will have time for soon."""
        return len(self._queue) > BACKLOG

    def wants(self, session: int, size: int) -> bool:
        """Whether a body of that session, of so many bytes, is to be held until its request ends: `begun`, then `over`.

        One that is not held leaves nothing of its session: what comes next does not follow what was kept.
        """
        if session >= self._bar:
            return False
        if 0 < size <= LARGEST and self.held + size <= self.memory:
            return True
        reason = "too large" if size > LARGEST else "memory" if size else "not held"
        self.skipped[reason] += 1
        kept = self._kept.get(session)
        if kept is not None and kept.waiting is not None:
            self._skip(reason, kept.waiting)
        self._drop(session)
        if reason == "memory" and 2 * self._bodies > self.memory:
            # It is what is kept that fills it, not what runs.
            self._sample_less()
        return False

    def begun(self, size: int) -> None:
        """A request holds a body of so many bytes, until it is `over`."""
        self._held_back += size

    def over(self, size: int) -> None:
        """It holds it no more."""
        self._held_back -= size

    def seen(self, note: Note) -> None:
        """A request ended. Stores a reference; never raises."""
        session = note.session
        self._now = note.now
        if session >= self._bar:
            self._skip("not sampled", note)
            return
        kept = self._kept.get(session)
        size = len(note.body)
        if size > LARGEST or not size:
            self._skip("too large" if size else "not held", note)
            if kept is not None:
                # Whatever comes next does not follow what is kept.
                self._drop(session)
            return
        if kept is None:
            kept = self._kept[session] = _Kept(self.findings.of(note.tenant, note.model))
            self._bodies += OVERHEAD
        elif kept.waiting is not None:
            self._skip("too many", kept.waiting)
            self._rebase(kept, kept.waiting)
        self._bodies += size
        if note.shared_tokens is None and note.before_tokens is not None and kept.base is not None and not note.new:
            # It extends the one before: the gateway knows without looking at bodies.
            kept.waiting = None
            self._rebase(kept, note)
            totals = kept.totals
            totals.examined += 1
            if note.cached_tokens is not None:
                totals.cached = note.cached_tokens + (totals.cached or 0)
        else:
            kept.waiting = note
            self._queue[session] = None
            if note.shared_tokens is not None:
                # A break goes before sessions that begin.
                self._queue.move_to_end(session, last=False)
        if self.held > self.memory:
            self._halve()

    def _rebase(self, kept: _Kept, note: Note) -> None:
        if kept.base is not None:
            self._bodies -= len(kept.base.body)
        kept.base = note

    def _skip(self, reason: str, note: Note) -> None:
        self.skipped[reason] += 1
        if note.shared_tokens is not None:
            self.breaks_skipped += 1

    def forget(self, session: int) -> None:
        """The session ended."""
        self._drop(session)
        self._breaks.pop(session, None)

    def _drop(self, session: int) -> None:
        kept = self._kept.pop(session, None)
        self._queue.pop(session, None)
        if kept is not None:
            self._bodies -= OVERHEAD + sum(len(note.body) for note in (kept.base, kept.waiting) if note is not None)

    def _halve(self) -> None:
        """Sample fewer sessions until what is kept fits."""
        while self.held > self.memory and self._kept:
            self._sample_less()

    def _sample_less(self) -> None:
        self._calm = None
        self.share /= 2
        self._bar = int(self.share * _ALL)
        for session in [session for session in self._kept if session >= self._bar]:
            kept = self._kept[session]
            if kept.waiting is not None:
                self._skip("not sampled", kept.waiting)
            self._drop(session)

    def _adapt(self) -> None:
        """Sample more of them again when little was kept for a while."""
        if self.share >= self.most_share or self.held * 4 > self.memory:
            self._calm = None
        elif self._calm is None:
            self._calm = self._now
        elif self._now - self._calm >= CALM:
            self.share = min(self.most_share, max(self.share * 2, 1 / _ALL))
            self._bar = int(self.share * _ALL)
            self._calm = self._now

    # -- examining ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Examine until cancelled."""
        while True:
            begun, spent = perf_counter(), 0.0
            for _ in self._examination():
                spent += perf_counter() - begun
                await asyncio.sleep(BREATH)
                begun = perf_counter()
            self._adapt()
            await asyncio.sleep(max(1 / self.rate, REST * (spent + perf_counter() - begun)))

    def examine(self) -> bool:
        """One examination in one go, if a prompt waits for it; whether one did. Never raises."""
        waits = bool(self._queue)
        for _ in self._examination():
            pass
        return waits

    def _examination(self) -> Generator[None, None, None]:
        """The steps of one examination; yields between them. Never raises."""
        if not self._queue:
            return
        session, _ = self._queue.popitem(last=False)
        kept = self._kept[session]
        note, base = kept.waiting, kept.base
        kept.waiting = None
        if note is None:
            return
        self._rebase(kept, note)
        self._under_way = True
        try:
            after = outline(note.kind, note.body, note.thinking)
            yield
            if base is None or note.new:
                yield from self._begins(note, after, kept.totals)
            else:
                yield from self._goes_on(base, note, after, kept.totals)
            kept.totals.examined += 1
            kept.totals.hit(note.cached_tokens)
        except Unread as error:
            self._skip(error.reason, note)
        except RecursionError:
            self._skip("deep", note)
        except Exception:
            # A defect of the doctor's must not end it; what it was is in the log, without a word of the prompt.
            self._skip("defect", note)
            log.exception("examining a prompt failed")
        finally:
            self._under_way = False
        if self.held > self.memory:
            self._halve()

    def _begins(self, note: Note, after: Outline, totals: Totals) -> Generator[None, None, None]:
        hit, found = yield from self._starts.add(note, after)
        if found is not None:
            self._record(note, found[0], 0, found[1], True)
        if self._ideal:
            totals.hit(found[1].shared if found is not None else round(hit * rate_of(note, after)))

    def _goes_on(self, base: Note, note: Note, after: Outline, totals: Totals) -> Generator[None, None, None]:
        before = outline(base.kind, base.body, base.thinking)
        yield
        found = compare(before, after)
        yield
        if self._ideal:
            totals.hit(self._shared(base, note, before, after, found))
        if found.relation is Relation.RETRY:
            totals.retries += 1
        elif found.relation is Relation.BRANCH:
            totals.branches += 1
        elif found.broken is None:
            if note.shared_tokens is not None:
                totals.unexplained += 1
                totals.unexplained_tokens += lost_of(note) or 0
        else:
            cost = yield from cost_of(base, note, before, after, found.broken, self._measure)
            self._record(note, found.broken, before.first, cost, False)

    def _shared(self, base: Note, note: Note, before: Outline, after: Outline, found: Lineage) -> int:
        """Tokens of ``note`` that a cache which loses nothing would give."""
        measured = self._measure.lineage(base, note) if self._measure is not None else None
        if measured is not None:
            return measured[0]
        if found.relation is Relation.BRANCH:
            return 0
        size = min(before.size, after.size) if found.broken is None else found.broken.shared
        return round(size * rate_of(note, after))

    def _record(self, note: Note, broken: Break, first: int, cost: Cost, between: bool) -> None:
        place = normal(broken.place, broken.cause, first)
        self.findings.add(note.tenant, note.model, note.session, broken, place, cost, between, note.now)
        own = self._breaks.get(note.session)
        if own is None:
            if len(self._breaks) >= SESSIONS:
                self._breaks.popitem(last=False)
            own = self._breaks[note.session] = deque(maxlen=LAST)
        name = broken.place.name[:64]
        own.append(
            BreakSeen(
                note.now, broken.cause.value, broken.place._replace(name=name), between, cost.lost, cost.estimated
            )
        )
        self._counted(note.tenant, broken.cause.value, cost.lost)

    # -- what is told -------------------------------------------------------------------------------------------------

    def breaks(self, session: int) -> list[dict[str, Any]]:
        """The last breaks of a session, the latest first."""
        return [
            {
                "time": each.now,
                "cause": each.cause,
                "place": place_of(each.place),
                "between": each.between,
                "tokens_lost": each.lost,
                "estimated": each.estimated,
            }
            for each in reversed(self._breaks.get(session, ()))
        ]

    def report(self) -> dict[str, Any]:
        """What ``GET /doctor`` answers: findings, the costliest first; and how much was examined of what was seen."""
        totals = self.findings.totals
        tenants: dict[str, dict[str, Any]] = {}
        for (tenant, model), each in totals.items():
            tenants.setdefault(tenant, {})[model] = each.told
        return {
            "findings": self.findings.ranked(),
            "examined": sum(each.examined for each in totals.values()),
            "skipped": self.skipped.total(),
            "skipped_by": dict(self.skipped),
            "breaks": {"examined": sum(each.breaks for each in totals.values()), "skipped": self.breaks_skipped},
            "waiting": len(self._queue) + self._under_way,
            "share": self.share,
            "tenants": tenants,
        }
