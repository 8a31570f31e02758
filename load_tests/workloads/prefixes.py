"""Generated traffic without sessions in which one prefix is hot. Everything follows from the seed.

A quarter of the tokens is a choice: enough to draw all traffic to one worker under a policy that follows the longest match,
too little for that to be worth it. The other figures are round ones, not measured either.
"""

from random import Random

from load_tests.workloads.chains import Chain, Naming, Traffic
from load_tests.workloads.draws import BLOCK, alone, arrivals, length

SHARE = 0.26
"""Of the requests, those that begin with the prefix of `hot_some`."""

HOT_RATE, SOME_RATE = 0.6, 0.3
"""Requests a second and worker."""


def hot(workers: int, seed: int = 0) -> Traffic:
    """Every prompt starts with the same 2,048 tokens, 26 % of an average one, behind which 4,510 (median; p90 11,000) are its
    own; about 100 generated. Poisson arrivals at which engines are 70 to 85 % busy: who herds, queues."""
    random, naming = Random(seed), Naming()
    start = naming.fresh(2_048 // BLOCK)
    chains = [
        Chain(at, (alone(random, naming, start, length(random, 4_510, 11_000), 100, 250),))
        for at in arrivals(random, HOT_RATE * workers, 240)
    ]
    return Traffic("hot", BLOCK, chains)


def hot_some(workers: int, seed: int = 0) -> Traffic:
    """26 % of the requests begin with one prefix of 4,000 tokens, the others share nothing; 2,500 own tokens (median; p90
    9,000), about 150 generated."""
    random, naming = Random(seed), Naming()
    start = naming.fresh(4_000 // BLOCK)
    chains = []
    for at in arrivals(random, SOME_RATE * workers, 240):
        begin = start if random.random() < SHARE else ()
        chains.append(Chain(at, (alone(random, naming, begin, length(random, 2_500, 9_000), 150, 400),)))
    return Traffic("hot_some", BLOCK, chains)
