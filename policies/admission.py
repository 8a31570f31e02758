"""Who goes next when more is asked than can be served, and who is turned away: the pure core of the queue.

While some target can take a request nobody waits and nothing here is asked. Once all are `full`, requests wait, and their
target is chosen when they leave. Three rules say who leaves first:

*Priority.* The first level that has somebody waiting goes first; each one after it has a reserved share of what is computed,
as credit that grows while it waits, so that it never starves.

*Fairness between tenants* of a level, after Deficit Longest Prefix Match (Cao et al., "Locality-aware fair scheduling in LLM
serving", 2025). Each tenant has a deficit counter; whose counter is above zero may go. Charged is what is really computed:
uncached prompt tokens when a request leaves, generated tokens when it ended; cached ones are free. When nobody's counter is
above zero, all that wait get another quantum. So no tenant can be more than a quantum and one request ahead.

*Locality.* Who belongs to a target waits for that one, and goes when it is free; it goes elsewhere only when its policy would
rather have it computed anew than wait for all that waits there before it. Among those that may go, the one goes first whose
prompt the free targets already hold most of, unless somebody has waited for half of its time.

Who could not leave before its deadline, at the pace at which its level was served of late, is told so at once and not after
it has waited in vain. Everything is bounded: requests and bytes, in all, of each level and of each tenant.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import ceil, exp, inf
from typing import NamedTuple

from policies.base import Target

QUANTUM = 2048.0
"""Tokens by which counters are raised."""
GENERATED = 2.0
"""What a generated token counts for, against a computed one of a prompt: twice, as in Sheng et al., "Fairness in serving
large language models", 2024."""
LOOKS = 64
"""Requests that are compared, at most, to find the next one."""
PRUDENCE = 0.8
"""Share of its time that a request may be expected to wait: what it meets at its target takes a while too."""
WINDOW = 5.0
"""Seconds over which the pace of a level is averaged."""
EVIDENCE = 1.0
"""Seconds of waiting that its pace must be known from."""
FORGIVEN = 10.0
"""Seconds without anybody waiting after which counters start anew."""
LONGEST_AGAIN = 300.0
"""Seconds after which anybody may try again."""
MOVERS = 4
"""Homes of which somebody is asked to leave, at one look."""
KNOWN = 10_000
"""Tenants that do not wait and whose counter is remembered."""


def taken(target: Target) -> bool:
    """Whether it runs as many of ours and of others as it can."""
    most = target.most_running
    return most is not None and target.running > 0 and target.running + target.foreign >= most


def full(target: Target, ahead: float, now: float) -> bool:
    """Whether a request that is sent to ``target`` now would only wait there: it runs as many as it can, or has more than
    ``ahead`` seconds of prefill in front. One that has nothing of ours is never full.

    What each prompt costs whatever its length does not count: prompts that are computed in one step share that. Nor does what
    the target has been shown to do faster than it was expected to (`Target.haste`).
    """
    running = target.running
    if not running:
        return False
    if taken(target):
        return True
    wait, ahead = target.waits(now), ahead / target.haste
    return wait > ahead and wait - (running + target.foreign - target.busy) * target.rates.base > ahead


@dataclass(frozen=True, slots=True)
class Priority:
    """One level; the first of several goes first."""

    name: str
    share: float = 0.1
    """Of what is computed, reserved for it while levels before it have somebody waiting."""
    deadline: float = 60.0
    """Seconds that its requests wait at most, unless they say otherwise."""
    requests: int = 5_000
    bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of everything that waits."""

    requests: int = 5_000
    bytes: int = 1 << 30
    tenant_requests: int = 5_000
    tenant_bytes: int = 1 << 29


class Shed(NamedTuple):
    """Why somebody is turned away."""

    reason: str
    """``queue_full``, ``level_full``, ``tenant_full``, ``too_long`` (it would not leave in time), ``deadline`` (it did
    not), ``displaced`` (by one of more priority)."""
    retry_after: float
    """Seconds after which it may be tried again with better prospects."""


class Waiting:
    """One request that waits. Times are seconds on the caller's clock."""

    __slots__ = (
        "arrived",
        "bound",
        "computed",
        "deadline",
        "group",
        "home",
        "level",
        "line",
        "owner",
        "queue",
        "size",
        "tenant",
        "tokens",
        "weight",
    )

    def __init__(
        self,
        tenant: str,
        level: int,
        computed: float,
        generated: float,
        size: int,
        arrived: float,
        deadline: float,
        owner: object = None,
        *,
        home: int | None = None,
        bound: bool = False,
        weight: float = 1.0,
    ) -> None:
        self.tenant = tenant
        self.level = level
        """Place of its `Priority`."""
        self.computed = computed
        """Prompt tokens that will have to be computed for it, as far as is known."""
        self.tokens = computed + GENERATED * generated
        """What it will be charged."""
        self.home = home
        """target id of whom it belongs to; ``None``: nobody."""
        self.bound = bound
        """Nobody else can serve it."""
        self.size = size
        """Bytes that it keeps in memory."""
        self.arrived = arrived
        self.deadline = deadline
        self.owner = owner
        self.weight = weight
        """Of its tenant: how many times as much as another's it may have."""
        self.queue: Queue | None = None
        self.line: Line | None = None
        self.group: Group | None = None
        """Where it waits."""


