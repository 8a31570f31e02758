"""Recordings: a workload that went through a real gateway is replayed from its file, in which nothing of its text is."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

import gateway.recording as recording_file
import gateway.records as records
from gateway.cli import main
from gateway.config import Config, ConfigError, Recording, TenantConfig, WorkerConfig, parse
from gateway.config_reader import Secret
from gateway.metrics import Metrics
from gateway.run import Running
from load_tests.client import Client, Results
from load_tests.workloads.agents import agent_sessions
from tests.gateway.conftest import Begin, StartEngine, StartScripted, start_gateway
from tests.gateway.scripted import Seen, ok
from tests.gateway.talk import CHAT, Raw, admin, chat, long_chat, request, until

TEXT = "a secret that nobody else is to know, said at some length and more than once: "


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "recording.jsonl"


def into(path: Path, **fields: Any) -> Callable[[Config], None]:
    """Makes a configuration record to ``path``."""

    def change(config: Config) -> None:
        config.recording = Recording(str(path), **fields)

    return change


@asynccontextmanager
async def recording(path: Path, *workers: Any, policy: str = "cache_aware", **fields: Any) -> AsyncIterator[Running]:
    """A gateway that records; what it recorded is in the file when it has stopped."""
    running = await start_gateway(*workers, policy=policy, change=into(path, **fields))
    try:
        yield running
    finally:
        await running.stop()
        assert running.gateway.defects == 0


def rows(path: Path) -> list[dict[str, Any]]:
    """Without the first line."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def key_of(path: Path) -> Path:
    return path.with_name(path.name + recording_file.KEY)


def content(path: Path) -> str:
    return path.read_text()


def put(path: Path, text: str) -> None:
    path.write_text(text)


async def ask(running: Running, body: dict[str, Any], *lines: str, path: str = CHAT) -> int:
    async with await Raw.connect(running.port) as client:
        answer = await client.ask(request(body, "Content-Type: application/json", *lines, path=path))
        return answer.status


def said(*texts: str, **fields: Any) -> dict[str, Any]:
    """A chat in which user and assistant take turns."""
    roles = ("user", "assistant")
    return chat(
        messages=[{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)], max_tokens=4, **fields
    )


async def counter(running: Running, name: str) -> float:
    lines = (await admin(running, "/metrics")).splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


