"""Homes that are saved and restored at the worst moments: while the gateway stops, starts, or shares its store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic, time

import msgspec
import pytest

from gateway.config import Config
from gateway.config_reader import Secret
from gateway.fleet import Fleet
from gateway.http.limits import Outward
from gateway.http.outbox import Outbox
from gateway.keeping import SLICE, Keeper
from gateway.naming import Found
from gateway.run import Running
from gateway.sessions import Session, Sessions
from gateway.stores import FileStore, Kept, RedisStore, Store, Unsaved
from gateway.workers import Facts, ServedModel, State, WorkerSpec
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.redis_server import RedisServer
from tests.gateway.talk import chat, once, request, until
from tests.gateway.test_keeping import in_redis, kept_in


class Memory:
    """A store that takes its time. ``me``: as Redis has it."""

    def __init__(self, lines: dict[str, bytes] | None = None, me: str | None = None) -> None:
        self.lines = {} if lines is None else lines
        self.me = me
        self.pause = 0.0
        self.fails = False

    async def load(self) -> list[Kept]:
        await asyncio.sleep(self.pause)
        return [msgspec.json.decode(line, type=Kept) for line in self.lines.values()]

    async def save(self, lines: list[tuple[str, bytes | None]], live: int) -> None:
        await asyncio.sleep(self.pause)
        if self.fails:
            raise Unsaved("it is full")
        for key, line in lines:
            if line is not None:
                self.lines[key] = line
            elif key in self.lines and msgspec.json.decode(self.lines[key], type=Kept).by == (self.me or ""):
                del self.lines[key]

    async def close(self) -> None:
        """Nothing is open."""


class Gateway:
    """The parts of one that keep homes, with two workers of one target each."""

    def __init__(self, store: Store, joined: bool = True, idle: float = 1800.0) -> None:
        self.fleet = Fleet(monotonic, Outward(), lambda target: None, Outbox(asyncio.get_running_loop()))
        self.workers = [self.fleet.add(WorkerSpec(f"http://127.0.0.1:{port}")) for port in (9001, 9002)]
        for worker in self.workers:
            self.fleet.describe(worker, Facts(engine="sglang", models=[ServedModel("m")]))
            self.fleet.set_state(worker, State.READY, "")
        self.ended: list[bytes] = []
        self.sessions = Sessions(idle=idle)
        self.keeper = Keeper(store, self.sessions, self.fleet)
        self.sessions.bound = self.bound
        self.sessions.turned = self.keeper.used
        if joined:
            self.join()

    def join(self) -> None:
        for worker in self.workers:
            self.keeper.arrived(worker)

    def bound(self, session: Session) -> None:
        if session.told and session.gone:
            self.ended.append(session.key)
        self.keeper.changed(session)

    def session(self, name: str) -> Session:
        return self.sessions.find(Found("x", name.encode()), "t", "m", monotonic())

    def turn(self, name: str, target: int = 0) -> Session:
        """A request of it from its first byte to its last."""
        session = self.session(name)
        session.running += 1
        if session.home is None:
            self.sessions.bind(session, target, "new")
        session.told = (session.told or {}) | {self.workers[session.home or 0].id: 0}
        session.running -= 1
        session.turns += 1
        self.keeper.used(session, monotonic())
        return session

    async def started(self) -> Gateway:
        self.keeper.start()
        await until(lambda: not self.keeper.restoring)
        return self


async def saved(gateway: Gateway) -> None:
    assert await gateway.keeper._round()


async def filled(store: Store, count: int) -> None:
    first = Gateway(store)
    for number in range(count):
        first.turn(str(number), number % 2)
    await saved(first)


# -- stopping ---------------------------------------------------------------------------------------------------------


async def test_stopping_in_the_middle_of_a_round_loses_none_of_it() -> None:
    store = Memory()
    store.pause = 0.05
    gateway = await Gateway(store).started()
    for number in range(5000):
        gateway.turn(str(number))
    await until(lambda: store.lines)
    assert len(store.lines) < 5000
    await gateway.keeper.stop()
    assert len(store.lines) == 5000 and not len(gateway.keeper)


async def test_a_round_that_is_cancelled_or_fails_leaves_what_it_did_not_save() -> None:
    store = Memory()
    gateway = Gateway(store)
    for number in range(1200):
        gateway.turn(str(number))
    store.pause = 0.02
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.03):
            await gateway.keeper._round()
    assert len(store.lines) + len(gateway.keeper) == 1200 and store.lines
    store.fails = True
    left = len(gateway.keeper)
    assert not await gateway.keeper._round() and len(gateway.keeper) == left
    store.fails = False
    await saved(gateway)
    assert len(store.lines) == 1200


@pytest.mark.parametrize("kept", [True, False])
async def test_a_gateway_that_stops_and_keeps_its_sessions_does_not_end_them_at_their_engines(
    gateway: Begin, engine: StartEngine, tmp_path: Path, kept: bool
) -> None:
    at = await engine("sglang", session_refs=True, time_scale=0.0)
    running = await gateway(at, policy="cache_aware", change=kept_in(tmp_path / "state") if kept else None)
    for number in range(10):
        assert (await once(running.port, request(chat(max_tokens=1), f"x-session-id: s{number}"))).status == 200
    assert (await once(running.port, request(None, method="DELETE", path="/v1/sessions/s0"))).status == 200
    await running.stop()
    assert at.stats()["sessions"] == (9 if kept else 0)


# -- successors -------------------------------------------------------------------------------------------------------


async def test_a_turn_that_outlives_its_session_leaves_its_successors_home_alone() -> None:
    store = Memory()
    gateway = Gateway(store)
    old = gateway.turn("a", 0)
    await saved(gateway)
    old.saved -= 1000
    gateway.sessions.drop(old)
    new = gateway.turn("a", 1)
    await saved(gateway)
    assert gateway.sessions.turned is not None
    gateway.sessions.turned(old, monotonic())
    gateway.keeper.changed(old)
    await saved(gateway)
    (line,) = store.lines.values()
    assert msgspec.json.decode(line, type=Kept).home == gateway.workers[1].targets[0].name
    assert new.key.hex() in store.lines


# -- one store --------------------------------------------------------------------------------------------------------


async def test_a_copy_that_was_never_used_here_takes_nothing_from_the_gateway_that_uses_it() -> None:
    lines: dict[str, bytes] = {}
    first = Gateway(Memory(lines, "a"))
    first.turn("s")
    await saved(first)
    second = await Gateway(Memory(lines, "b")).started()
    (copy,) = second.sessions.all()
    assert copy.home == second.workers[0].targets[0].id
    second.sessions.unbind(copy)
    second.sessions.bind(copy, 1, "drained")
    await saved(second)
    assert msgspec.json.decode(lines[copy.key.hex()], type=Kept).by == "a"
    second.sessions.sweep(monotonic() + 3600)
    await saved(second)
    assert len(second.sessions) == 0 and second.ended == [] and len(lines) == 1
    assert second.keeper._copies == {} and second.keeper._waiting == {}
    await second.keeper.stop()


async def test_a_copy_is_ours_from_the_first_turn_that_runs_here() -> None:
    lines: dict[str, bytes] = {}
    first = Gateway(Memory(lines, "a"))
    first.turn("s")
    await saved(first)
    second = await Gateway(Memory(lines, "b")).started()
    session = second.turn("s")
    assert session.told == {second.workers[0].id: 0}
    await saved(second)
    assert msgspec.json.decode(lines[session.key.hex()], type=Kept).by == "b"
    # What another one saved last stays, ...
    first.sessions.sweep(monotonic() + 3600)
    await saved(first)
    assert len(lines) == 1
    # ... and what this one did goes.
    second.sessions.sweep(monotonic() + 3600)
    await saved(second)
    assert lines == {} and second.ended == [session.key]
    await second.keeper.stop()


async def test_what_is_restored_from_a_file_is_ours(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "state"))
    store.secret_of()
    await filled(store, 3)
    again = await Gateway(store).started()
    assert not len(again.keeper)
    again.sessions.sweep(monotonic() + 3600)
    await saved(again)
    assert await store.load() == [] and len(again.ended) == 3
    await again.keeper.stop()


async def test_redis_forgets_a_session_only_for_the_gateway_that_saved_it_last(redis: RedisServer) -> None:
    await redis.up()
    first, second = RedisStore(redis.url, 60), RedisStore(redis.url, 60)
    assert first.me != second.me
    for store, key in ((first, "aa"), (first, "bb"), (second, "bb")):
        await store.save([(key, msgspec.json.encode(Kept(key, by=store.me)))], 1)
    await first.save([("aa", None), ("bb", None), ("cc", None)], 0)
    assert [kept.key for kept in await first.load()] == ["bb"]
    await second.save([("bb", None)], 0)
    assert await first.load() == []
    await first.close()
    await second.close()


async def test_two_gateways_with_one_redis_do_not_end_each_others_sessions(
    gateway: Begin, engine: StartEngine, redis: RedisServer
) -> None:
    await redis.up()
    at = await engine("sglang", session_refs=True, time_scale=0.0)
    first = await gateway(at, policy="cache_aware", change=in_redis(redis))
    assert (await once(first.port, request(chat(max_tokens=1), "x-session-id: s"))).status == 200
    keeper = first.keeper
    assert keeper is not None
    await until(lambda: not len(keeper))
    second = await gateway(at, policy="cache_aware", change=in_redis(redis))
    (copy,) = second.sessions.all()
    copy.used -= 2 * second.sessions.idle
    second.gateway.sweep()
    assert len(second.sessions) == 0
    await second.stop()
    assert at.stats()["sessions"] == 1
    third = await gateway(at, policy="cache_aware", change=in_redis(redis))
    assert len(third.sessions) == 1


# -- restoring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [True, False])
async def test_a_session_that_began_while_others_were_restored_takes_its_saved_home(joined: bool) -> None:
    store = Memory()
    await filled(store, 2)
    store.pause = 0.05
    again = Gateway(store, joined)
    again.keeper.start()
    began = again.turn("1", 0)
    many = again.turn("0", 1)
    again.turn("0", 1)
    await until(lambda: not again.keeper.restoring)
    again.join()
    assert began.home == again.workers[1].targets[0].id
    # A second turn ran where it was placed: its cache is there now.
    assert many.home == again.workers[1].targets[0].id
    assert len(again.sessions) == 2
    await again.keeper.stop()


async def test_a_session_that_ended_while_others_were_restored_stays_ended() -> None:
    store = Memory()
    await filled(store, 2)
    store.pause = 0.05
    again = Gateway(store)
    again.keeper.start()
    again.sessions.drop(again.turn("1"))
    await until(lambda: not again.keeper.restoring)
    assert [session.key for session in again.sessions.all()] == [again.session("0").key]
    await again.keeper.stop()


async def test_restoring_lets_others_run(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "state"))
    store.secret_of()
    await filled(store, 20_000)
    again = Gateway(store, joined=False)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    kept = await store.load()
    task = asyncio.create_task(others())
    await again.keeper._restore(kept)
    assert again.keeper.restored == 20_000 and turns >= 20_000 // SLICE
    turns = 0
    again.join()
    await until(lambda: not again.keeper._waiting and not again.keeper._tasks)
    assert turns >= 20_000 // SLICE
    assert all(session.home is not None for session in again.sessions.all())
    # What the store has is not saved again.
    assert not len(again.keeper)
    task.cancel()


@asynccontextmanager
async def mute() -> AsyncIterator[int]:
    """A port that takes connections and says nothing."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_nothing_waits_for_a_redis_that_does_not_answer(gateway: Begin, engine: StartEngine) -> None:
    async with mute() as port:

        def change(config: Config) -> None:
            config.sessions.redis = Secret(f"redis://127.0.0.1:{port}/0")

        running = await gateway(await engine(), policy="cache_aware", change=change, ready=False)
        await until(lambda: all(worker.state is State.READY for worker in running.fleet.workers.values()))
        assert (await once(running.port, request(chat(max_tokens=1), "x-session-id: s"))).status == 200
        assert running.keeper is not None and running.keeper.restoring
        # Nor does its end, beyond one try to save.
        begun = monotonic()
        await running.stop()
        assert monotonic() - begun < 9


