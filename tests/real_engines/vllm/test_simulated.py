"""What the simulation says that two vLLM engines find in their caches, and what they find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from gateway.config import Config
from load_tests.engine.language import Language, load_language
from load_tests.simulate.engine import Options
from load_tests.simulate.fleet import Outcome, Simulation
from load_tests.workloads.chains import Chain, Naming, Traffic, Turn as Asked
from policies.base import ByLoad, Choice, Fleet, Policy, Request, load
from tests.real_engines.vllm.conftest import Begin, Fleet as Engines
from tests.real_engines.vllm.engine import BLOCK, MODEL, PLAIN, VLLM
from tests.real_engines.vllm.talk import Turn, address, ask, words

pytestmark = pytest.mark.engines

BLOCKS = 108
SMALL = (*PLAIN, "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "2048")
"""Room for some of the sessions only: the last of several values of a flag counts."""
KV_TOKENS = (BLOCKS - 1) * BLOCK
"""The first block is nobody's."""
SESSIONS, TURNS, ANSWER = 10, 6, 6
SHARED, STEP = 300, 90


@dataclass(frozen=True, slots=True)
class Said:
    """One request, as tokens, and what came back."""

    session: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    turn: Turn


async def say_all(url: str, language: Language) -> list[Said]:
    """All turns of all sessions, one request after another, sessions in another order each time."""
    random = Random(11)
    start = words(random, SHARED)
    names = [f"session {number}" for number in range(SESSIONS)]
    chats: dict[str, list[dict[str, Any]]] = {name: [{"role": "system", "content": start}] for name in names}
    done: list[Said] = []
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(TURNS):
            random.shuffle(names)
            for name in names:
                messages = chats[name]
                messages.append({"role": "user", "content": words(random, random.randint(STEP // 2, STEP * 3 // 2))})
                body = {
                    "model": MODEL,
                    "messages": messages,
                    "max_tokens": ANSWER,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                turn = await ask(http, url, body, {"x-session-id": name})
                prompt = tuple(language.encode(language.render(messages, (), True, {})))
                assert len(prompt) == turn.prompt
                answer = tuple(language.encode(turn.content))
                assert len(answer) == turn.completion == ANSWER
                done.append(Said(name, prompt, answer, turn))
                messages.append({"role": "assistant", "content": turn.content})
    return done


class Recorded(ByLoad):
    """Engines by number, in order of the requests: choices that were made before."""

    name = "recorded"

    def __init__(self, chosen: list[int]) -> None:
        self.chosen = chosen

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        return Choice(fleet.targets[self.chosen[request.ordinal]], "recorded")


def simulated(said: list[Said], policy: Policy) -> Outcome:
    """The same requests, each when the one before it has ended, on engines of the same size."""
    naming = Naming()
    chains = []
    for number, each in enumerate(said):
        whole = each.prompt + each.answer
        ids = naming.chained(whole[at : at + BLOCK] for at in range(0, len(whole) // BLOCK * BLOCK, BLOCK))
        full = len(each.prompt) // BLOCK
        asked = Asked(ids[:full], len(each.prompt), len(each.answer), ids[full:])
        chains.append(Chain(0.0, (asked,), each.session, follows=(number - 1, 0) if number else None))
    options = Options(kv_tokens=KV_TOKENS, block=BLOCK, max_running=8)
    return Simulation(Traffic("said", BLOCK, chains), policy, 2, options).run()


def hit_rate(outcome: Outcome) -> float:
    totals = [engine.totals for engine in outcome.engines]
    return sum(each.cached for each in totals) / sum(each.prompt for each in totals)


async def compare(url: str, both: list[VLLM], language: Language, policy: str) -> None:
    """Where the gateway's choices are given the simulation must find the same to the token; where it chooses by itself,
    about as much: which sessions share an engine hangs on single tokens of what is believed."""
    said = await say_all(url, language)
    found = sum(each.turn.cached for each in said) / sum(each.turn.prompt for each in said)
    ids = [engine.id for engine in both]
    given = simulated(said, Recorded([ids.index(each.turn.worker) for each in said]))
    chosen = simulated(said, load(policy))
    print(f"{policy}: hits {found:.2%}, simulated {hit_rate(chosen):.2%}, with its choices {hit_rate(given):.2%}")
    assert all(engine.cache.evicted for engine in given.engines), "the sessions must not all fit"
    assert [each.turn.cached for each in said] == [asked.cached for asked in given.asked]
    assert abs(found - hit_rate(chosen)) < 0.01
    if policy == "round_robin":
        assert [each.turn.cached for each in said] == [asked.cached for asked in chosen.asked]


async def test_engines_find_what_the_simulation_says(gateway: Begin, engines: Engines, model: Path) -> None:
    both = engines(SMALL, SMALL)
    language = load_language(str(model / "tokenizer.json"), str(model / "chat_template.jinja"))
    for policy in ("round_robin", "cache_aware"):
        async with httpx.AsyncClient(timeout=60) as http:
            for engine in both:
                (await http.post(f"{engine.url}/reset_prefix_cache")).raise_for_status()

        def routed(config: Config, policy: str = policy) -> None:
            config.policy = policy

        running = await gateway(both, routed)
        await compare(address(running), both, language, policy)
