"""Sessions that clients open on SGLang by themselves: each request says only what is new, the engine keeps the rest.

Such a session lives on the one target on which it was opened, whatever the load: all its requests go there. A streaming one
(SGLang's ``--enable-streaming-session``) takes one request at a time; a second waits here until the first is over, and after
a client that left, until the engine has ended what it did for it: until then it would refuse the next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from xxhash import xxh3_128_hexdigest

from gateway.addresses import hidden
from gateway.engines import Answer
from gateway.errors import Backpressure, BadRequest, Fault, Internal, NotFound, NoWorker, Stalled, TimedOut, WorkerFault
from gateway.http import wire
from gateway.http.incoming import Incoming
from gateway.http.server import Inbound
from gateway.http.upstream import Outbound
from gateway.naming import clean
from gateway.tenants import Tenant
from gateway.workers import Target, Worker
from policies.base import Role

if TYPE_CHECKING:
    from gateway.app import Gateway

log = logging.getLogger("warmroute")

OPEN, CLOSE = b"/open_session", b"/close_session"
MOST = 10_000
"""Sessions that one tenant can have open."""
LONGEST = 86_400.0
"""Seconds of idling after which a session is closed, at most."""
QUEUE = 16
"""Requests of one session that may wait."""
PATIENCE = 20.0
"""Seconds that an engine may take to open or close a session."""
AT_ONCE = 64
"""Sessions that are closed at a time when the gateway stops."""
SETTLE = 10.0
"""Seconds that an engine may take to end what it did for a client that left."""

Post = Callable[[Worker, str, str, bytes], Awaitable[Answer]]


class Opened:
    """One session."""

    __slots__ = ("alias", "busy", "name", "open", "streaming", "target", "tenant", "timeout", "used", "waiting")

    def __init__(self, name: str, tenant: str, target: Target, streaming: bool, timeout: float | None) -> None:
        self.name = name
        self.alias = xxh3_128_hexdigest(f"{tenant}\x00{name}".encode())
        """What its engine calls it: tenants do not share names."""
        self.tenant = tenant
        self.open = True
        self.target = target
        self.streaming = streaming
        self.timeout = timeout
        self.used = 0.0
        self.busy = 0
        """Requests of it that run."""
        self.waiting: deque[Turn] = deque()


class Turn:
    """A request that waits for the one before it, as the `Owner` of its client's connection."""

    __slots__ = ("client", "deadline", "go", "left", "opened", "refuse")

    def __init__(
        self,
        opened: Opened,
        client: Inbound,
        deadline: float,
        go: Callable[[], None],
        refuse: Callable[[Fault], None],
        left: Callable[[Turn], None],
    ) -> None:
        self.opened = opened
        self.client = client
        self.deadline = deadline
        self.go = go
        self.refuse = refuse
        self.left: Callable[[], None] = partial(left, self)
        client.owner = self

    def client_gone(self) -> None:
        """Nobody waits for it any more."""
        self.left()

    def client_slow(self) -> None:
        """Nothing is sent yet."""

    def client_ready(self) -> None:
        """Nothing is held back."""


class Verb:
    """A call to an engine on a client's behalf, as the `Owner` of its connection: opening or closing a session."""

    def __init__(self, client: Inbound, work: Awaitable[bytes], refuse: Callable[[Exception], None]) -> None:
        self.client: Inbound | None = client
        client.owner = self
        self.task = asyncio.get_running_loop().create_task(self._run(work, refuse))

    async def _run(self, work: Awaitable[bytes], refuse: Callable[[Exception], None]) -> None:
        try:
            answer = await work
        except Exception as error:
            client, self.client = self.client, None
            if client is not None:
                client.owner = None
                refuse(error)
            return
        client, self.client = self.client, None
        if client is not None:
            client.owner = None
            client.send(answer)
            client.done()

    def client_gone(self) -> None:
        """What was begun at the engine goes on: its end must be known."""
        self.client = None

    def client_slow(self) -> None:
        """It is one small answer."""

    def client_ready(self) -> None:
        """Nothing is held back."""


class Settling:
    """Reads the answer of a client that left to its end, as the `Receiver` of its worker connection."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done

    def response_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Nobody reads it."""

    def response_data(self, data: bytes) -> None:
        """Nobody reads it."""

    def response_end(self) -> None:
        """The engine ended it."""
        self._done()

    def response_failed(self, fault: WorkerFault) -> None:
        """The connection is gone, and so is what it was for."""
        self._done()

    def worker_slow(self) -> None:
        """Nothing is sent any more."""


