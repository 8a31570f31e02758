"""Watching workers: reading what they are, whether they live, and how busy they are.

One task a worker. A worker that cannot be reached keeps being tried, so the gateway starts without its fleet and the
fleet joins when it comes. One slow probe is not death: a probe that gets no answer counts only while traffic gets none
either. An engine that is busy answers late, not never.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import aiohttp

from gateway.disagg import BOOTSTRAP_PORT, mooncake
from gateway.engines import Answer, Ask, Counts, Engine, all_engines
from gateway.errors import Malformed, NoConnection, Refused, Stalled, Unresolved, WorkerFault
from gateway.fleet import FALL, Fleet
from gateway.http.upstream import OURS
from gateway.workers import Facts, State, Worker
from policies.base import Role

log = logging.getLogger("warmroute")

ANSWER = 25.0
"""Seconds that a probe may take: SGLang's own health check waits for 20."""
BRIEF = aiohttp.ClientTimeout(total=5)
SELDOM = 5
"""Of so many looks at a worker's load one is at what it counts too."""
COUNTING = 5.0
"""Seconds that a further page may take."""
LARGEST = 8 * 1024 * 1024
"""Bytes of an answer that are read."""


class Probe:
    """Tasks that watch the workers of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        described: Callable[[Worker], None] = lambda worker: None,
        heard: Callable[[Worker], float] = lambda worker: 0.0,
        counted: Callable[[Worker, int, int, int], None] = lambda worker, prompt, cached, aborted: None,
        *,
        health_seconds: float = 5.0,
        load_seconds: float = 2.0,
        join_seconds: float = 1.0,
    ) -> None:
        self.fleet = fleet
        self.described = described
        """Told after a worker's facts were read."""
        self.heard = heard
        """When a byte of an answer last came from a worker."""
        self.counted = counted
        """Told of prompt tokens, of those found in its cache, and of requests aborted, that a worker has counted since it was
        asked before."""
        self.health_seconds = health_seconds
        self.load_seconds = load_seconds
        self.join_seconds = join_seconds
        self.engines = all_engines()
        self._session: aiohttp.ClientSession | None = None
        self._doubted: set[str] = set()
        """Workers that are to be read again at their next healthy look."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Watch every worker that the fleet has now."""
        # A probe must not wait behind another worker's; each worker has few of its own.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=4),
            timeout=aiohttp.ClientTimeout(total=ANSWER, connect=5),
            auto_decompress=False,
        )
        for worker in self.fleet.workers.values():
            self.watch(worker)

    async def stop(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def watch(self, worker: Worker) -> None:
        """Begin to watch ``worker``."""
        if worker.id not in self._tasks:
            self._tasks[worker.id] = asyncio.get_running_loop().create_task(
                self._watch(worker), name=f"probe {worker.id}"
            )

    def unwatch(self, worker: Worker) -> None:
        """Stop watching it."""
        self._doubted.discard(worker.id)
        task = self._tasks.pop(worker.id, None)
        if task is not None:
            task.cancel()

    async def read(self, worker: Worker) -> Facts:
        """What the engine is. Raises `WorkerFault` if it does not answer, `NoConnection` if it could not be asked."""

        seen: dict[str, Answer] = {}

        async def ask(path: str) -> Answer:
            # Every kind judges the same pages: one that changes meanwhile would be two engines at once.
            if path not in seen:
                seen[path] = await self.ask(worker, path)
            return seen[path]

        # One that serves is what it was: a page that is not there just now does not make it another kind.
        wanted = worker.spec.engine or (worker.facts.engine if worker.state is State.READY else None)
        kinds: list[Engine] = [self.engines[wanted]] if wanted else list(self.engines.values())
        for engine in kinds:
            facts = await engine.read(ask)
            if facts is not None:
                return facts
        if wanted:
            generic = await self.engines["generic"].read(ask)
            if generic is not None:
                generic.engine = wanted
                return generic
        raise Malformed("it answers like no engine")

    async def ask(
        self,
        worker: Worker,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        seconds: float = ANSWER,
    ) -> Answer:
        """``path`` of ``worker``, within ``seconds``.

        Raises `WorkerFault`, or `NoConnection` where this machine lacks what it takes.
        """
        assert self._session is not None
        key = worker.spec.api_key
        try:
            async with self._session.request(
                method,
                worker.url.rstrip("/") + path,
                data=body,
                headers={
                    **({"authorization": f"Bearer {key}"} if key else {}),
                    **({"content-type": "application/json"} if body is not None else {}),
                    **(headers or {}),
                },
                ssl=worker.tls or True,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=seconds, connect=5),
            ) as response:
                body = await response.content.read(LARGEST)
                while not response.content.at_eof() and len(body) < LARGEST:
                    more = await response.content.read(LARGEST - len(body))
                    if not more:
                        break
                    body += more
                return Answer(response.status, body)
        except TimeoutError as error:
            unwind(error)
            raise Stalled("a probe got no answer in time") from None
        except aiohttp.ClientConnectorDNSError as error:
            unwind(error)
            raise Unresolved("the name has no address") from None
        except aiohttp.ClientConnectorError as error:
            unwind(error)
            if error.os_error.errno in OURS:
                raise NoConnection(f"no probe can be made from here: {error.os_error.strerror}") from None
            raise Refused(f"a probe could not connect: {error.os_error.strerror or error}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            unwind(error)
            raise Malformed(f"a probe failed: {error or type(error).__name__}") from None

    async def tells_cached(self, worker: Worker) -> bool | None:
        """Have it generate one token, and see whether its usage tells cached tokens: engines do not say so otherwise.

        ``None`` if that cannot be seen.
        """
        assert self._session is not None
        models = worker.facts.models
        if not models:
            return None
        key = worker.spec.api_key
        body = {"model": models[0].name, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        try:
            async with self._session.post(
                worker.url.rstrip("/") + "/v1/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {key}"} if key else None,
                ssl=worker.tls or True,
                allow_redirects=False,
            ) as response:
                answer = Answer(response.status, await response.content.read(LARGEST)).json()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if not isinstance(usage, dict):
            return None
        details = usage.get("prompt_tokens_details")
        return isinstance(details, dict) and details.get("cached_tokens") is not None

    def doubt(self, worker: Worker) -> None:
        """What is known of it may be out of date."""
        if worker.id in self._tasks:
            self._doubted.add(worker.id)

    async def introduce(self, worker: Worker) -> None:
        """Ask a prefill engine's bootstrap server which process it is, where the protocol names that."""
        if worker.protocol != "mooncake" or worker.role is not Role.PREFILL:
            return
        assert self._session is not None
        host, port = worker.bootstrap or (worker.host, BOOTSTRAP_PORT)
        name = f"[{host}]" if ":" in host else host
        try:
            async with self._session.get(
                f"http://{name}:{port}/query", timeout=BRIEF, allow_redirects=False
            ) as response:
                # Until there are others, those that are known are the best guess.
                told = b""
                async for part in response.content.iter_chunked(65536):
                    told += part
                    if len(told) > LARGEST:
                        break
                worker.engine_ids = mooncake.engine_ids(told) or worker.engine_ids
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.debug("the bootstrap server of %s did not answer: %s", worker.id, error)

    async def poll_events(self, worker: Worker) -> Any:
        """KV events of an engine that does not publish them but hands them out. Raises `WorkerFault` or `NoConnection`."""
        return (await self.ask(worker, "/kv_cache_events", "POST")).json()

    # -- one worker -------------------------------------------------------------------------------------------------

    async def _watch(self, worker: Worker) -> None:
        load: asyncio.Task[None] | None = None
        try:
            load = asyncio.get_running_loop().create_task(self._watch_load(worker))
            while True:
                try:
                    pause = await self._look(worker)
                except Exception:
                    log.exception("probing %s failed", worker.id)
                    pause = self.health_seconds
                await asyncio.sleep(pause)
        finally:
            if load is not None:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)

    async def _look(self, worker: Worker) -> float:
        """One look at it; the seconds until the next."""
        if worker.state is State.JOINING:
            return await self._join(worker)
        answered, begun, refused = worker.answered, self.fleet.clock(), False
        await self._resolve(worker)
        try:
            engine = self.engines.get(worker.facts.engine) or self.engines["generic"]
            answer = await self.ask(worker, engine.health)
            healthy, why = answer.status == 200, f"health check says {answer.status}"
        except Stalled as fault:
            # Busy is not dead: traffic that gets answers says more than a probe that gets none.
            healthy, why = worker.answered != answered or self.heard(worker) > begun, fault.message
        except (NoConnection, Unresolved) as fault:
            # Nobody asked it: this says nothing of the worker, and requests go where its name led before.
            log.debug("%s was not probed: %s", worker.id, fault.message)
            return self.health_seconds if worker.state in (State.READY, State.DRAINING) else self.join_seconds
        except WorkerFault as fault:
            healthy, why, refused = False, fault.message, isinstance(fault, Refused)
        if healthy:
            await self._healthy(worker)
        else:
            self._unhealthy(worker, why, refused)
        return self.health_seconds if worker.state in (State.READY, State.DRAINING) else self.join_seconds

    async def _resolve(self, worker: Worker) -> None:
        """Keep its addresses fresh, so that no request waits for a name server."""
        if worker.successes % 6:
            return
        try:
            async with asyncio.timeout(5):
                await worker.pool.resolve()
        except (OSError, UnicodeError, TimeoutError) as error:
            log.debug("the name of %s cannot be resolved: %s", worker.id, error)

    async def _join(self, worker: Worker) -> float:
        try:
            facts = await self.read(worker)
        except (WorkerFault, NoConnection) as fault:
            worker.reason = fault.message
            return self.join_seconds
        self._describe(worker, facts)
        await self.introduce(worker)
        engine = self.engines.get(facts.engine) or self.engines["generic"]
        try:
            answer = await self.ask(worker, engine.health)
        except (WorkerFault, NoConnection) as fault:
            worker.reason = fault.message
            return self.join_seconds
        if answer.status != 200:
            worker.reason = f"health check says {answer.status}"
            return self.join_seconds
        worker.failures = 0
        if worker.state is State.JOINING and self.fleet.set_state(worker, State.READY, "healthy"):
            log.info("%s is ready: %s, models %s", worker.id, facts.engine, [model.name for model in facts.models])
        return self.health_seconds

    async def _healthy(self, worker: Worker) -> None:
        worker.failures = 0
        worker.successes += 1
        if worker.state is State.DOWN:
            if worker.successes < self.fleet.rise(worker):
                return
            # Whatever came back may be another engine with other models.
            try:
                facts = await self.read(worker)
            except (WorkerFault, NoConnection):
                return
            untold = facts.started is None
            self._describe(worker, facts)
            await self.introduce(worker)
            if untold:
                # It may be the same process with all that it held, or a new one: what is not known is not believed.
                self.fleet.restarted(worker)
            if worker.state is State.DOWN and self.fleet.set_state(worker, State.READY, "healthy again"):
                log.info("%s is ready again", worker.id)
        elif worker.successes % 6 == 0 or worker.id in self._doubted:
            self._doubted.discard(worker.id)
            try:
                facts = await self.read(worker)
                if facts.models or not worker.facts.models:
                    self._describe(worker, facts)
                    await self.introduce(worker)
            except (WorkerFault, NoConnection) as fault:
                log.debug("reading %s failed: %s", worker.id, fault.message)

    def _unhealthy(self, worker: Worker, why: str, refused: bool) -> None:
        """``refused``: it does not take connections, which is no matter of doubt."""
        worker.successes = 0
        worker.failures += 1
        worker.silenced = not refused
        if worker.state is State.READY and worker.failures >= FALL and not refused and self.fleet.doubts(worker):
            worker.reason = f"doubted: {why}, and so it is with most of its peers"
            if worker.failures == FALL:
                log.warning("%s stays in use: %s, and so it is with most of its peers", worker.id, why)
            return
        if worker.state is State.READY and worker.failures >= FALL and self.fleet.set_state(worker, State.DOWN, why):
            log.warning("%s is down: %s", worker.id, why)
        elif worker.state is State.DRAINING and worker.failures == FALL:
            log.warning("%s, which drains, does not answer: %s", worker.id, why)
            self.fleet.went_down(worker)

    def _describe(self, worker: Worker, facts: Facts) -> None:
        self.fleet.describe(worker, facts)
        self.described(worker)

    async def _watch_load(self, worker: Worker) -> None:
        pause = self.load_seconds
        counts: Counts | None = None
        looks = 0
        while True:
            await asyncio.sleep(pause)
            pause = self.load_seconds
            if worker.state not in (State.READY, State.DRAINING):
                continue
            engine = self.engines.get(worker.facts.engine)
            if engine is None:
                return
            seen: dict[str, Answer] = {}

            async def ask(path: str, seen: dict[str, Answer] = seen) -> Answer:
                if path not in seen:
                    seen[path] = await self.ask(worker, path, seconds=COUNTING if seen else ANSWER)
                return seen[path]

            if not await self._look_at_load(worker, engine, ask):
                pause = 30.0
            if looks % SELDOM == 0:
                counts = await self._look_at_counts(worker, engine, ask, counts)
            looks += 1

    async def _look_at_load(self, worker: Worker, engine: Engine, ask: Ask) -> bool:
        """Whether it tells its load at all, as far as is known."""
        waiting = [target.running - int(target.busy - target.foreign) for target in worker.targets]
        before = [target.running for target in worker.targets]
        try:
            loads = await engine.load(ask)
        except (WorkerFault, NoConnection):
            return True
        except Exception:
            log.exception("reading the load of %s failed", worker.id)
            return False
        if loads is None:
            return False
        for target, load, ours, running in zip(worker.targets, loads, waiting, before, strict=False):
            load.taken = self.fleet.clock()
            self.fleet.report(target, load, max(0, ours), max(running, target.running))
        return True

    async def _look_at_counts(self, worker: Worker, engine: Engine, ask: Ask, before: Counts | None) -> Counts | None:
        """What it counts, told; returns what the next are compared with. That it cannot be read costs nothing else."""
        try:
            now = await engine.counts(ask)
        except (WorkerFault, NoConnection):
            return before
        except Exception:
            log.exception("reading what %s counts failed", worker.id)
            return before
        return before if now is None else self._count(worker, before, now)

    def _count(self, worker: Worker, before: Counts | None, now: Counts) -> Counts:
        """Tell what came in between; returns what the next are compared with."""
        if before is None:
            self.counted(worker, 0, 0, 0)
        else:
            prompt, cached = now.prompt - before.prompt, now.cached - before.cached
            if worker.role is Role.DECODE:
                cached -= now.brought - before.brought
            # Fewer than before: it started anew.
            if prompt >= 0 and now.cached >= before.cached:
                self.counted(worker, prompt, max(0, cached), max(0, (now.aborted or 0) - (before.aborted or 0)))
        return now


def unwind(error: BaseException) -> None:
    """Let go of the frames that it came through: the HTTP client's keep their error, and it them, with all of a connection."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__ = None
        at = at.__cause__ or at.__context__
