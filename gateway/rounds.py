"""One look at one queue: which targets can take a request now, and who goes next.

There is a queue for each model, and queues may wait for the same targets (adapters of one model do), so each look lets them
take turns by what they sent: who has sent least goes next. What is sent of a lower priority counts for more, by its reserved
share, so that one model's bulk does not go before another's first priority. A queue that comes anew begins where the others
are: nothing is saved up by not asking.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from policies.admission import Queue, Waiting, full
from policies.base import Fleet as View, Role, Target as Seen

if TYPE_CHECKING:
    from gateway.fleet import Fleet

LEAST = 0.01
"""Share of a priority that has next to none."""


class Round:
    """See the module's head. ``ahead``: seconds of prefill beyond which a target is full."""

    def __init__(self, queue: Queue, fleet: Fleet, view: View | None, ahead: float, now: float) -> None:
        self.queue = queue
        self.ahead = ahead
        self.now = now
        self.free = {} if view is None else {target.id: target for target in spare(view, ahead, now)}
        self.known = set() if view is None else {target.id for target in computing(view)}
        self.apart: set[int] = set()
        """Targets that drain with time and can take what belongs to them."""
        for home in queue.homes():
            lingers = None if home in self.known else fleet.lingering(home, now)
            if lingers is not None:
                self.known.add(home)
                if not full(lingers, ahead, now):
                    self.apart.add(home)
        self.busy: set[int | None] = {target for target in self.known if target not in self.free}

    def next(self, may: Callable[[str], bool], moves: Callable[[Waiting, float], bool], held: Held) -> Waiting | None:
        """Who goes next, who does not wait any more; ``None``: nobody can go."""

        def score(waiting: Waiting) -> float:
            return held(waiting, self.free)

        return self.queue.take(self.now, self.free, self.known, apart=self.apart, may=may, score=score, moves=moves)

    def sent(self, target: Seen) -> None:
        """Something was sent to ``target``, by this queue or another."""
        if target.id in self.known and full(target, self.ahead, self.now):
            self.free.pop(target.id, None)
            self.apart.discard(target.id)
            self.busy.add(target.id)


Held = Callable[[Waiting, Collection[int]], float]
"""Tokens of its prompt that those targets hold most of."""


def spare(view: View, ahead: float, now: float) -> list[Seen]:
    """Targets that can take a prompt now; none that computes for others where those that would go on from it are all full."""
    free = [target for target in view.targets if not full(target, ahead, now)]
    if view.prefill is None or not free:
        return free
    whole = [target for target in free if target.role is Role.UNIFIED]
    if len(whole) == len(free):
        return whole
    return whole + [target for target in view.prefill.targets if not full(target, ahead, now)]


def computing(view: View) -> Iterator[Seen]:
    """Targets that prompts are sent to be computed by."""
    if view.prefill is None:
        yield from view.targets
        return
    yield from (target for target in view.targets if target.role is Role.UNIFIED)
    yield from view.prefill.targets