# -- end to end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
async def test_what_was_recorded_replays_with_the_hit_rate_that_engines_counted(
    policy: str, file: Path, engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = [await engine(models=["sim"], kv_tokens=200_000, seed=number, time_scale=0.3) for number in range(3)]
    sessions = agent_sessions(sessions=12, turns=5, shared_tokens=800, result_tokens=500, think=0.1, spread=0.8)
    results = Results()
    async with (
        recording(file, *engines, policy=policy) as running,
        Client(f"http://127.0.0.1:{running.port}", "sim") as client,
    ):
        await client.run(sessions, results)
    assert results.errors == []
    stats = [each.stats() for each in engines]
    counted = sum(each["cached_tokens"] for each in stats) / sum(each["prompt_tokens"] for each in stats)
    assert len(rows(file)) == results.requests == sum(len(session.turns) for session in sessions)

    command = ["replay", str(file), "--workers", "3", "--kv-tokens", "200000", "--policy", "round_robin,cache_aware"]
    assert main([*command, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["policies"]
    assert figures[policy]["requests"] == results.requests
    # Where round robin sends a prompt follows from the order in which requests happen to come.
    near = 0.08 if policy == "cache_aware" else 0.15
    assert figures[policy]["token_hit_rate"] == pytest.approx(counted, abs=near)
    assert figures["cache_aware"]["token_hit_rate"] > figures["round_robin"]["token_hit_rate"] + 0.1


async def test_nothing_of_what_was_said_is_in_the_file(file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"])

    def change(config: Config) -> None:
        config.recording = Recording(str(file))
        config.tenants = [TenantConfig("research", keys=[Secret("sk-of-the-tenant")])]

    running = await start_gateway(started, policy="cache_aware", change=change)
    lines = ("Authorization: Bearer sk-of-the-tenant", "X-Session-Id: my-session", "X-Other: my-header")
    for stream in (False, True):
        assert await ask(running, said(TEXT * 20, stream=stream, user="some-user"), *lines) == 200
    await running.stop()
    written = content(file) + content(key_of(file))
    for word in ("secret", "sk-of", "research", "my-session", "my-header", "some-user", "X-Other"):
        assert word not in written
    first, second = rows(file)
    assert first["session_id"] == second["session_id"] is not None
    assert len(first["session_id"]) == len(first["tenant"]) == 16
    for path in (file, key_of(file)):
        assert os.stat(path).st_mode & 0o077 == 0


async def test_a_line_tells_sizes_times_and_pages(file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"])
    async with recording(file, started) as running:
        assert await ask(running, said(TEXT * 20, stream=True, stream_options={"include_usage": True})) == 200
        assert await ask(running, said(TEXT * 20, "an answer", TEXT * 9)) == 200
    first, second = rows(file)
    assert set(first) == {
        *("timestamp", "model", "tenant", "session_id", "input_length", "output_length", "cached_tokens", "ttft_ms"),
        *("duration_ms", "status", "outcome", "target", "page", "pages", "block_size", "hash_ids"),
    }
    assert (first["model"], first["status"], first["outcome"], first["page"]) == ("sim", 200, "ok", "text")
    assert first["input_length"] + second["input_length"] == started.stats()["prompt_tokens"]
    assert (first["output_length"], second["output_length"]) == (4, 4)
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == started.stats()["cached_tokens"] > 0
    assert 0 < first["ttft_ms"] <= first["duration_ms"]
    assert second["ttft_ms"] is None
    assert -2 < second["timestamp"] - first["timestamp"] - first["duration_ms"] < 5000
    assert first["target"] == next(iter(running.fleet.targets.values())).name
    assert len(first["hash_ids"]) == int(first["pages"])
    assert first["block_size"] == max(1, round(first["input_length"] / first["pages"]))
    # The second prompt goes on from the first: they part where the first had ended.
    shared = len(first["hash_ids"]) - 1
    assert shared > 4
    assert first["hash_ids"][:shared] == second["hash_ids"][:shared]


@pytest.mark.parametrize("policy", ["round_robin", "consistent_hash", "prefix_hash", "cache_aware"])
async def test_prompts_are_recorded_whatever_the_policy_needs(policy: str, file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"])
    other = file.with_name("other.jsonl")
    async with recording(file, started, policy=policy) as running:
        assert await ask(running, said(TEXT * 20), "X-Session-Id: one") == 200
        assert await ask(running, said("x" + TEXT * 20), "X-Session-Id: one") == 200
    async with recording(other, started, policy="cache_aware") as running:
        assert await ask(running, said(TEXT * 20), "X-Session-Id: one") == 200
    first, second = rows(file)
    assert first["pages"] == rows(other)[0]["pages"]
    assert len(first["hash_ids"]) == len(rows(other)[0]["hash_ids"]) > 4
    assert first["session_id"] == second["session_id"] is not None
    # An id tells all that stands before it: one other byte at the start, and none is the same.
    assert not set(first["hash_ids"]) & set(second["hash_ids"])
    # Another recording has another key.
    assert not set(first["hash_ids"]) & set(rows(other)[0]["hash_ids"])


async def test_token_ids_are_pages_of_sixteen(file: Path, engine: StartEngine) -> None:
    started = await engine("sglang", models=["sim"])
    for policy in ("round_robin", "cache_aware"):
        async with recording(file, started, policy=policy) as running:
            body = {"model": "sim", "input_ids": list(range(100, 200)), "sampling_params": {"max_new_tokens": 2}}
            assert await ask(running, body, path="/generate") == 200
    first, second = rows(file)
    for row in (first, second):
        assert (row["page"], row["block_size"], row["pages"]) == ("ids", 16, 6.25)
        assert row["input_length"] == 100
        assert len(row["hash_ids"]) == 6


@pytest.mark.parametrize("policy", ["round_robin", "prefix_hash"])
async def test_streams_are_recorded_with_their_lengths_whoever_asks_for_them(
    policy: str, file: Path, engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    started = await engine(models=["sim"])
    async with recording(file, started, policy=policy) as running:
        async with await Raw.connect(running.port) as client:
            answer = await client.ask(request(said(TEXT * 20, stream=True), "Content-Type: application/json"))
        assert answer.status == 200
        # The client did not ask for it, and gets none of it.
        assert b'"usage"' not in answer.body
    (row,) = rows(file)
    assert (row["input_length"], row["output_length"]) == (started.stats()["prompt_tokens"], 4)
    assert main(["replay", str(file), "--workers", "1", "--policy", "round_robin", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policies"]["round_robin"]["requests"] == 1


async def test_usage_is_asked_for_only_if_the_request_is_recorded(file: Path, scripted: StartScripted) -> None:
    asked: list[bytes] = []

    async def script(seen: Seen) -> None:
        if seen.method == "GET":
            listing = b'{"object":"list","data":[{"id":"sim","object":"model","owned_by":"llamacpp"}]}'
            await seen.write(ok(listing if seen.target.endswith("/v1/models") else b'{"total_slots":4}'))
            return
        asked.append(seen.body)
        await seen.write(ok(b'{"id":"c","choices":[]}'))

    # Below a path of its own, where the script answers probes as well.
    worker = WorkerConfig((await scripted(script)).url + "/engine", engine="llamacpp")
    for share in (1.0, 1e-9):
        async with recording(file, worker, policy="round_robin", share=share) as running:
            assert await ask(running, said(TEXT, stream=True)) == 200
    first, second = asked
    assert json.loads(first)["stream_options"] == {"include_usage": True}
    assert "stream_options" not in json.loads(second)
    assert len(rows(file)) == 1


# -- what is recorded, and what is not ----------------------------------------------------------------------------------


async def test_caches_that_never_share_never_share_ids(file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"])
    async with recording(file, started) as running:
        for salt in ("a", "b"):
            assert await ask(running, said(TEXT * 20, cache_salt=salt)) == 200
    first, second = rows(file)
    assert not set(first["hash_ids"]) & set(second["hash_ids"])


async def test_a_share_is_of_whole_sessions(file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"])
    async with recording(file, started, share=0.5) as running:
        for turn in range(3):
            for session in range(24):
                assert await ask(running, said(f"{turn}"), f"X-Session-Id: session-{session}") == 200
    found: dict[str, int] = {}
    for row in rows(file):
        found[row["session_id"]] = found.get(row["session_id"], 0) + 1
    assert set(found.values()) == {3}
    assert 2 < len(found) < 22


async def test_of_an_answer_that_a_client_left_only_what_is_known_is_told(file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"], time_scale=1.0)
    async with recording(file, started) as running:
        async with await Raw.connect(running.port) as client:
            await client.send(request(long_chat(stream=True), "Content-Type: application/json"))
            await until(lambda: started.stats()["generated_tokens"] > 3)
        await until(lambda: not running.gateway.exchanges)
    (row,) = rows(file)
    assert (row["status"], row["outcome"]) == (200, "client_gone")
    assert row["input_length"] is row["output_length"] is row["cached_tokens"] is row["block_size"] is None
    assert row["pages"] > 0


async def test_what_an_engine_refuses_is_told_by_its_status(file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"], kv_tokens=64)
    async with recording(file, started) as running:
        assert await ask(running, said(TEXT * 30)) == 400
        assert await ask(running, {"model": "sim", "messages": "none"}) == 400
    told = [(row["status"], row["outcome"], row["output_length"]) for row in rows(file) if row["pages"] > 1]
    assert told == [(400, "client_error", None)]


async def test_without_the_section_nothing_is_noted(gateway: Begin, engine: StartEngine, tmp_path: Path) -> None:
    running = await gateway(await engine(models=["sim"]))
    assert running.gateway.recorder is None
    assert await ask(running, said(TEXT)) == 200
    assert os.listdir(tmp_path) == []


# -- the file -----------------------------------------------------------------------------------------------------------


async def test_a_gateway_that_starts_again_goes_on_with_the_same_ids(file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"])
    for _ in range(2):
        async with recording(file, started) as running:
            assert await ask(running, said(TEXT * 20), "X-Session-Id: one") == 200
        # As if it had been killed within a line.
        put(file, content(file) + '{"timestamp": 17')
    async with recording(file, started):
        pass
    first, second = rows(file)
    for field in ("hash_ids", "session_id", "tenant"):
        assert first[field] == second[field]


async def test_a_file_is_written_by_one_gateway(file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"])
    async with recording(file, started):
        assert "another gateway records to" in await refusal(started, file)


async def refusal(worker: Any, path: Path) -> str:
    """Why a gateway does not start."""
    with pytest.raises(ConfigError) as caught:
        await start_gateway(worker, change=into(path))
    (problem,) = caught.value.problems
    assert problem.key == "recording.file"
    return problem.message


async def test_a_file_that_cannot_be_recorded_to_stops_the_start(
    file: Path, engine: StartEngine, tmp_path: Path
) -> None:
    started = await engine(models=["sim"])
    assert "cannot be written: No such file or directory; name a file in" in await refusal(
        started, tmp_path / "none" / "x"
    )
    assert "cannot be written: Is a directory" in await refusal(started, tmp_path)
    put(file, "what somebody wrote")
    assert "is there and is no recording: name another file" in await refusal(started, file)
    assert content(file) == "what somebody wrote"
    os.remove(file)
    async with recording(file, started):
        pass
    key = key_of(file)
    kept = content(key)
    put(key, "00" * recording_file.KEY_BYTES)
    assert "is not the key of" in await refusal(started, file)
    put(key, "nothing")
    assert "cannot be gone on with, for its key" in await refusal(started, file)
    os.remove(key)
    assert "cannot be gone on with, for its key" in await refusal(started, file)
    put(key, kept)
    put(file, content(file).replace('"warmroute_recording":1', '"warmroute_recording":2'))
    assert "of another version's form" in await refusal(started, file)


def opened(path: Path) -> bytes:
    """The key with which a recording is begun or gone on with."""
    file = recording_file.File(str(path), 1 << 20)
    file.close()
    return file.key


def test_a_recording_that_was_moved_away_leaves_its_key_to_the_next(file: Path) -> None:
    key = opened(file)
    moved = file.with_name("moved")
    file.rename(moved)
    assert opened(file) == key
    key_of(moved).write_bytes(key_of(file).read_bytes())
    assert opened(moved) == key


def test_a_key_that_is_none_is_not_written_over(file: Path) -> None:
    key_of(file).write_text("what somebody wrote")
    with pytest.raises(recording_file.Unrecordable, match="is no key: move it away, or name another file"):
        opened(file)
    assert key_of(file).read_text() == "what somebody wrote"


def test_files_that_are_there_become_private(file: Path) -> None:
    opened(file)
    for path in (file, key_of(file)):
        path.chmod(0o644)
    opened(file)
    assert [os.stat(path).st_mode & 0o777 for path in (file, key_of(file))] == [0o600, 0o600]
    file.write_bytes(b"")
    key_of(file).write_bytes(b"")
    for path in (file, key_of(file)):
        path.chmod(0o666)
    opened(file)
    assert [os.stat(path).st_mode & 0o777 for path in (file, key_of(file))] == [0o600, 0o600]


def test_a_file_that_is_no_recording_keeps_its_mode(file: Path) -> None:
    file.write_text("what somebody wrote")
    file.chmod(0o644)
    with pytest.raises(recording_file.Unrecordable):
        opened(file)
    assert os.stat(file).st_mode & 0o777 == 0o644


def test_a_first_line_without_its_end_is_ended(file: Path) -> None:
    opened(file)
    head = content(file)
    put(file, head[:-1])
    again = recording_file.File(str(file), 1 << 20)
    again.append(b'{"row":1}\n')
    again.close()
    assert content(file) == head + '{"row":1}\n'
    assert again.size == len(content(file))


async def test_full_files_stay_and_can_be_read_together(file: Path, engine: StartEngine) -> None:
    started = await engine(models=["sim"])
    async with recording(file, started, max=2500, keep=2) as running:
        for number in range(30):
            assert await ask(running, said(f"{number} {TEXT}"), "X-Session-Id: one") == 200
            seen = number + 1
            await until(lambda seen=seen: running.metrics.recorded.values[()][0] == seen)
        assert await counter(running, "warmroute_recording_dropped_total") == 0
    files = [Path(f"{file}.2"), Path(f"{file}.1"), file]
    assert all(len(content(each)) <= 2500 for each in files)
    assert sorted(each.name for each in file.parent.glob(f"{file.name}*")) == sorted(
        [file.name, f"{file.name}.1", f"{file.name}.2", f"{file.name}.key"]
    )
    heads = {content(each).splitlines()[0] for each in files}
    assert len(heads) == 1, "of one key"
    told = [row for each in files for row in rows(each)]
    assert len({row["session_id"] for row in told}) == 1
    assert [row["timestamp"] for row in told] == sorted(row["timestamp"] for row in told)
    # A gateway that starts again goes on with it.
    async with recording(file, started, max=2500, keep=2) as running:
        assert await ask(running, said(TEXT), "X-Session-Id: one") == 200
    assert rows(file)[-1]["session_id"] == told[0]["session_id"]


async def test_it_ends_at_its_most_and_says_so_once(
    file: Path, engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    started = await engine(models=["sim"])
    with caplog.at_level(logging.WARNING, "warmroute"):
        async with recording(file, started, max=2000) as running:
            for number in range(12):
                assert await ask(running, said(f"{number} {TEXT}")) == 200
            await until(lambda: running.gateway.recorder is not None and running.gateway.recorder.over)
            written = len(rows(file))
            assert await ask(running, said("after")) == 200
            assert await counter(running, "warmroute_recorded_requests_total") == written
    assert 0 < len(rows(file)) == written < 12
    assert len(content(file)) <= 2000
    assert [each.message for each in caplog.records if "recording stopped" in each.message] == [
        f"recording stopped: {file} has reached recording.max"
    ]


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """Files cannot grow beyond ``size`` meanwhile, as on a disk that is full."""
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


async def test_a_full_disk_costs_the_recording_and_no_request(
    file: Path, engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    started = await engine(models=["sim"])
    with caplog.at_level(logging.WARNING, "warmroute"):
        async with recording(file, started) as running:
            assert await ask(running, said(TEXT)) == 200
            await until(lambda: len(rows(file)) == 1)
            with full_at(len(content(file)) + 100):
                assert await ask(running, said(TEXT * 30)) == 200
                await until(lambda: running.gateway.recorder is not None and running.gateway.recorder.over)
            assert await ask(running, said(TEXT)) == 200
            assert await counter(running, "warmroute_recording_dropped_total") == 1
    assert len(rows(file)) == 1
    assert any("cannot be written: File too large" in each.message for each in caplog.records)


async def test_what_does_not_fit_into_the_queue_is_dropped_and_counted(
    file: Path, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "QUEUE", 3)
    monkeypatch.setattr(records, "PAUSE", 60.0)
    started = await engine(models=["sim"])
    async with recording(file, started) as running:
        for number in range(5):
            assert await ask(running, said(f"{number}")) == 200
        assert await counter(running, "warmroute_recording_dropped_total") == 2
    assert len(rows(file)) == 3


def finished(prompt: int | None = 100) -> recording_file.Finished:
    """A request of two hundred pages that waits to be written."""
    noted = records.Noted(None, b"x", os.urandom(8 * 200), 200.5, False)
    return recording_file.Finished(noted, 0.0, None, 1.0, "m", "t", "x", 200, prompt, 10, 0, "ok")


async def test_the_end_is_bounded_and_what_is_left_is_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(records, "STOP", 0.05)
    metrics = Metrics()
    recorder = records.Recorder(recording_file.File(str(file), 1 << 30), 1.0, metrics, print)
    await recorder.start()
    recorder._waiting.extend([finished()] * 9000)
    began = monotonic()
    with caplog.at_level(logging.WARNING, "warmroute"):
        await recorder.stop()
    assert monotonic() - began < 1.0
    written, dropped = len(rows(file)), metrics.recording_dropped.cell()[0]
    assert dropped > 0
    assert written + dropped == 9000
    assert metrics.recorded.cell()[0] == written
    assert [each.message for each in caplog.records] == [
        f"recording: {dropped:.0f} requests were not written, for the gateway ends"
    ]


async def test_a_count_that_is_none_costs_no_line(file: Path, engine: StartEngine, scripted: StartScripted) -> None:
    async def script(seen: Seen) -> None:
        tokens = 1 << 70 if b"huge" in seen.body else -1 if b"less" in seen.body else 7
        usage = {"prompt_tokens": tokens, "completion_tokens": 3, "total_tokens": 9}
        await seen.write(ok(json.dumps({"id": "c", "choices": [], "usage": usage}).encode()))

    worker = await scripted(script)
    running = await start_gateway(worker, policy="round_robin", change=into(file))
    for text in ("plain", "huge", "less", "plain"):
        assert await ask(running, said(text)) == 200
    await running.stop()
    assert [row["input_length"] for row in rows(file)] == [7, None, None, 7]
    assert running.gateway.defects == 0


async def test_ids_of_a_prompt_that_goes_on_are_those_of_the_whole(
    file: Path, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = await engine(models=["sim"])
    texts = [TEXT * 8, "an answer", TEXT * 9, "another", TEXT * 7]
    for kept in (500_000, 0):
        monkeypatch.setattr(recording_file, "KEPT", kept)
        async with recording(file, started) as running:
            for turns in (1, 3, 5):
                assert await ask(running, said(*texts[:turns]), "X-Session-Id: one") == 200
    found = [row["hash_ids"] for row in rows(file)]
    assert found[:3] == found[3:]


# -- configuration ------------------------------------------------------------------------------------------------------


def test_the_section_is_read() -> None:
    assert parse("recording: {file: /var/log/r.jsonl, max: 2G, share: 0.25}").recording == Recording(
        "/var/log/r.jsonl", 2 * 1024**3, 0.25
    )
    assert parse("recording: {file: r}").recording == Recording("r", 1024**3, 1.0)
    assert parse("").recording is None


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("{max: 1G}", "recording", "'file' is missing"),
        ("{file: ''}", "recording.file", "is empty: name the file to write"),
        ('{file: "a\\0b"}', "recording.file", "'a\\x00b' is no name of a file: take the NUL character out"),
        ("{file: r, max: 0}", "recording.max", "must be more than 0"),
        ("{file: r, share: 0}", "recording.share", "is a share of the sessions: more than 0, at most 1"),
        ("{file: r, share: 1.5}", "recording.share", "is a share of the sessions: more than 0, at most 1"),
        ("{file: r, size: 1}", "recording.size", "unknown key"),
    ],
)
def test_a_section_that_is_wrong_is_refused(section: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"recording: {section}")
    (problem,) = caught.value.problems
    assert problem.key == key
    assert problem.message.startswith(message)
    assert problem.line == 1


def test_the_command_says_why_it_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "w.yaml"
    config.write_text(f"listen: {{port: 0}}\nadmin: {{port: 0}}\nrecording: {{file: {tmp_path / 'none' / 'r'}}}\n")
    assert main(["serve", "--config", str(config)]) == 2
    assert "recording.file: " in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["w.yaml"]
