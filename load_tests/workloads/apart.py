"""Generated sessions that tell when prefill apart from decode pays: a long start of each session's own, then turns of one size.

With few new tokens a turn what was generated last is most of what the decode engine holds and the prefill engine does not; with
many, a prefill next to running decodes is what disturbs them. Everything follows from the seed.
"""

from random import Random

from load_tests.workloads.chains import Chain, Naming, Traffic
from load_tests.workloads.draws import BLOCK, arrivals, spread, talk


def chat_5k(workers: int, seed: int = 0) -> Traffic:
    """A start of 5,000 tokens, then 3 more turns of 50 tokens each, about 300 generated (p90 600), 10 s (p90 30) between."""
    random, naming = Random(seed), Naming()
    chains = []
    for number, at in enumerate(arrivals(random, 0.45 * workers, 240)):
        steps = [(5_000, 0.0), *((50, spread(random, 10, 30)) for _ in range(3))]
        chains.append(Chain(at, talk(random, naming, (), steps, 300, 600, 200_000), f"chat-{number}"))
    return Traffic("chat_5k", BLOCK, chains)


def code_30k(workers: int, seed: int = 0) -> Traffic:
    """A start of 30,000 tokens, then 14 more turns of 1,500 tokens each, 250 generated (p90 700), 8 s (p90 20) between."""
    random, naming = Random(seed), Naming()
    chains = []
    for number, at in enumerate(arrivals(random, 0.035 * workers, 240)):
        steps = [(30_000, 0.0), *((1_500, spread(random, 8, 20)) for _ in range(14))]
        chains.append(Chain(at, talk(random, naming, (), steps, 250, 700, 200_000), f"code-{number}"))
    return Traffic("code_30k", BLOCK, chains)
