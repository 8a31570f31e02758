"""PrefixIndex: what every target holds of a prompt, from the best source that can be believed.

Per target a ladder. On *exact* the engine's own events tell its cache (`kv_index.blocks`); on *predicted* it is what was
sent there (`kv_index.radix`), bounded by the cache's size; on *session*, only what a session itself left at its home; on
*none* nothing, for the engine's answers contradict everything else. Evidence moves a target: down when events have gaps
that cannot be filled, when traffic makes no events, when reports of cached tokens disagree; up again when they agree for
long enough. It takes more to go up than to stay.

A prompt that was just sent is held where it was sent, before any event says so (`in flight`): a burst that shares a
brand-new start goes together if waiting for it is cheaper than computing it twice, for what is in front of it there is in
that target's wait.

How large a cache is in fact is learned from the reports too. A session that comes back finds its prompt if less was
used meanwhile than the cache holds, and finds part of it if a little more was: the tokens found plus what was used
are the size of the cache. (The distance between two uses of a page in an LRU stack: Mattson et al., 1970.)
"""

from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from math import inf
from typing import NamedTuple

from kv_index.blocks import BlockIndex
from kv_index.pages import PAGE_TOKENS
from kv_index.radix import Node, RadixIndex

DOUBTED = 256
"""Tokens below which a difference between belief and report says nothing."""
NOTHING = 3
"""Reports in a row that find nothing where much was believed, after which nothing is."""
JUDGED = 16
"""Reports that are looked back at."""
WRONG = 8
"""Of those, how many must disagree to move a target down."""
AGREED = 8
"""Reports that must agree in a row to move it up."""
PATIENCE = 2.0
"""Seconds within which computed blocks are to show in events."""
UNHEARD = 5
"""How often they may fail to, in a row."""
SETTLED = 1.0
"""Seconds for which an ended request counts as in flight, at most: its last events may be on their way."""
SWEPT = 10_000
"""Blocks of targets that are gone that are taken out at a time."""
OFTEN = 32
"""Measurements of a cache's size that are made as they come; further ones every `SELDOM` seconds."""
SELDOM = 10.0
CROWDED = 0.02
"""Change of the part of a cache that is ours below which its bound stays."""
LEAST_SHARE = 0.02
"""Of its engine's own figure, how small a cache may seem to be."""


class Rung(StrEnum):
    """What is believed of a target."""

    EXACT = "exact"
    PREDICTED = "predicted"
    SESSION = "session"
    NONE = "none"


class Report(NamedTuple):
    """What one answer says of one prediction; all in tokens."""

    predicted: int
    cached: int
    prompt: int
    routed: int
    """What routing alone would have predicted."""
    exact: int | None = None
    """What events alone would have predicted; ``None`` where they were not asked."""
    at_home: bool = False
    used: float | None = None
    """When the session's last prompt was sent there; ``None`` if that was elsewhere."""
    page: float = float(PAGE_TOKENS)
    """Tokens in a page."""
    block: int = PAGE_TOKENS


class Trust:
    """Why a target stands on its rung."""

    __slots__ = (
        "agreed",
        "awaited",
        "batches",
        "compared",
        "fed",
        "known_size",
        "measured",
        "measured_at",
        "nothing",
        "part",
        "reason",
        "rung",
        "share",
        "stored",
        "strayed",
        "unheard",
        "whole",
        "wrong",
    )

    def __init__(self) -> None:
        self.rung = Rung.PREDICTED
        self.reason = "start"
        self.fed = False
        """Events flow."""
        self.compared = False
        """Prompts come as token ids, with which they can be compared."""
        self.whole = False
        """They tell all that it holds."""
        self.batches = 0
        self.stored = 0
        """Blocks that they told of."""
        self.agreed = 0
        """Reports in a row that agreed with events."""
        self.wrong = 0
        """Bits of the last reports: those that disagreed with events."""
        self.strayed = 0
        """The same, with what was predicted for prompts that are not their session's own."""
        self.nothing = 0
        self.unheard = 0
        self.awaited: tuple[float, int] | None = None
        """When blocks were computed that events have not shown yet, and how many batches there were."""
        self.known_size: int | None = None
        """Pages of its cache, as its engine says."""
        self.share = 1.0
        """The part of that which its answers let us count on."""
        self.part = 1.0
        """Of that, the part that holds what was sent from here, where others send there too."""
        self.measured = 0
        """How often its size was measured."""
        self.measured_at = -inf

    @property
    def quiet(self) -> bool:
        """Whether a report that agrees would tell nothing new."""
        return not (self.fed or self.nothing or self.strayed) and self.rung is Rung.PREDICTED

    @property
    def exact(self) -> bool:
        """Whether its events tell its cache."""
        return self.rung is Rung.EXACT


