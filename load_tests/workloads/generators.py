"""Generated traffic: the shapes that decide whether a policy is any good. Everything follows from the seed.

Sizes grow with the number of workers, so that each is loaded alike. Figures of agents are those of published traces of coding
agents: 713 new tokens a turn (p90 4,179), 216 generated (p90 898), think times of 4, 10 and 166 s (p10, p50, p90), first
prompts of 21,600 of which 15,000 are shared by a group, 7, 45 and 157 turns.
"""

from math import exp, log
from random import Random

from load_tests.workloads.chains import Chain, Naming, Traffic, Turn

BLOCK = 128
"""Tokens of one block: a compromise between what a hit loses at its end and what a long prompt costs to simulate."""

P90 = 1.2816
"""Standard deviations from the median to the 90th percentile."""


def agents(workers: int, seed: int = 0) -> Traffic:
    """Long append-only sessions of a few products, with heavy tails of turns, results and think time."""
    random, naming = Random(seed), Naming()
    products = [naming.fresh(15_000 // BLOCK) for _ in range(4)]
    chains = []
    for number in range(6 * workers):
        count = round(min(200.0, max(2.0, _spread(random, 45, 157))))
        first = round(_spread(random, 6_600, 20_000))
        steps = [(first, 0.0)] + [(_tokens(random, 713, 4_179), _pause(random)) for _ in range(count - 1)]
        turns = _talk(random, naming, random.choice(products), steps, 216, 898, 120_000)
        chains.append(Chain(random.uniform(0, 600), turns, f"agent-{number}"))
    return Traffic("agents", BLOCK, chains)


def universal(workers: int, seed: int = 0) -> Traffic:
    """Many short sessions, all of them under one long start."""
    random, naming = Random(seed), Naming()
    start = naming.fresh(8_192 // BLOCK)
    chains = []
    for number in range(60 * workers):
        steps = [(_tokens(random, 300, 1_200), random.expovariate(1 / 8)) for _ in range(random.randint(3, 8))]
        turns = _talk(random, naming, start, steps, 150, 500, 60_000)
        chains.append(Chain(random.uniform(0, 240), turns, f"user-{number}"))
    return Traffic("universal", BLOCK, chains)


def documents(workers: int, seed: int = 0) -> Traffic:
    """Questions, without sessions, about documents of which some are asked for far more often than others."""
    random, naming = Random(seed), Naming()
    texts = [naming.fresh(_tokens(random, 20_000, 50_000) // BLOCK) for _ in range(12 * workers)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(len(texts))]
    chains = []
    for at in _arrivals(random, 0.8 * workers, 300):
        text = random.choices(texts, weights)[0]
        chains.append(Chain(at, (_alone(random, naming, text, _tokens(random, 120, 400), 150, 400),)))
    return Traffic("documents", BLOCK, chains)


def load(workers: int, seed: int = 0) -> Traffic:
    """Prompts that share nothing: only load tells workers apart."""
    random, naming = Random(seed), Naming()
    chains = [
        Chain(at, (_alone(random, naming, (), _tokens(random, 2_500, 12_000), 180, 600),))
        for at in _arrivals(random, 1.5 * workers, 200)
    ]
    return Traffic("load", BLOCK, chains)


GENERATORS = {"agents": agents, "documents": documents, "load": load, "universal": universal}


def _talk(
    random: Random,
    naming: Naming,
    start: tuple[int, ...],
    steps: list[tuple[int, float]],
    output: int,
    p90: int,
    longest: int,
) -> tuple[Turn, ...]:
    """Turns that append to one conversation: (new tokens, think time) each, the answers carried along; ends at ``longest``."""
    blocks, tokens = start, len(start) * BLOCK
    turns: list[Turn] = []
    for new, think in steps:
        said = _tokens(random, output, p90)
        if turns and tokens + new + said > longest:
            break
        tokens += new
        blocks += naming.fresh(tokens // BLOCK - len(blocks))
        after = naming.fresh((tokens + said) // BLOCK - len(blocks))
        turns.append(Turn(blocks, tokens, said, after, think if turns else 0.0))
        blocks, tokens = blocks + after, tokens + said
    return tuple(turns)


def _alone(random: Random, naming: Naming, start: tuple[int, ...], new: int, output: int, p90: int) -> Turn:
    tokens = len(start) * BLOCK + new
    return Turn(start + naming.fresh(tokens // BLOCK - len(start)), tokens, _tokens(random, output, p90))


def _arrivals(random: Random, rate: float, seconds: float) -> list[float]:
    """Poisson arrivals."""
    found, at = [], random.expovariate(rate)
    while at < seconds:
        found.append(at)
        at += random.expovariate(rate)
    return found or [0.0]


def _spread(random: Random, median: float, p90: float) -> float:
    """Log-normal."""
    return median * exp(random.gauss(0.0, log(p90 / median) / P90))


def _tokens(random: Random, median: int, p90: int) -> int:
    """Log-normal, and never more than a few times the 90th percentile."""
    return max(1, min(round(_spread(random, median, p90)), 5 * p90))


def _pause(random: Random) -> float:
    """Think time: tools mostly, people sometimes."""
    return _spread(random, 9, 20) if random.random() < 0.8 else _spread(random, 160, 400)