@dataclass(slots=True, eq=False)
class Pace:
    """Tokens a second, over the last `WINDOW` seconds in which somebody waited."""

    _done: float = 0.0
    _busy: float = 0.0
    _at: float = 0.0

    def advance(self, now: float, waits: bool) -> None:
        """Let time pass; it counts if somebody waited in it."""
        passed = now - self._at
        self._at = now
        if waits and passed > 0:
            faded = exp(-passed / WINDOW)
            self._done *= faded
            self._busy = self._busy * faded + WINDOW * (1.0 - faded)

    def did(self, tokens: float) -> None:
        """So many were sent to be computed."""
        self._done += tokens

    @property
    def rate(self) -> float | None:
        """Tokens a second; ``None``: not known yet."""
        return self._done / self._busy if self._busy >= EVIDENCE and self._done else None


@dataclass(slots=True, eq=False)
class Group:
    """What waits of one tenant in one level for one target, or for any."""

    home: int | None
    waiting: dict[Waiting, None] = field(default_factory=dict)
    """In order of arrival."""


@dataclass(slots=True, eq=False)
class Line:
    """What waits of one tenant in one level."""

    tenant: str
    weight: float
    deficit: float
    groups: dict[int | None, Group] = field(default_factory=dict)
    """By home; none is empty."""
    requests: int = 0
    tokens: float = 0.0
    """All of theirs."""
    pace: Pace = field(default_factory=Pace)