class OpenSessions:
    """Those of all clients. Times are seconds on the loop's clock."""

    def __init__(self, gateway: Gateway, post: Post) -> None:
        self.gateway = gateway
        self._post = post
        self._opened: dict[tuple[str, str], Opened] = {}
        """(tenant, name) -> session."""
        self._of_tenant: Counter[str] = Counter()
        self._at_target: Counter[int] = Counter()
        self._due: list[tuple[float, int, Opened]] = []
        """A heap of (when to look whether it idles, order, session)."""
        self._order = count()
        self._queued: dict[Opened, None] = {}
        """Sessions with requests that wait."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._opened)

    def of(self, tenant: str, name: str) -> Opened | None:
        """The tenant's session of that name."""
        return self._opened.get((tenant, name))

    # -- opening and closing ----------------------------------------------------------------------------------------

    def verb(self, incoming: Incoming, client: Inbound, tenant: Tenant, refuse: Callable[[Exception], None]) -> None:
        """Serve `OPEN` or `CLOSE`. Raises `Fault` for what cannot be."""
        try:
            body = msgspec.json.decode(incoming.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        name = body.get("session_id")
        if name is not None and (not isinstance(name, str) or clean(name.encode("utf-8", "replace")) is None):
            raise BadRequest(
                "session_id must be a string of 1 to 256 bytes without control characters", param="session_id"
            )
        if incoming.path == OPEN:
            work = self._open(incoming, tenant, body, name or uuid4().hex)
        else:
            work = self._close_for(incoming, tenant, name or "")
        self._keep(Verb(client, work, refuse).task)

    async def _open(self, incoming: Incoming, tenant: Tenant, body: dict[str, Any], name: str) -> bytes:
        streaming, timeout, model = body.get("streaming") is True, body.get("timeout"), body.pop("model", None)
        bad = isinstance(timeout, bool) or not isinstance(timeout, int | float | None)
        if bad or (timeout is not None and not 0 < timeout <= LONGEST):
            raise BadRequest(f"timeout must be a number of seconds above 0, at most {LONGEST:.0f}", param="timeout")
        if model is not None and not isinstance(model, str):
            raise BadRequest("model must be a string", param="model")
        if self.of(tenant.name, name) is not None:
            raise BadRequest(f"session id {name} already exists", param="session_id")
        if self._of_tenant[tenant.name] >= MOST:
            raise Backpressure(f"{MOST} sessions are open: close some", retry_after=10)
        target = self._place(streaming, tenant, model)
        opened = Opened(name, tenant.name, target, streaming, timeout)
        self._remember(opened)
        sent = msgspec.json.encode({"capacity_of_str_len": 1_000_000, **body, "session_id": opened.alias})
        try:
            answer = await self._ask(target.worker, "/open_session", sent)
        except Fault as fault:
            self._forget(opened)
            # It may have been opened all the same.
            self._keep(asyncio.get_running_loop().create_task(self._end(opened)))
            raise fault
        if answer.status != 200:
            self._forget(opened)
            told = answer.body.replace(opened.alias.encode(), name.encode())
            if tenant.hides_addresses:
                told = hidden(told, self.gateway.fleet.workers.values())
            return wire.whole(answer.status, told, incoming)
        return wire.whole(200, msgspec.json.encode(name), incoming)

    def _remember(self, opened: Opened) -> None:
        opened.used = self.gateway.clock()
        self._opened[opened.tenant, opened.name] = opened
        self._of_tenant[opened.tenant] += 1
        self._at_target[opened.target.id] += 1
        heappush(self._due, (opened.used + self._idle(opened), next(self._order), opened))

    def _idle(self, opened: Opened) -> float:
        return opened.timeout if opened.timeout is not None else min(LONGEST, self.gateway.sessions.idle)

    def _place(self, streaming: bool, tenant: Tenant, model: str | None) -> Target:
        """The target with the fewest open sessions that can take one; among those the least busy."""
        gateway, now = self.gateway, self.gateway.clock()
        if model is not None:
            tenant.check_model(model)
            model = gateway.options.real(tenant.called(model))
        able = [
            target
            for target in gateway.fleet.targets.values()
            if target.worker.facts.engine == "sglang"
            and target.role is Role.UNIFIED
            and (target.worker.facts.streams or not streaming)
            and gateway.fleet.serves(target.worker, model)
            and self.allowed(tenant, target)
            and gateway.fleet.usable(target, now)
        ]
        if not able:
            kind = "streaming sessions (start it with --enable-streaming-session)" if streaming else "sessions"
            of = f" of {model!r}" if model is not None else ""
            raise NoWorker(f"no SGLang engine{of} that takes {kind} can be used now", retry_after=5)
        return min(able, key=lambda target: (self._at_target[target.id], target.waits(now), target.name))

    def allowed(self, tenant: Tenant, target: Target) -> bool:
        """Whether the tenant may use every model that the target serves: a turn need not name any."""
        if tenant.models is None:
            return True
        real = {self.gateway.options.real(tenant.called(name)) for name in tenant.models}
        served = target.worker.facts.models
        return bool(served) and all(model.name in real for model in served)

    async def _close_for(self, incoming: Incoming, tenant: Tenant, name: str) -> bytes:
        opened = self.of(tenant.name, name)
        if opened is None:
            raise NotFound(f"session id {name} does not exist", param="session_id")
        self._forget(opened)
        body = msgspec.json.encode({"session_id": opened.alias})
        answer = await self._ask(opened.target.worker, "/close_session", body)
        return wire.whole(answer.status, answer.body, incoming)

    async def _ask(self, worker: Worker, path: str, body: bytes) -> Answer:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._post(worker, path, "POST", body)
        except TimeoutError:
            raise Stalled("the worker did not answer in time") from None

    def _forget(self, opened: Opened, why: Callable[[], Fault] | None = None) -> None:
        """It is no more: who waits for its turn is told so."""
        if opened.open:
            opened.open = False
            del self._opened[opened.tenant, opened.name]
            self._of_tenant[opened.tenant] -= 1
            self._at_target[opened.target.id] -= 1
        while opened.waiting:
            turn = opened.waiting.popleft()
            turn.client.owner = None
            turn.refuse(why() if why is not None else _unknown(opened.name))
        self._queued.pop(opened, None)

    # -- turns ------------------------------------------------------------------------------------------------------

    def turn(
        self, name: str, tenant: Tenant, client: Inbound, go: Callable[[Opened], None], refuse: Callable[[Fault], None]
    ) -> None:
        """Have ``go`` called when a request of the session ``name`` may be sent; at once, unless another one runs. Raises
        `BadRequest` for a session that is not open, `Backpressure` where too many wait."""
        opened = self.of(tenant.name, name)
        if opened is None:
            raise _unknown(name)
        opened.used = self.gateway.clock()
        if not opened.streaming or not opened.busy:
            self._go(opened, go)
            return
        if len(opened.waiting) >= QUEUE:
            raise Backpressure(f"{QUEUE} requests of this session wait for their turn already", retry_after=1)
        deadline = opened.used + self.gateway.limits_out.first_byte_seconds
        opened.waiting.append(Turn(opened, client, deadline, lambda: self._go(opened, go), refuse, self._left))
        self._queued[opened] = None

    def _left(self, turn: Turn) -> None:
        turn.opened.waiting.remove(turn)
        if not turn.opened.waiting:
            self._queued.pop(turn.opened, None)

    def _go(self, opened: Opened, go: Callable[[Opened], None]) -> None:
        opened.busy += 1
        try:
            go(opened)
        except BaseException:
            self.over(opened)
            raise

    def over(self, opened: Opened) -> None:
        """A request of it ended: the next may go."""
        opened.busy -= 1
        opened.used = self.gateway.clock()
        if opened.waiting and not opened.busy:
            turn = opened.waiting.popleft()
            if not opened.waiting:
                self._queued.pop(opened, None)
            turn.client.owner = None
            try:
                turn.go()
            except Fault as fault:
                turn.refuse(fault)
            except Exception:
                self.gateway.defect("sending the next turn of a session")
                turn.refuse(Internal("the gateway failed; its log says why"))

    def settle(self, opened: Opened, connection: Outbound, request: str) -> None:
        """Its client left: have the engine end what it does, and only then let the next turn go."""
        ended = asyncio.Event()
        connection.receiver = Settling(ended.set)
        connection.ready()
        self._keep(asyncio.get_running_loop().create_task(self._settle(opened, connection, request, ended)))

    async def _settle(self, opened: Opened, connection: Outbound, request: str, ended: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(SETTLE):
                body = msgspec.json.encode({"rid": request})
                await self._post(opened.target.worker, "/abort_request", "POST", body)
                await ended.wait()
        except (Fault, TimeoutError) as error:
            log.warning("a turn of a session on %s was not seen to end: %s", opened.target.name, error or "too late")
        finally:
            if not ended.is_set():
                connection.close()
            self.over(opened)

    # -- upkeep -----------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Twice a second: turns that waited for too long, sessions that were idle for too long."""
        for opened in list(self._queued):
            while opened.waiting and opened.waiting[0].deadline < now:
                turn = opened.waiting[0]
                self._left(turn)
                turn.client.owner = None
                turn.refuse(TimedOut("the request before this one of its session did not end in time"))
        while self._due and self._due[0][0] < now:
            _, _, opened = heappop(self._due)
            if not opened.open:
                continue
            until = opened.used + self._idle(opened)
            if opened.busy or until > now:
                heappush(self._due, (max(until, now + 1.0), next(self._order), opened))
                continue
            self._forget(opened)
            if opened.timeout is None:
                # Its engine would keep it for ever.
                self._keep(asyncio.get_running_loop().create_task(self._end(opened)))

    async def _end(self, opened: Opened) -> None:
        try:
            await self._ask(opened.target.worker, "/close_session", msgspec.json.encode({"session_id": opened.alias}))
        except Fault as fault:
            log.warning("a session on %s could not be closed: %s", opened.target.name, fault.message)

    async def stop(self) -> None:
        """Close what is open, as far as that can be done in a moment."""
        left = list(self._opened.values())
        for opened in left:
            self._forget(opened, lambda: NoWorker("the gateway shuts down", retry_after=1))
        room = asyncio.Semaphore(AT_ONCE)

        async def end(opened: Opened) -> None:
            async with room:
                await self._end(opened)

        try:
            async with asyncio.timeout(PATIENCE / 3):
                await asyncio.gather(*(end(opened) for opened in left), *self._tasks, return_exceptions=True)
        except TimeoutError:
            log.warning("%d sessions could not be closed in time", len(left))
        for task in list(self._tasks):
            task.cancel()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _unknown(name: str) -> BadRequest:
    return BadRequest(f"session id {name} does not exist", param="session_params")
