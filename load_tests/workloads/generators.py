"""Generated traffic: the shapes that decide whether a policy is any good. Everything follows from the seed.

Sizes grow with the number of workers, so that each is loaded alike. Figures of agents are those of published traces of coding
agents: 713 new tokens a turn (p90 4,179), 216 generated (p90 898), think times of 4, 10 and 166 s (p10, p50, p90), first
prompts of 21,600 of which 15,000 are shared by a group, 7, 45 and 157 turns.
"""

from collections.abc import Callable
from random import Random

from load_tests.workloads import apart, bursts, conversations, prefixes
from load_tests.workloads.chains import Chain, Naming, Traffic
from load_tests.workloads.draws import BLOCK, alone, arrivals, length, pause, spread, talk


def agents(workers: int, seed: int = 0) -> Traffic:
    """Long append-only sessions of a few products, with heavy tails of turns, results and think time."""
    random, naming = Random(seed), Naming()
    products = [naming.fresh(15_000 // BLOCK) for _ in range(4)]
    chains = []
    for number in range(6 * workers):
        count = round(min(200.0, max(2.0, spread(random, 45, 157))))
        first = round(spread(random, 6_600, 20_000))
        steps = [(first, 0.0)] + [(length(random, 713, 4_179), pause(random)) for _ in range(count - 1)]
        turns = talk(random, naming, random.choice(products), steps, 216, 898, 120_000)
        chains.append(Chain(random.uniform(0, 600), turns, f"agent-{number}"))
    return Traffic("agents", BLOCK, chains)


def universal(workers: int, seed: int = 0) -> Traffic:
    """Many short sessions, all of them under one long start."""
    random, naming = Random(seed), Naming()
    start = naming.fresh(8_192 // BLOCK)
    chains = []
    for number in range(60 * workers):
        steps = [(length(random, 300, 1_200), random.expovariate(1 / 8)) for _ in range(random.randint(3, 8))]
        turns = talk(random, naming, start, steps, 150, 500, 60_000)
        chains.append(Chain(random.uniform(0, 240), turns, f"user-{number}"))
    return Traffic("universal", BLOCK, chains)


def documents(workers: int, seed: int = 0) -> Traffic:
    """Questions, without sessions, about documents of which some are asked for far more often than others."""
    random, naming = Random(seed), Naming()
    texts = [naming.fresh(length(random, 20_000, 50_000) // BLOCK) for _ in range(12 * workers)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(len(texts))]
    chains = []
    for at in arrivals(random, 0.8 * workers, 300):
        text = random.choices(texts, weights)[0]
        chains.append(Chain(at, (alone(random, naming, text, length(random, 120, 400), 150, 400),)))
    return Traffic("documents", BLOCK, chains)


def load(workers: int, seed: int = 0) -> Traffic:
    """Prompts that share nothing: only load tells workers apart."""
    random, naming = Random(seed), Naming()
    chains = [
        Chain(at, (alone(random, naming, (), length(random, 2_500, 12_000), 180, 600),))
        for at in arrivals(random, 1.5 * workers, 200)
    ]
    return Traffic("load", BLOCK, chains)


GENERATORS: dict[str, Callable[[int, int], Traffic]] = {
    "agents": agents,
    "causal": conversations.causal,
    "chat": conversations.chat,
    "chat_5k": apart.chat_5k,
    "code_30k": apart.code_30k,
    "documents": documents,
    "hot": prefixes.hot,
    "hot_some": prefixes.hot_some,
    "load": load,
    "rollouts": bursts.rollouts,
    "subagents": conversations.subagents,
    "tools": conversations.tools,
    "tree": bursts.tree,
    "universal": universal,
}
"""By name: (workers, seed) to traffic."""