class Found(NamedTuple):
    """What is believed of one prompt of token ids."""

    tokens: dict[int, int]
    """target -> leading tokens that it holds."""
    restored: Mapping[int, tuple[int, int, int]]
    """target -> how many of those must come from host, disk, shared store."""
    depths: Mapping[int, int]
    """target -> leading pages, by what was routed there."""
    exact: Mapping[int, int]
    """The same as ``tokens``, by events alone."""
    seen: int
    """Leading tokens that some prompt before had, whether anybody holds them still or not."""


class PrefixIndex:
    """See the module's head. ``moved(target, from, to, reason)`` is told of every step on the ladder."""

    def __init__(
        self,
        radix: RadixIndex,
        blocks: BlockIndex,
        moved: Callable[[int, Rung, Rung, str], None] = lambda target, before, after, reason: None,
    ) -> None:
        self.radix = radix
        self.blocks = blocks
        self.moved = moved
        self.lost: Callable[[int], None] = lambda target: None
        """Told when a target holds nothing any more."""
        self.trust: dict[int, Trust] = {}
        self.low: dict[int, Rung] = {}
        """Targets below `Rung.PREDICTED`."""
        self._flying = RadixIndex(64 * 1024 * 1024)
        self._landed: dict[int, deque[tuple[float, bytes, bytes, float]]] = {}
        """target -> (until when it counts, namespace, symbols, when it was sent) of ended requests."""

    # -- reading ----------------------------------------------------------------------------------------------------

    def of(self, target: int) -> Trust:
        """The standing of ``target``."""
        trust = self.trust.get(target)
        if trust is None:
            trust = self.trust[target] = Trust()
        return trust

    def match(
        self, namespace: bytes, symbols: bytes, ids: bytes, start: int, home: int | None, events: bool = True
    ) -> Found:
        """Who holds how much of a prompt of token ids; ``start`` is where its chain begins.

        ``events``: whether engines tell all that keeps its cache apart, so that their events can be compared with it.
        """
        _, depths, pages_seen = self.radix.match(namespace, symbols)
        seen = pages_seen * PAGE_TOKENS
        tokens = {target: pages * PAGE_TOKENS for target, pages in depths.items()}
        for target in [target for target in self.low if target in tokens]:
            if not self.believed(target, home):
                del tokens[target]
        if not events or not any(trust.fed for trust in self.trust.values()):
            return Found(tokens, {}, depths, {}, seen)
        held = self.blocks.match(symbols, ids, start)
        flying = self._flying.match(namespace, symbols).depths
        for target, trust in self.trust.items():
            if not trust.fed:
                continue
            known = held.tokens.get(target, 0)
            if trust.rung is Rung.EXACT:
                known = max(known, flying.get(target, 0) * PAGE_TOKENS)
                if trust.whole:
                    tokens.pop(target, None)
            if known > tokens.get(target, 0) and trust.rung is not Rung.NONE:
                tokens[target] = known
        # Only what is believed has to be brought back.
        restored = {
            target: parts for target, parts in held.restored.items() if tokens.get(target) == held.tokens[target]
        }
        return Found(tokens, restored, depths, held.tokens, seen)

    def believed(self, target: int, home: int | None) -> bool:
        """Whether what was routed to ``target`` counts for a request whose session is at home at ``home``."""
        rung = self.low.get(target)
        return rung is None or (rung is Rung.SESSION and home == target)

    # -- requests ---------------------------------------------------------------------------------------------------

    def sent(self, namespace: bytes, symbols: bytes, target: int, now: float, ids: bool) -> Node:
        """A prompt is being sent to ``target``; pair with `undone` or `landed`. ``ids``: its symbols are chained."""
        place = self.radix.insert(namespace, symbols, target, now)
        self.radix.pin(place, target)
        if ids and (trust := self.trust.get(target)) is not None and trust.fed:
            self._flying.insert(namespace, symbols, target, now)
            if not trust.compared:
                trust.compared = True
                if trust.whole:
                    self._rise(target, trust, "events")
        return place

    def undone(self, namespace: bytes, symbols: bytes, target: int, place: Node, held: int, sent: float) -> None:
        """It did not run there after all; ``held``: pages that were believed before."""
        self.radix.unpin(place, target)
        self.radix.forget(namespace, symbols, target, held, sent)
        self._flying.forget(namespace, symbols, target, 0, sent)

    def landed(self, namespace: bytes, symbols: bytes, target: int, place: Node, sent: float, now: float) -> None:
        """It was answered."""
        self.radix.unpin(place, target)
        trust = self.trust.get(target)
        if trust is not None and trust.fed:
            self._landed.setdefault(target, deque()).append((now + SETTLED, namespace, symbols, sent))

    def sweep(self, now: float) -> None:
        """Upkeep, some times a second."""
        for target in [target for target, landed in self._landed.items() if landed[0][0] <= now]:
            self._arrived(target, now)
        self.blocks.sweep(SWEPT)
        for target, trust in self.trust.items():
            if trust.awaited is not None and now - trust.awaited[0] > PATIENCE:
                silent = trust.awaited[1] == trust.batches
                trust.awaited = None
                trust.unheard = trust.unheard + 1 if silent else 0
                if trust.unheard >= UNHEARD and trust.rung is Rung.EXACT:
                    self._move(target, Rung.PREDICTED, "no_events")

    # -- events -----------------------------------------------------------------------------------------------------

    def fed(self, target: int, size: int | None, compared: bool = True) -> None:
        """Events of ``target`` are listened to; its blocks have ``size`` tokens, if that is known. ``compared``: its prompts
        come as token ids, with which they can be compared; the first that does shows it too."""
        self.blocks.add(target, size)
        trust = self.of(target)
        trust.fed, trust.compared = True, compared

    def heard(self, target: int, whole: bool, cleared: bool, stored: int = 0) -> None:
        """A batch that told of so many ``stored`` blocks was applied to `blocks`; ``whole``: nothing is missing since its
        engine held nothing."""
        trust = self.of(target)
        trust.batches += 1
        trust.stored += stored
        trust.unheard = 0
        if target in self._landed:
            self._arrived(target, -inf)
        if cleared:
            self.emptied(target)
        if whole and not trust.whole:
            trust.whole = True
            trust.wrong = 0
            self._rise(target, trust, "events")
        elif trust.rung is Rung.PREDICTED and trust.reason == "no_events" and trust.whole:
            self._rise(target, trust, "events")

    def _arrived(self, target: int, now: float) -> None:
        """Of requests that ended, events tell now, or will not."""
        left: deque[tuple[float, bytes, bytes, float]] = deque()
        for each in self._landed[target]:
            until, namespace, symbols, sent = each
            if until <= now or self.blocks.holds(target, symbols):
                self._flying.forget(namespace, symbols, target, 0, sent)
            else:
                left.append(each)
        if left:
            self._landed[target] = left
        else:
            del self._landed[target]

    def silenced(self, target: int, reason: str, forget: bool) -> None:
        """Events of ``target`` cannot be relied on, as of now; ``forget``: what they told is void."""
        trust = self.of(target)
        trust.whole = False
        trust.agreed = 0
        if forget:
            # Blocks of another process may be of another size.
            self.blocks.drop(target)
            self.blocks.add(target)
        if trust.rung is Rung.EXACT:
            self._move(target, Rung.PREDICTED, reason)

    def deaf(self, target: int) -> None:
        """Nobody listens to ``target`` any more."""
        if target not in self.trust:
            return
        self.silenced(target, "not_subscribed", True)
        self.blocks.drop(target)
        self.of(target).fed = False

    # -- reports ----------------------------------------------------------------------------------------------------

    def report(self, target: int, told: Report, now: float) -> None:
        """What an answer says of what was predicted for it; one of a target that left says nothing any more."""
        trust = self.trust.get(target)
        if trust is None:
            return
        if trust.fed and told.prompt - told.cached >= 2 * told.block + PAGE_TOKENS and trust.awaited is None:
            trust.awaited = (now, trust.batches)
        if trust.rung is not Rung.EXACT and told.predicted >= DOUBTED and told.cached < 0.1 * told.predicted:
            trust.nothing += 1
            if trust.nothing == NOTHING:
                self.radix.clear(target)
                self._move(target, Rung.NONE, "finds_nothing")
                return
        elif told.cached:
            trust.nothing = 0
            if trust.rung is Rung.NONE:
                self._move(target, Rung.PREDICTED, "finds_something")
        if told.exact is not None and trust.fed:
            self._judge_events(target, trust, told)
        self._judge_routed(target, trust, told)
        self._judge_size(target, trust, told, now)

    def _judge_events(self, target: int, trust: Trust, told: Report) -> None:
        assert told.exact is not None
        # Of a prompt that it holds whole an engine computes the last block again.
        off = not -told.block <= told.exact - told.cached <= 2 * told.block
        trust.wrong = (trust.wrong << 1 | off) & ((1 << JUDGED) - 1)
        trust.agreed = 0 if off else trust.agreed + (told.cached > 0)
        if trust.rung is Rung.EXACT and trust.wrong.bit_count() >= WRONG:
            trust.agreed = 0
            self._move(target, Rung.PREDICTED, "reports_disagree")
        elif trust.rung is Rung.PREDICTED and trust.agreed >= AGREED and trust.wrong.bit_count() <= 2:
            self._rise(target, trust, "reports_agree")

    def _judge_routed(self, target: int, trust: Trust, told: Report) -> None:
        if told.at_home or trust.rung not in (Rung.PREDICTED, Rung.SESSION) or told.routed < DOUBTED:
            return
        strayed = told.routed - told.cached > max(DOUBTED, told.prompt // 4)
        trust.strayed = (trust.strayed << 1 | strayed) & ((1 << JUDGED) - 1)
        if trust.rung is Rung.PREDICTED and trust.strayed.bit_count() > JUDGED * 3 // 4:
            self._move(target, Rung.SESSION, "shares_nothing")
        elif trust.rung is Rung.SESSION and trust.strayed.bit_count() <= JUDGED // 4:
            self._move(target, Rung.PREDICTED, "shares_again")

    def _judge_size(self, target: int, trust: Trust, told: Report, now: float) -> None:
        """See the module's head."""
        size = self.radix.capacity(target)
        if told.predicted - told.cached > max(DOUBTED, told.prompt // 20):
            size = size or self.radix.pages(target)
            spanned = 0.97 * size
            # Measuring costs a walk over all that it holds.
            if told.used is not None and (trust.measured < OFTEN or now - trust.measured_at > SELDOM):
                trust.measured, trust.measured_at = trust.measured + 1, now
                others = self.radix.younger(target, told.used) - told.prompt / told.page
                measured = max(0.0, others) + told.cached / told.page
                spanned = min(spanned, size + 0.5 * (measured - size))
            self._resize(target, trust, spanned)
        elif size is not None and told.cached - told.predicted > max(DOUBTED, told.prompt // 20):
            self._resize(target, trust, max(1.03 * size, size + 1))

    def _resize(self, target: int, trust: Trust, pages: float) -> None:
        known = trust.known_size
        if known is not None:
            most = known * trust.part
            pages = min(max(pages, most * LEAST_SHARE), most)
            trust.share = pages / most if most else 1.0
        self.radix.set_capacity(target, max(1, int(pages)))

    def set_size(self, target: int, pages: int | None) -> None:
        """Pages that its engine says ``target`` has; ``None``: it does not say."""
        trust = self.of(target)
        if trust.known_size == pages:
            return
        trust.known_size = pages
        if pages is not None:
            self.radix.set_capacity(target, max(1, int(pages * trust.share * trust.part)))
        elif trust.share == 1.0:
            self.radix.set_capacity(target, None)

    def size(self, target: int) -> int | None:
        """Pages that ``target`` can be counted on to hold, whoever sent them; ``None``: not known."""
        trust = self.trust.get(target)
        known = None if trust is None else trust.known_size
        return None if trust is None or known is None else max(1, int(known * trust.share))

    def crowd(self, target: int, part: float) -> None:
        """So much of what ``target`` holds was sent from here."""
        trust = self.of(target)
        known = trust.known_size
        if known is not None and (abs(part - trust.part) > CROWDED or (part == 1.0 and trust.part != 1.0)):
            trust.part = part
            self.radix.set_capacity(target, max(1, int(known * trust.share * part)))

    # -- life -------------------------------------------------------------------------------------------------------

    def emptied(self, target: int) -> None:
        """``target`` holds nothing of what was routed there: restart, reset. Of `blocks` its events tell."""
        self.radix.clear(target)
        self._flying.clear(target)
        self.lost(target)
        trust = self.of(target)
        trust.wrong = trust.agreed = trust.strayed = trust.nothing = 0

    def remove(self, target: int) -> None:
        """``target`` is gone."""
        self.radix.remove(target)
        self._flying.remove(target)
        self._landed.pop(target, None)
        self.blocks.drop(target)
        self.trust.pop(target, None)
        self.low.pop(target, None)

    def _rise(self, target: int, trust: Trust, reason: str) -> None:
        if trust.fed and trust.compared and trust.rung is not Rung.EXACT:
            self._move(target, Rung.EXACT, reason)

    def _move(self, target: int, rung: Rung, reason: str) -> None:
        trust = self.of(target)
        before, trust.rung, trust.reason = trust.rung, rung, reason
        if before is rung:
            return
        if rung in (Rung.SESSION, Rung.NONE):
            self.low[target] = rung
        else:
            self.low.pop(target, None)
        self.moved(target, before, rung, reason)
