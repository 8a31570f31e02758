"""What generators draw: lengths, pauses, arrivals, and conversations made of them. All from the given ``random``."""

from math import exp, log
from random import Random

from load_tests.workloads.chains import Naming, Turn

BLOCK = 128
"""Tokens of one block: a compromise between what a hit loses at its end and what a long prompt costs to simulate."""

P90 = 1.2816
"""Standard deviations from the median to the 90th percentile."""


def talk(
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
        said = length(random, output, p90)
        if turns and tokens + new + said > longest:
            break
        tokens += new
        blocks += naming.fresh(tokens // BLOCK - len(blocks))
        after = naming.fresh((tokens + said) // BLOCK - len(blocks))
        turns.append(Turn(blocks, tokens, said, after, think if turns else 0.0))
        blocks, tokens = blocks + after, tokens + said
    return tuple(turns)


def alone(random: Random, naming: Naming, start: tuple[int, ...], new: int, output: int, p90: int) -> Turn:
    """One request, ``new`` tokens of its own behind ``start``."""
    tokens = len(start) * BLOCK + new
    return Turn(start + naming.fresh(tokens // BLOCK - len(start)), tokens, length(random, output, p90))


def arrivals(random: Random, rate: float, seconds: float) -> list[float]:
    """Poisson arrivals: ``rate`` a second, for so many seconds; at least one."""
    found, at = [], random.expovariate(rate)
    while at < seconds:
        found.append(at)
        at += random.expovariate(rate)
    return found or [0.0]


def spread(random: Random, median: float, p90: float) -> float:
    """Log-normal."""
    return median * exp(random.gauss(0.0, log(p90 / median) / P90))


def length(random: Random, median: int, p90: int) -> int:
    """Log-normal, and never more than a few times the 90th percentile."""
    return max(1, min(round(spread(random, median, p90)), 5 * p90))


def pause(random: Random) -> float:
    """Think time: tools mostly, people sometimes."""
    return spread(random, 9, 20) if random.random() < 0.8 else spread(random, 160, 400)
