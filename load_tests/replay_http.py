"""Replay of any traffic over HTTP: ``python -m load_tests.replay_http TRACE --url http://host:8080 --model NAME``.

TRACE is what ``warmroute replay`` takes: a file or a generator. Open requests are sent at their times whether or not earlier
ones were answered; turns of a chain wait for the answer before them, and for what they follow and await. All times and pauses
are divided by ``--speed``. Prompts are words that share prefixes as the traffic does (`load_tests.workloads.text`). What it
reports is what clients saw and what engines said in ``usage``.
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
from load_tests.workloads.catalogue import NoTraffic, find
from load_tests.workloads.chains import Traffic
from load_tests.workloads.text import begun_block, prompt_text


@dataclass(slots=True)
class Replayed:
    """What one replay measured."""

    answers: list[Answer] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """Seconds by which each request was sent after its time: the load generator's own fault."""
    moved: set[str] = field(default_factory=set)
    sessions: int = 0
    unsent: int = 0
    """Requests that were not made because one before them failed."""
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
            "unsent": self.unsent,
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


class Replay:
    """One traffic against one address; `run` it once."""

    def __init__(
        self,
        traffic: Traffic,
        url: str,
        model: str,
        *,
        speed: float = 1.0,
        api_key: str | None = None,
        named: bool = True,
    ) -> None:
        """``speed``: times and pauses are divided by it; ``named``: requests tell their session (``x-session-id``)."""
        self.traffic = traffic
        self.speed = speed
        self.named = named
        self._client = Client(url, model, timeout=900.0)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._turns = {chain.follows: asyncio.Event() for chain in traffic.chains if chain.follows is not None}
        """The ends of turns that others follow."""
        self._chains = [asyncio.Event() for _ in traffic.chains]
        """The ends of chains."""
        self._homes: dict[str, str] = {}
        self._began = 0.0
        self._done = Replayed(sessions=len({chain.session for chain in traffic.chains} - {None}))

    async def run(self) -> Replayed:
        """Until all is answered or has failed."""
        self._began = monotonic()
        async with self._client, asyncio.TaskGroup() as group:
            for place in range(len(self.traffic.chains)):
                group.create_task(self._chain(place))
        self._done.seconds = monotonic() - self._began
        return self._done

    async def _chain(self, place: int) -> None:
        chain = self.traffic.chains[place]
        due = self._began + chain.at / self.speed
        for number, turn in enumerate(chain.turns):
            if not number and chain.follows is not None:
                await self._turns[chain.follows].wait()
            for other in turn.awaits:
                await self._chains[other].wait()
            if number or chain.follows is not None:
                due = monotonic() + (turn.think if number else chain.at) / self.speed
            await asyncio.sleep(max(0.0, due - monotonic()))
            self._done.late.append(max(0.0, monotonic() - due))
            answered = await self._ask(place, number)
            if not answered:
                # The next prompt would carry an answer that never came. Who waits for this chain goes on.
                self._done.unsent += len(chain.turns) - number - 1
                break
            self._ended(place, number)
        for number in range(len(chain.turns)):
            self._ended(place, number)
        self._chains[place].set()

    def _ended(self, place: int, number: int) -> None:
        event = self._turns.get((place, number))
        if event is not None:
            event.set()

    async def _ask(self, place: int, number: int) -> bool:
        chain = self.traffic.chains[place]
        turn = chain.turns[number]
        rest = begun_block(chain, number)
        text = prompt_text(turn, self.traffic.block, f"{place}.{number}" if rest is None else rest)
        headers = dict(self._headers)
        if chain.session is not None and self.named:
            headers["x-session-id"] = chain.session
        said = [{"role": "user", "content": text}]
        body = {"messages": said, "max_tokens": max(1, turn.output), "ignore_eos": True}
        answer = await self._client.chat(body, headers)
        self._done.answers.append(answer)
        if chain.session is not None and answer.worker:
            if self._homes.setdefault(chain.session, answer.worker) != answer.worker:
                self._done.moved.add(chain.session)
            self._homes[chain.session] = answer.worker
        return answer.error is None


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
    parser = argparse.ArgumentParser(prog="python -m load_tests.replay_http", description="Replay traffic over HTTP.")
    parser.add_argument("trace", metavar="TRACE", help="a file or generator, as for warmroute replay")
    parser.add_argument("--url", required=True, help="OpenAI-compatible address, like http://127.0.0.1:8080")
    parser.add_argument("--model", required=True, help="model that is asked for")
    parser.add_argument("--limit", type=_positive(int), metavar="N", help="only the first N requests")
    parser.add_argument("--speed", type=_positive(float), default=1.0, metavar="X", help="2 is twice as fast")
    parser.add_argument(
        "--workers", type=_positive(int), default=8, metavar="N", help="size of what is generated (default 8)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is generated or drawn (default 0)")
    parser.add_argument("--no-session", action="store_true", help="do not send x-session-id")
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
        traffic = find(options.trace, workers=options.workers, seed=options.seed, limit=options.limit)
    except NoTraffic as error:
        print(error, file=sys.stderr)
        return 2
    url = options.url.rstrip("/").removesuffix("/v1")
    replay = Replay(
        traffic, url, options.model, speed=options.speed, api_key=options.api_key, named=not options.no_session
    )
    replayed = uvloop.run(replay.run())
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
