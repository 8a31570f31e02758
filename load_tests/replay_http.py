"""Replay of a trace over HTTP: ``python -m load_tests.replay_http TRACE --url http://host:8080 --model NAME``.

Requests are sent at the times of the trace, divided by ``--speed``, whether or not earlier ones were answered (open loop), to
any OpenAI-compatible address. What it reports is what clients saw and what engines said in ``usage``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from load_tests.client import Answer, Client, quantile
from load_tests.workloads.mooncake import TracedRequest, TraceError, read


@dataclass(slots=True)
class Replayed:
    """What one replay measured."""

    answers: list[Answer] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """Seconds by which each request was sent after its time: the load generator's own fault."""
    moved: set[str] = field(default_factory=set)
    sessions: int = 0
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """Figures for people and scripts; ``None`` where nothing tells them."""
        good = [answer for answer in self.answers if answer.error is None]
        ttft = [answer.ttft for answer in good if answer.ttft is not None]
        told = [answer for answer in good if answer.prompt_tokens and answer.cached_tokens is not None]
        prompt = sum(answer.prompt_tokens or 0 for answer in told)
        cached = sum(answer.cached_tokens or 0 for answer in told)
        return {
            "requests": len(self.answers),
            "errors": len(self.answers) - len(good),
            "ttft_p50_ms": _ms(quantile(ttft, 0.5)),
            "ttft_p90_ms": _ms(quantile(ttft, 0.9)),
            "ttft_p99_ms": _ms(quantile(ttft, 0.99)),
            "prompt_tokens": prompt if told else None,
            "cached_tokens": cached if told else None,
            "token_hit_rate": round(cached / prompt, 4) if told else None,
            "moved_sessions": len(self.moved) if self.sessions else None,
            "late_p99_ms": _ms(quantile(self.late, 0.99)),
            "seconds": round(self.seconds, 2),
        }


async def replay(
    requests: Sequence[TracedRequest], url: str, model: str, *, speed: float = 1.0, api_key: str | None = None
) -> Replayed:
    """Send ``requests``, each at its time divided by ``speed``; returns when all are answered or have failed."""
    replayed = Replayed(sessions=len({request.session for request in requests} - {None}))
    homes: dict[str, str] = {}
    began = monotonic()

    async def one(client: Client, request: TracedRequest) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if request.session is not None:
            headers["x-session-id"] = request.session
        body = {
            "messages": [{"role": "user", "content": request.prompt()}],
            "max_tokens": max(1, request.output_tokens),
        }
        replayed.late.append(max(0.0, monotonic() - began - request.at / speed))
        answer = await client.chat(body, headers)
        replayed.answers.append(answer)
        if request.session is not None and answer.worker:
            if homes.setdefault(request.session, answer.worker) != answer.worker:
                replayed.moved.add(request.session)
            homes[request.session] = answer.worker

    async with Client(url, model, timeout=900.0) as client, asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, began + request.at / speed - monotonic()))
            group.create_task(one(client, request))
    replayed.seconds = monotonic() - began
    return replayed


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def show(row: dict[str, Any]) -> None:
    """A table for people."""
    table = Table(title="Replay", show_header=False)
    for name, value in row.items():
        text = "-" if value is None else f"{value:.1%}" if name == "token_hit_rate" else f"{value:,}"
        table.add_row(name.replace("_", " "), text)
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m load_tests.replay_http", description="Replay a trace over HTTP.")
    parser.add_argument("trace", metavar="TRACE", help="a file in Mooncake's form, one JSON object a line")
    parser.add_argument("--url", required=True, help="OpenAI-compatible address, like http://127.0.0.1:8080")
    parser.add_argument("--model", required=True, help="model that is asked for")
    parser.add_argument("--limit", type=_positive(int), metavar="N", help="only the first N requests")
    parser.add_argument("--speed", type=_positive(float), default=1.0, metavar="X", help="2 is twice as fast")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def _positive(kind: type[int] | type[float]) -> Any:
    def positive(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return positive


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every request was answered; 1: some failed; 2: the trace cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        requests = read(options.trace, options.limit)
    except (OSError, TraceError) as error:
        print(f"{options.trace}: {error}", file=sys.stderr)
        return 2
    url = options.url.rstrip("/").removesuffix("/v1")
    replayed = uvloop.run(replay(requests, url, options.model, speed=options.speed, api_key=options.api_key))
    row = replayed.row()
    if options.json:
        print(json.dumps(row))
    else:
        show(row)
    for reason in list(dict.fromkeys(answer.error for answer in replayed.answers if answer.error))[:5]:
        print(f"a request failed: {reason}", file=sys.stderr)
    return 1 if row["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
