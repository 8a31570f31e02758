"""Changing the configuration of a gateway that runs.

    asked (SIGHUP, POST /config/reload), or the file changed
      -> read and checked whole, in a thread          a problem: all stays as it is, and is told
      -> what takes a restart is left as it was       told as ``needs_restart``
      -> all that can fail is made                    (tenants with their keys, policies, specs of workers)
      -> swapped, without a pause in between          so that a request sees what was or what is

What was learned is nobody's configuration, and stays: index, sessions with their homes and pins, rates, connections. A worker
that is not listed any more drains and is forgotten when nothing runs on it; one that was added over the admin port was never
listed, and stays. Files of keys and certificates are watched by themselves: they are followed even while the configuration
beside them cannot be read, for a key that leaked must go whatever else is wrong.

A file is read when it has stopped changing, so that one that is being written is not taken for one that lacks its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import time
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.asks import Options
from gateway.config import Config
from gateway.config_check import check
from gateway.config_diff import compare, effective, tree
from gateway.config_reader import ConfigError, Problem, masked
from gateway.listed import Listed
from gateway.series import Gauge
from gateway.source import Source, Stat, stat_of
from gateway.tenants import Tenants
from gateway.tls import digest, renew
from gateway.workers import WorkerSpec, id_of, tls_of

if TYPE_CHECKING:
    from gateway.run import Running

T = TypeVar("T")

log = logging.getLogger("warmroute")

LOOK = 2.0
"""Seconds between two looks at the files."""
SETTLE = 0.5
"""Seconds for which a file has to be the same before it is read."""
PATIENCE = 60.0
"""Seconds that reading it may take."""
SALT = b"compared here"
AUTHORITIES = "listen.tls.client_ca"


class NoFile(Exception):
    """The gateway was started without a file: there is nothing to read again."""


@dataclass(slots=True)
class Outcome:
    """What came of one reload."""

    outcome: str
    """applied, unchanged, failed."""
    changed: list[str] = field(default_factory=list)
    """Keys."""
    problems: list[Problem] = field(default_factory=list)


class Reloading:
    """See the module's head. ``source``: the file; ``None``: there is none."""

    def __init__(self, running: Running, source: Source | None = None) -> None:
        self.running = running
        self.source = source
        self.generation = 0
        """Swaps so far."""
        self.at: float | None = None
        """When the last one was, Unix seconds."""
        self._wrong: list[Problem] = []
        """With the file, when it was last read."""
        self._beside: list[Problem] = []
        """With files of keys and certificates, when they were last read."""
        self.needs_restart: list[str] = []
        """Keys of the file that are not followed."""
        self.listed = Listed(running)
        self._lock = asyncio.Lock()
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._text = None if source is None else source.text
        """What the file said that is in force, or failed."""
        self._seen = self._stats()
        if source is not None:
            self._seen[source.path] = source.stat

    @property
    def problems(self) -> list[Problem]:
        """What keeps the files from being followed; empty: nothing does."""
        return self._beside + [each for each in self._wrong if each not in self._beside]

    def start(self) -> None:
        """Watch the files."""
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="reload")

    async def stop(self) -> None:
        """Watch no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def ask(self) -> None:
        """Reload soon."""
        self._asked.set()

    # -- watching ---------------------------------------------------------------------------------------------------

    def _files(self) -> list[str]:
        config = self.running.config
        tls = [] if config.listen.tls is None else config.listen.tls.files + config.listen.tls.authorities
        return [*(path for tenant in config.tenants for path in tenant.key_files), *tls]

    def _stats(self) -> dict[str, Stat | None]:
        own = [] if self.source is None else [self.source.path]
        return {path: stat_of(path) for path in [*own, *self._files()]}

    async def _watch(self) -> None:
        while True:
            asked = False
            try:
                async with asyncio.timeout(LOOK):
                    asked = await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            try:
                if asked:
                    await self._obey()
                else:
                    await self._look()
            except Exception:
                self.running.gateway.defect("reloading the configuration")

    async def _obey(self) -> None:
        try:
            await self.reload()
        except NoFile as error:
            log.warning("%s", error)
            await self.refresh()

    async def _look(self) -> None:
        """Follow what changed since the last look."""
        found = await self._settled()
        changed = {path for path in {*found, *self._seen} if found.get(path) != self._seen.get(path)}
        self._seen = found
        done = False
        if self.source is not None and self.source.path in changed:
            done = await self.reload(touched=True) is not None
        if changed & set(self._files()) and not (done and not self.problems):
            await self.refresh()
            if self._wrong and self.source is not None and not done:
                # It may have been these files that were wrong with it.
                await self.reload()

    async def _settled(self) -> dict[str, Stat | None]:
        found = await self._reading(self._stats)
        while any(found[path] != self._seen.get(path) for path in found):
            await asyncio.sleep(SETTLE)
            before, found = found, await self._reading(self._stats)
            if before == found:
                break
        return found

    async def _reading(self, work: Callable[..., T], *arguments: Config) -> T:
        """A disk may hang; the loop must not. Raises `TimeoutError`."""
        async with asyncio.timeout(PATIENCE):
            return await asyncio.to_thread(work, *arguments)

    # -- reloading --------------------------------------------------------------------------------------------------

    async def reload(self, touched: bool = False) -> Outcome | None:
        """Read the file again and follow it. ``touched``: only if it says something else than before; ``None``: it does not.

        Raises `NoFile`. What is wrong with the file is in the outcome.
        """
        source = self.source
        if source is None:
            raise NoFile("the gateway was started without a configuration file: there is nothing to reload")
        async with self._lock:
            before = self._text
            try:
                wanted = await self._reading(source.load)
                self._text = source.text
                if touched and self._text == before and not self.problems:
                    return None
                return self._follow(await self._reading(self._plan, wanted), quiet=touched)
            except Exception as error:
                self._text = source.text
                if touched and self._text == before and self.problems:
                    return None
                self._wrong = masked(self._why(error), source.filled)
                return self._failed(self._wrong)

    async def refresh(self) -> Outcome:
        """Follow files of keys and certificates; the configuration stays."""
        async with self._lock:
            try:
                plan = await self._reading(self._plan, self.running.config)
                # What the file says beyond is not read here, and is waited for still.
                left = [key for key in self.needs_restart if key not in (*plan.restart, AUTHORITIES)]
                return self._follow(replace(plan, restart=left + plan.restart), quiet=True, whole=False)
            except Exception as error:
                self._beside = self._why(error)
                return self._failed(self._beside)

    def _why(self, error: Exception) -> list[Problem]:
        """What is wrong, in an except block."""
        if isinstance(error, ConfigError):
            return error.problems
        if isinstance(error, TimeoutError):
            return [Problem(None, "", f"files could not be read within {PATIENCE:.0f} s")]
        self.running.gateway.defect("reloading the configuration")
        return [Problem(None, "", "the gateway failed at it; its log says why")]

    def _plan(self, wanted: Config) -> Plan:
        """All that can fail; changes nothing. Raises `ConfigError`."""
        now = self.running.config
        config = effective(now, wanted)
        problems = check(config)
        if problems:
            # The file is right, but not beside what takes a restart to be followed.
            raise ConfigError([each._replace(message=f"{each.message} (until a restart)") for each in problems])
        named = config.disaggregation.named
        specs = {id_of(worker.url): worker.spec(named) for worker in config.workers}
        for number, worker in enumerate(config.workers):
            self._check_tls(f"workers[{number}].ca", specs[id_of(worker.url)])
        tenants, options = self.running.make(config)
        followed = tree(config, SALT)
        changed = [change.key for change in compare(tree(now, SALT), followed)]
        if tenants.filed != self.running.gateway.tenants.filed and not any(
            key.startswith("tenants") for key in changed
        ):
            changed.append("tenants.key_files")
        told = config.listen.tls
        tls = None if told is None else digest(told.files)
        if tls != self.running.tls_digest:
            changed.append("listen.tls")
        restart = [change.key for change in compare(followed, tree(wanted, SALT))]
        if told is not None and digest(told.authorities) != self.running.ca_digest:
            restart.append(AUTHORITIES)
        return Plan(config, tenants, options, specs, changed, restart, tls)

    def _check_tls(self, key: str, spec: WorkerSpec) -> None:
        """Raises `ConfigError` for authorities that cannot be read, if this is a worker that is new or changed."""
        known = self.running.fleet.workers.get(id_of(spec.url))
        if known is not None and known.spec == spec:
            return
        try:
            tls_of(spec)
        except OSError as error:
            raise ConfigError([Problem(None, key, f"{spec.ca} cannot be used: {error.strerror or error}")]) from None

    def _follow(self, plan: Plan, quiet: bool, whole: bool = True) -> Outcome:
        """Swap. ``quiet``: nobody asked, so that nothing is said if nothing is new. Not ``whole``: of files beside the
        configuration, which may be wrong still.

        Raises `ConfigError` for certificates that cannot be used, before anything changed.
        """
        running = self.running
        if running.tls is not None and running.config.listen.tls is not None and plan.tls != running.tls_digest:
            renew(running.tls, running.config.listen.tls)
            running.tls_digest = plan.tls
        quiet = quiet and not self.problems
        self._beside = []
        if whole:
            self._wrong = []
        self.needs_restart = plan.restart
        if not plan.changed:
            if not quiet:
                running.metrics.config_reloads.add(("unchanged",))
                log.info("the configuration is unchanged%s", self._waits())
            return Outcome("unchanged")
        before = {id_of(worker.url) for worker in running.config.workers}
        running.reconfigure(plan.config, plan.tenants, plan.options)
        self.listed.follow(before, plan.specs)
        running.discovered.reconfigure()
        self.generation += 1
        self.at = time()
        running.metrics.config_reloads.add(("applied",))
        log.info("configuration %d: changed %s%s", self.generation, ", ".join(plan.changed), self._waits())
        return Outcome("applied", plan.changed)

    def _waits(self) -> str:
        return f"; a restart is needed for {', '.join(self.needs_restart)}" if self.needs_restart else ""

    def _failed(self, problems: list[Problem]) -> Outcome:
        self.running.metrics.config_reloads.add(("failed",))
        log.error("the configuration was not reloaded, and what was in force stays; problems: %d", len(problems))
        for problem in problems:
            log.error("%s", problem)
        return Outcome("failed", problems=problems)

    # -- what is told -----------------------------------------------------------------------------------------------

    def told(self, whole: bool) -> dict[str, Any]:
        """For `/healthz`; ``whole``: with what the configuration says."""
        brief = {"generation": self.generation, "reloaded_at": self.at, "last_reload_ok": not self.problems}
        if not whole:
            return brief
        problems = [problem._asdict() for problem in self.problems]
        return {**brief, "last_error": problems or None, "needs_restart": self.needs_restart}

    def gauges(self) -> list[Gauge]:
        """For the metrics."""
        return [
            Gauge(
                "warmroute_config_generation",
                "Reloads of the configuration that were followed.",
                lambda: [((), self.generation)],
            ),
            Gauge(
                "warmroute_config_last_reload_ok",
                "0 while the last reload of the configuration failed.",
                lambda: [((), float(not self.problems))],
            ),
            Gauge(
                "warmroute_config_needs_restart",
                "Keys of the configuration that take a restart to be followed.",
                lambda: [((), len(self.needs_restart))],
            ),
        ]


@dataclass(slots=True)
class Plan:
    """A configuration that can be followed, and what is made of it."""

    config: Config
    tenants: Tenants
    options: Options
    specs: dict[str, WorkerSpec]
    changed: list[str]
    """Keys that are followed."""
    restart: list[str]
    """Keys that are not."""
    tls: bytes | None
    """Digest of the certificate's files."""
