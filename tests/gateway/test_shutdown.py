"""The process as an operator sees it: started by its command, ended by SIGTERM."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import httpx

from tests.gateway.conftest import StartEngine

COMMAND = str(Path(sys.executable).parent / "warmroute")


async def start(tmp_path: Path, url: str, drain: str) -> tuple[asyncio.subprocess.Process, int, int]:
    """The command with a configuration file; its data and admin ports."""
    config = tmp_path / "warmroute.yaml"
    config.write_text(
        f"listen: {{host: 127.0.0.1, port: 0}}\nadmin: {{port: 0}}\ndrain: {drain}\nworkers: [{{url: '{url}'}}]\n"
    )
    process = await asyncio.create_subprocess_exec(
        COMMAND, "serve", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while True:
            line = (await process.stderr.readline()).decode()
            assert line, "the gateway ended"
            if "listening on" in line:
                words = line.replace(",", "").split()
                ports = [int(word.rsplit(":", 1)[1]) for word in words if word.startswith("127.0.0.1:")]
                break
    return process, ports[0], ports[1]


async def ready(client: httpx.AsyncClient, port: int) -> None:
    async with asyncio.timeout(30):
        while (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code != 200:
            await asyncio.sleep(0.05)


async def test_sigterm_turns_readiness_off_and_lets_streams_end(engine: StartEngine, tmp_path: Path) -> None:
    started = await engine(time_scale=1.0)
    process, port, _ = await start(tmp_path, started.url, "300ms")
    body = {
        "model": "sim",
        "stream": True,
        "max_tokens": 150,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "x"}],
    }
    async with httpx.AsyncClient(timeout=60) as client, httpx.AsyncClient(timeout=60) as other:
        await ready(client, port)
        async with client.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            first = await anext(lines)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while (await other.get(f"http://127.0.0.1:{port}/readyz")).status_code != 503:
                    await asyncio.sleep(0.01)
            rest = [line async for line in lines if line]
        assert first.startswith("data: ")
        assert rest[-1] == "data: [DONE]"
        assert sum("content" in line for line in rest) >= 149
    async with asyncio.timeout(20):
        assert await process.wait() == 0


async def test_a_second_signal_ends_at_once(engine: StartEngine, tmp_path: Path) -> None:
    started = await engine(time_scale=1.0)
    process, port, _ = await start(tmp_path, started.url, "0s")
    body = {
        "model": "sim",
        "stream": True,
        "max_tokens": 5000,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "x"}],
    }
    async with httpx.AsyncClient(timeout=60) as client:
        await ready(client, port)
        async with client.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                assert await process.wait() == 0
    async with asyncio.timeout(20):
        while started.stats()["running"]:
            await asyncio.sleep(0.02)


async def test_the_admin_port_of_the_command_answers(engine: StartEngine, tmp_path: Path) -> None:
    started = await engine()
    process, port, admin = await start(tmp_path, started.url, "0s")
    async with httpx.AsyncClient(timeout=20) as client:
        await ready(client, port)
        workers = (await client.get(f"http://127.0.0.1:{admin}/workers")).json()["workers"]
        assert [worker["state"] for worker in workers] == ["ready"]
        text = (await client.get(f"http://127.0.0.1:{admin}/metrics")).text
        assert "warmroute_worker_state" in text
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(20):
        assert await process.wait() == 0


async def test_a_port_in_use_is_told_in_one_line(engine: StartEngine) -> None:
    started = await engine()
    process = await asyncio.create_subprocess_exec(
        COMMAND,
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(started.port),
        "--admin-port",
        "0",
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        _, err = await process.communicate()
    assert process.returncode == 1
    assert "cannot listen" in err.decode()
    assert "Traceback" not in err.decode()
    assert json.dumps(started.port) in err.decode()