async def test_a_line_that_was_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    store = FileStore(str(path))
    store.secret_of()
    await store.save([("00" * 16, msgspec.json.encode(Kept("00" * 16)))], 1)
    with path.open("ab") as file:
        file.write(b'{"key":"00ff')
    again = FileStore(str(path))
    again.secret_of()
    await again.save([("11" * 16, msgspec.json.encode(Kept("11" * 16)))], 2)
    await again.save([("22" * 16, msgspec.json.encode(Kept("22" * 16)))], 3)
    assert [kept.key[:2] for kept in await FileStore(str(path)).load()] == ["00", "11", "22"]


async def test_sessions_that_wait_for_a_worker_are_forgotten_with_their_like() -> None:
    store = Memory()
    await filled(store, 30)
    again = await Gateway(store, joined=False, idle=60.0).started()
    keeper = again.keeper
    assert sum(map(len, keeper._waiting.values())) == 30
    for number in range(10):
        again.sessions.drop(again.session(str(number)))
    assert sum(map(len, keeper._waiting.values())) == 20
    # At home elsewhere.
    for number in range(10, 20):
        again.turn(str(number), 0)
        again.turn(str(number), 0)
        again.sessions.bind_partner(again.session(str(number)), 1)
    assert sum(map(len, keeper._waiting.values())) == 10
    again.sessions.sweep(monotonic() + 61)
    assert keeper._waiting == {}
    await keeper.stop()


def test_lines_of_a_time_to_come_are_taken() -> None:
    """Clocks of two machines differ."""

    async def run() -> None:
        store = Memory({"00": msgspec.json.encode(Kept("00" * 16, used=time() + 60))})
        again = await Gateway(store).started()
        assert len(again.sessions) == 1
        await again.keeper.stop()

    asyncio.run(run())


def test_a_url_that_is_none_is_said_at_the_start() -> None:
    async def start() -> None:
        config = Config()
        config.sessions.redis = Secret("localhost:6379")
        Running(config)

    with pytest.raises(ValueError, match=r"sessions\.redis: .*redis://host:port/db"):
        asyncio.run(start())
