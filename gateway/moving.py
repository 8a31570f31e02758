"""Moving sessions from target to target: when an operator asks for it, and when a worker drains.

A worker that drains gets nothing new. Its sessions are given other homes, those first that are the cheapest to compute
again, so that the dear ones have the most time to end by themselves; what runs there ends as it would, and its sessions move
after that. With time to do it in, the moves are spread over it, and until its turn comes a session goes on where it was: the
others meet its recomputation one by one, not all at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import BadRequest, Fault, NoWorker
from gateway.fleet import Fleet
from gateway.metrics import Metrics
from gateway.routing import Routing
from gateway.sessions import Session, Sessions
from gateway.workers import State, Target, Worker
from policies.base import Role

BUDGET = 0.02
"""Seconds that one step may take: each move costs a decision."""


@dataclass(eq=False)
class Drain:
    """One worker's."""

    worker: Worker
    began: float
    until: float
    """When the last session is to be gone."""
    left: deque[Session] = field(default_factory=deque)
    """Those that are to be moved, the cheapest to compute again first."""
    total: int = 0
    moved: int = 0
    ended: int = 0
    """Sessions that ended, or left by themselves, before they were moved."""
    stuck: str | None = None
    """Why they cannot be moved."""

    timed: bool = False
    """It was given time."""

    def lingers(self, now: float) -> bool:
        """Whether its worker goes on with its own sessions: while there is time, and then with what nobody else can serve."""
        return now < self.until or (self.timed and self.stuck is not None)

    @property
    def done(self) -> bool:
        """Nothing is left to move, and nothing runs there."""
        return not self.left and not self.worker.running


class Moving:
    """See the module's head. Times are seconds on the loop's clock."""

    def __init__(self, fleet: Fleet, sessions: Sessions, routing: Routing, metrics: Metrics) -> None:
        self.fleet = fleet
        self.sessions = sessions
        self.routing = routing
        self.metrics = metrics
        self.drains: dict[str, Drain] = {}

    # -- one session ------------------------------------------------------------------------------------------------

    def move(self, session: Session, to: str | None) -> Target:
        """Bind ``session`` to the target, or the worker, of that name; ``None``: to whom the policy prefers.

        Raises `BadRequest` where it cannot be served there, `NoWorker` where nobody else can.
        """
        now = self.fleet.clock()
        if to is None:
            target = self.routing.rehome(session, now)
        else:
            target = self._named(to, now)
            if not self.fleet.serves(target.worker, session.model):
                raise BadRequest(f"{to} does not serve {session.model!r}, the session's model", param="to")
            if not self.fleet.usable(target, now):
                raise BadRequest(f"{to} cannot be used now: {self._why_not(target)}", param="to")
            if target.role is Role.PREFILL:
                raise BadRequest(f"{to} only computes prompts: a session is at home where it is answered", param="to")
        self._bind(session, target, "asked")
        return target

    def _named(self, name: str, now: float) -> Target:
        """The target of that name, or of a worker's ranks the one that can be used and has the fewest homes.

        ``<worker>#0`` is the first rank, whose own name is its worker's.
        """
        worker = self.fleet.workers.get(name)
        if worker is not None and worker.targets:
            return min(worker.targets, key=lambda each: (not self.fleet.usable(each, now), each.homes, each.rank))
        for target in self.fleet.targets.values():
            if name in (target.name, f"{target.worker.id}#{target.rank}"):
                return target
        raise BadRequest(f"no target is called {name!r}; GET /workers lists them", param="to")

    def _why_not(self, target: Target) -> str:
        state = target.worker.state
        if state is not State.READY:
            return f"it is {state}"
        return "its breaker is open" if target.breaker.open_until is not None else "it asked for a pause"

    def _bind(self, session: Session, target: Target, why: str) -> None:
        if session.home != target.id:
            self.sessions.bind(session, target.id, "moved_by_operator" if why == "asked" else why)
            # Who computed its prompts may be of another pool: the policy finds one.
            self.sessions.bind_partner(session, None)
            self.metrics.migrations.add((why,))

    # -- a worker ---------------------------------------------------------------------------------------------------

    def drain(self, worker: Worker, over: float = 0.0) -> Drain:
        """Send ``worker`` nothing new and move its sessions away within ``over`` seconds; again for one that drains: only the
        time changes."""
        now = self.fleet.clock()
        self.fleet.set_state(worker, State.DRAINING, "drained by the operator")
        drain = self.drains.get(worker.id)
        if drain is None or drain.worker is not worker:
            drain = self.drains[worker.id] = Drain(worker, now, now + over)
            ids = {target.id for target in worker.targets}
            there = [session for id_ in ids for session in self.sessions.at_home(id_)]
            drain.left.extend(sorted(dict.fromkeys(there), key=self._dear))
            drain.total = len(drain.left)
        drain.until, drain.timed = now + over, over > 0.0
        self._step(drain, now)
        worker.lingers = drain.lingers(now)
        return drain

    def resume(self, worker: Worker) -> None:
        """It takes new requests again, and keeps the sessions that it has."""
        self.drains.pop(worker.id, None)
        worker.lingers = False

    def sweep(self, now: float) -> None:
        """Twice a second: go on with what drains."""
        for id_, drain in list(self.drains.items()):
            if self.fleet.workers.get(id_) is not drain.worker:
                del self.drains[id_]
                continue
            if drain.left:
                self._step(drain, now)
            drain.worker.lingers = drain.lingers(now)

    def progress(self, worker: Worker) -> dict[str, Any] | None:
        """How far its drain is; ``None`` if it does not drain."""
        drain = self.drains.get(worker.id)
        if drain is None:
            return None
        return {
            "sessions": drain.total,
            "moved": drain.moved,
            "ended": drain.ended,
            "left": len(drain.left),
            "running": worker.running,
            "seconds": round(self.fleet.clock() - drain.began, 3),
            "done": drain.done,
            "stuck": drain.stuck,
        }

    def _dear(self, session: Session) -> float:
        """Seconds to compute it again, as far as is known."""
        home = None if session.home is None else self.fleet.targets.get(session.home)
        tokens = (session.prompt_tokens or 0) + session.tail_tokens
        return 0.0 if home is None else home.rates.prefill(tokens, 0)

    def _step(self, drain: Drain, now: float) -> None:
        """Move as many as are due."""
        ids = {target.id for target in drain.worker.targets}
        left = len(drain.left)
        due = left
        if now < drain.until:
            # As many as are due by now, evenly over the time: those that are gone already count.
            passed = (now - drain.began) / (drain.until - drain.began)
            due = min(left, int(drain.total * passed) - (drain.total - left))
        drain.stuck = None
        if not due and left:
            # There is time, but it is better known now than then.
            try:
                self.routing.rehome(drain.left[0], now)
            except Fault as fault:
                drain.stuck = fault.message
        begun = self.fleet.clock()
        for _ in range(due):
            if self.fleet.clock() - begun > BUDGET:
                break
            session = drain.left.popleft()
            if session.gone or (session.home not in ids and session.partner not in ids):
                drain.ended += 1
                continue
            if session.running:
                # Its turn ends first; meanwhile others move.
                drain.left.append(session)
                continue
            try:
                self._away(session, ids, now)
            except Fault as fault:
                drain.left.append(session)
                drain.stuck = fault.message
                continue
            drain.moved += 1

    def _away(self, session: Session, ids: set[int], now: float) -> None:
        if session.home not in ids:
            self.sessions.bind_partner(session, None)
            return
        target = self.routing.rehome(session, now)
        if target.id in ids:
            raise NoWorker("nobody else can serve its sessions now")
        self._bind(session, target, "drained")