@dataclass(slots=True, eq=False)
class Level:
    """What waits of one priority."""

    priority: Priority
    lines: dict[str, Line] = field(default_factory=dict)
    """Tenant -> its line, which is not empty; the one that was served last comes last."""
    debts: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Counters below zero of tenants that do not wait now."""
    requests: int = 0
    bytes: int = 0
    tokens: float = 0.0
    credit: float = 0.0
    """Tokens of its reserved share that it did not have yet."""
    pace: Pace = field(default_factory=Pace)


def _arrival(waiting: Waiting) -> float:
    return waiting.arrived


def _again(seconds: float) -> float:
    """When to come again: nobody knows what will be in an hour."""
    return min(LONGEST_AGAIN, max(1.0, seconds))


def _ready(
    line: Line, free: Collection[int], apart: Collection[int], known: Collection[int], looks: int
) -> list[Waiting]:
    """Those of ``line`` that can go now: the first of each home, and some that have none; of too many those that came first."""
    ready: list[Waiting] = []
    for home, group in line.groups.items():
        if home in free or home in apart:
            ready.append(next(iter(group.waiting)))
        elif free and (home is None or home not in known):
            ready.extend(islice(group.waiting, max(1, looks)))
    if len(ready) > looks:
        ready.sort(key=_arrival)
        del ready[max(1, looks) :]
    return ready


def anyone(tenant: str) -> bool:
    """No tenant is held back."""
    return True


def never(waiting: Waiting, ahead: float) -> bool:
    """Nobody leaves its home."""
    return False


def alike(waiting: Waiting) -> float:
    """Nothing is known of what targets hold."""
    return 0.0


@dataclass(slots=True, eq=False)
class Held:
    """What waits in all queues together."""

    requests: int = 0
    bytes: int = 0
    tenants: dict[str, list[int]] = field(default_factory=dict)
    """Tenant -> requests and bytes, while there are any."""

    def add(self, waiting: Waiting, sign: int) -> None:
        """It came (1), or left (-1)."""
        self.requests += sign
        self.bytes += sign * waiting.size
        one = self.tenants.setdefault(waiting.tenant, [0, 0])
        one[0] += sign
        one[1] += sign * waiting.size
        if not one[0]:
            del self.tenants[waiting.tenant]


class Queue:
    """Requests that wait for the same targets. ``held`` is shared by all queues that one bound holds for."""

    def __init__(
        self,
        priorities: Sequence[Priority],
        bounds: Bounds | None = None,
        held: Held | None = None,
        *,
        quantum: float = QUANTUM,
    ) -> None:
        self.levels = [Level(priority) for priority in priorities]
        self.bounds = bounds or Bounds()
        self.held = held or Held()
        self.quantum = quantum
        self.passed = 0.0
        """Tokens that it sent, for whoever lets queues take turns."""
        self._ahead: dict[int, float] = {}
        """target id -> tokens to compute of those that wait for it."""
        self._due: list[tuple[float, int, Waiting]] = []
        self._order = count()
        self._emptied = -inf

    def __len__(self) -> int:
        return sum([level.requests for level in self.levels])

    # -- coming and leaving -----------------------------------------------------------------------------------------

    def offer(
        self, waiting: Waiting, now: float, *, soon: bool = False, others: Iterable["Queue"] = ()
    ) -> tuple[Shed | None, list[Waiting]]:
        """Have it wait: why it may not, and who had to leave for it. ``soon``: some target is free for it, so that the pace
        of those that wait for something else says nothing of it. ``others``: further queues of the same bound."""
        level = self.levels[waiting.level]
        if not len(self) and now - self._emptied > FORGIVEN:
            for each in self.levels:
                each.debts.clear()
        if not level.requests:
            # What was measured before nobody waited says nothing of what those who come now will meet.
            level.pace = Pace()
            level.pace.advance(now, False)
        line = level.lines.get(waiting.tenant)
        self._advance(level, line, now)
        wait = self._wait(level, line, waiting)
        patience = PRUDENCE * (waiting.deadline - now)
        if wait is not None and wait > patience and not soon:
            return Shed("too_long", _again(wait - patience)), []
        displaced: list[Waiting] = []
        reason = self._lacks(level, waiting)
        if reason == "queue_full":
            displaced = self._make_room(waiting, others)
            reason = self._lacks(level, waiting)
        if reason is not None:
            return Shed(reason, self._until_room(level)), displaced
        if line is None:
            deficit = level.debts.pop(waiting.tenant, None)
            line = Line(waiting.tenant, waiting.weight, self.quantum * waiting.weight if deficit is None else deficit)
            line.pace.advance(now, False)
            level.lines[waiting.tenant] = line
        line.weight = waiting.weight
        group = line.groups.get(waiting.home)
        if group is None:
            group = line.groups[waiting.home] = Group(waiting.home)
        group.waiting[waiting] = None
        line.requests += 1
        line.tokens += waiting.tokens
        waiting.queue, waiting.line, waiting.group = self, line, group
        if waiting.home is not None:
            self._ahead[waiting.home] = self._ahead.get(waiting.home, 0.0) + waiting.computed
        level.requests += 1
        level.bytes += waiting.size
        level.tokens += waiting.tokens
        self.held.add(waiting, 1)
        heappush(self._due, (waiting.deadline, next(self._order), waiting))
        return None, displaced

    def leave(self, waiting: Waiting, now: float) -> None:
        """It does not wait any more, however; safe to call again."""
        line, group = waiting.line, waiting.group
        if line is None or group is None:
            return
        level = self.levels[waiting.level]
        self._advance(level, line, now)
        waiting.line = waiting.group = None
        del group.waiting[waiting]
        if not group.waiting:
            del line.groups[group.home]
        if group.home is not None:
            self._ahead[group.home] -= waiting.computed
        line.requests -= 1
        line.tokens -= waiting.tokens
        level.requests -= 1
        level.bytes -= waiting.size
        level.tokens -= waiting.tokens
        self.held.add(waiting, -1)
        if not line.requests:
            del level.lines[line.tenant]
            self._remember(level, line.tenant, line.deficit)
        if not level.requests:
            level.credit = level.tokens = 0.0
        if not len(self):
            self._emptied = now
            self._due.clear()
            self._ahead.clear()
        elif len(self._due) > 2 * len(self) + LOOKS:
            self._due = [due for due in self._due if due[2].line is not None]
            heapify(self._due)

    def expired(self, now: float) -> list[tuple[Waiting, Shed]]:
        """Those whose deadline passed; they do not wait any more."""
        found = []
        while self._due and self._due[0][0] <= now:
            waiting = heappop(self._due)[2]
            if waiting.line is None:
                continue
            level = self.levels[waiting.level]
            wait = self._wait(level, waiting.line, None)
            found.append((waiting, Shed("deadline", _again(wait or 0.0))))
            self.leave(waiting, now)
        return found

    def _advance(self, level: Level, line: Line | None, now: float) -> None:
        level.pace.advance(now, level.requests > 0)
        if line is not None:
            line.pace.advance(now, True)

    def homes(self) -> list[int]:
        """Whom somebody waits for, or did of late."""
        return list(self._ahead)

    def all(self) -> list[Waiting]:
        """Everybody that waits."""
        groups = [group for level in self.levels for line in level.lines.values() for group in line.groups.values()]
        return [each for group in groups for each in group.waiting]

    # -- who is next ------------------------------------------------------------------------------------------------

    def take(
        self,
        now: float,
        free: Collection[int] = (),
        known: Collection[int] = (),
        *,
        apart: Collection[int] = (),
        may: Callable[[str], bool] = anyone,
        score: Callable[[Waiting], float] = alike,
        moves: Callable[[Waiting, float], bool] = never,
    ) -> Waiting | None:
        """The next one, which does not wait any more; ``None`` if nobody is there that may go. `charge` is to follow.

        ``free``: ids of targets that can take a request, ``known``: of all that may be used: who belongs to another waits for
        nobody. ``apart``: ids of further ones, which take only requests that belong to them. ``may`` says of a tenant
        whether it may have one more running, ``score`` how many tokens of a prompt need not be computed on the targets that
        are free, ``moves`` whether a request leaves its home rather than wait there for so many tokens.
        """
        if not free and not apart:
            return None
        able = []
        for level in self.levels:
            lines = [line for line in level.lines.values() if may(line.tenant)]
            found = {line: ready for line in lines if (ready := _ready(line, free, apart, known, LOOKS // len(lines)))}
            if found:
                able.append((level, found))
        if able:
            owed = [each for each in able[1:] if each[0].credit > 0]
            level, found = max(owed, key=lambda each: each[0].credit) if owed else able[0]
            chosen = self._pick(found, now, score)
            # Those that were not looked at come first next time.
            level.lines[chosen.tenant] = level.lines.pop(chosen.tenant)
        else:
            movers = self._movers(may) if free else ()
            mover = next((each for each in movers if moves(each, self.ahead_of(each))), None)
            if mover is None:
                return None
            chosen = mover
        self.leave(chosen, now)
        return chosen

    def _pick(self, ready: dict[Line, list[Waiting]], now: float, score: Callable[[Waiting], float]) -> Waiting:
        able = [line for line in ready if line.deficit > 0]
        if not able:
            # As many rounds as the first of them needs.
            rounds = min(ceil((1.0 - line.deficit) / (self.quantum * line.weight)) for line in ready)
            for line in ready:
                line.deficit += rounds * self.quantum * line.weight
            able = [line for line in ready if line.deficit > 0]

        def key(waiting: Waiting, due: float) -> tuple[bool, float, float, float]:
            urgent = now - waiting.arrived > 0.5 * (waiting.deadline - waiting.arrived)
            return urgent, 0.0 if urgent else score(waiting), due, -waiting.arrived

        some = [(key(each, line.deficit / line.weight), each) for line in able[:LOOKS] for each in ready[line]]
        return max(some, key=lambda each: each[0])[1]

    def ahead_of(self, waiting: Waiting) -> float:
        """Tokens to compute of the others that wait for its home."""
        return self._ahead.get(waiting.home, 0.0) - waiting.computed if waiting.home is not None else 0.0

    def _movers(self, may: Callable[[str], bool]) -> Iterator[Waiting]:
        """Of those that wait for each of the targets for which most waits, the last that came: it has most in front of it."""
        lines = [line for level in self.levels for line in level.lines.values() if may(line.tenant)]
        asked = 0
        for home in sorted(self._ahead, key=self._ahead.__getitem__, reverse=True):
            groups = [line.groups[home] for line in lines if home in line.groups]
            last = [next((each for each in reversed(group.waiting) if not each.bound), None) for group in groups]
            able = [each for each in last if each is not None]
            if able:
                yield max(able, key=lambda each: (each.level, each.arrived))
                asked += 1
                if asked == MOVERS:
                    return

    def charge(self, waiting: Waiting, computed: float, generated: float, now: float) -> None:
        """``waiting`` left the queue, and so many tokens will be computed and generated for it."""
        tokens = computed + GENERATED * generated
        level = self.levels[waiting.level]
        line = level.lines.get(waiting.tenant)
        self._advance(level, line, now)
        if any(each.requests for each in self.levels[: waiting.level]):
            # This was of its reserved share.
            level.credit = max(-self.quantum, level.credit - tokens)
        for each in self.levels:
            if each.requests:
                each.credit = min(self.quantum, each.credit + each.priority.share * tokens)
        level.pace.did(waiting.tokens)
        if line is not None:
            line.pace.did(waiting.tokens)
        self.correct(waiting.tenant, waiting.level, tokens)

    def correct(self, tenant: str, level: int, tokens: float) -> None:
        """What was charged for a request of ``tenant`` was ``tokens`` too few."""
        at = self.levels[level]
        line = at.lines.get(tenant)
        if line is not None:
            line.deficit -= tokens
        else:
            self._remember(at, tenant, at.debts.get(tenant, 0.0) - tokens)

    def _remember(self, level: Level, tenant: str, deficit: float) -> None:
        """Nothing is saved up by not asking, and no debt is left behind by it."""
        level.debts.pop(tenant, None)
        if deficit < 0:
            level.debts[tenant] = deficit
            if len(level.debts) > KNOWN:
                level.debts.popitem(last=False)

    # -- bounds and prospects ---------------------------------------------------------------------------------------

    def _lacks(self, level: Level, waiting: Waiting) -> str | None:
        """What there is no room in for it."""
        size, bounds, held = waiting.size, self.bounds, self.held
        requests, bytes_ = held.tenants.get(waiting.tenant, (0, 0))
        # A bound of one that is no less than that of all is none.
        if (
            min(requests + 1, bounds.requests) > bounds.tenant_requests
            or min(bytes_ + size, bounds.bytes) > bounds.tenant_bytes
        ):
            return "tenant_full"
        if level.requests >= level.priority.requests or level.bytes + size > level.priority.bytes:
            return "level_full"
        if held.requests >= bounds.requests or held.bytes + size > bounds.bytes:
            return "queue_full"
        return None

    def _make_room(self, waiting: Waiting, others: Iterable["Queue"]) -> list[Waiting]:
        """Have those of levels behind its own leave, here and then elsewhere, if that makes room for it: who had to."""
        queues = [self, *[each for each in others if each is not self]]
        behind = [level for queue in queues for level in queue.levels[waiting.level + 1 :]]
        held, bounds = self.held, self.bounds
        requests = held.requests + 1 - sum([level.requests for level in behind])
        bytes_ = held.bytes + waiting.size - sum([level.bytes for level in behind])
        if requests > bounds.requests or bytes_ > bounds.bytes:
            return []
        return [each for queue in queues for each in queue._displace(waiting, self)]

    def _displace(self, waiting: Waiting, queue: "Queue") -> list[Waiting]:
        """The last come of the longest line of the last level behind its own has to leave, until ``queue`` has room for it."""
        gone: list[Waiting] = []
        for level in reversed(self.levels[waiting.level + 1 :]):
            while level.requests and queue._lacks(queue.levels[waiting.level], waiting) is not None:
                line = max(level.lines.values(), key=lambda each: each.requests)
                last = max([next(reversed(group.waiting)) for group in line.groups.values()], key=_arrival)
                self.leave(last, waiting.arrived)
                gone.append(last)
        return gone

    def _wait(self, level: Level, line: Line | None, more: Waiting | None) -> float | None:
        """Seconds until ``line``, and ``more`` behind it, would have left: at its own pace, or while that is not known at the
        pace of its level, where until then no other tenant gets more than it does."""
        own = (line.tokens if line is not None else 0.0) + (more.tokens if more is not None else 0.0)
        pace = line.pace.rate if line is not None else None
        if pace is not None:
            return own / pace
        pace = level.pace.rate
        if pace is None:
            return None
        weight = line.weight if line is not None else more.weight if more is not None else 1.0
        ahead = own
        for each in level.lines.values():
            if each is not line:
                ahead += min(each.tokens, own * each.weight / weight)
        return ahead / pace

    def _until_room(self, level: Level) -> float:
        """Seconds until a tenth of what waits in ``level`` has left."""
        pace = level.pace.rate
        return _again(0.1 * level.tokens / pace) if pace is not None else 1.0
