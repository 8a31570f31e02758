"""Generated traffic that comes in bursts, each of which waits for all of the one before it: tree search and rollouts.

The slowest of a burst holds up the next: here a policy is judged by its last answer, not by its median. Everything follows
from the seed. Sizes are round figures, not measured.
"""

from dataclasses import replace
from random import Random

from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from load_tests.workloads.draws import BLOCK, length, spread, talk

BRANCHES, DEPTH = 64, 4
"""Of a search: requests of one burst, and bursts."""

SAMPLES, STEPS = 8, 3
"""Of rollouts: sessions of one task, and steps of training."""

TREE_SECONDS = 60.0
"""Over which searches begin."""


def tree(workers: int, seed: int = 0) -> Traffic:
    """Tree searches, one for each 4 workers, each begun at its own time. From a node of 8,000 tokens 64 branches go out in one
    burst, each with 50 to 400 tokens of its own and about 200 generated; when all have ended, the prompt and answer of the best
    are the next node; 4 bursts. All requests of a search have one session's name, so who keeps a session on one worker puts
    the whole burst there."""
    random, naming = Random(seed), Naming()
    chains: list[Chain] = []
    for number in range(-(-workers // 4)):
        node, tokens = naming.fresh(8_000 // BLOCK), 8_000
        begin = random.uniform(0, TREE_SECONDS)
        before: tuple[int, ...] = ()
        for _ in range(DEPTH):
            first, burst = len(chains), []
            for _ in range(BRANCHES):
                size = tokens + random.randint(50, 400)
                said = length(random, 200, 300)
                blocks = node + naming.fresh(size // BLOCK - len(node))
                after = naming.fresh((size + said) // BLOCK - len(blocks))
                turn = Turn(blocks, size, said, after, awaits=before)
                burst.append(turn)
                at, follows = (0.1, (before[0], 0)) if before else (begin, None)
                chains.append(Chain(at, (turn,), f"search-{number}", follows=follows))
            best = random.choice(burst)
            node, tokens = best.blocks + best.after, best.tokens + best.output
            before = tuple(range(first, len(chains)))
    return Traffic("tree", BLOCK, chains)


def rollouts(workers: int, seed: int = 0) -> Traffic:
    """Steps of training an agent: groups of 8 samples of one task (1,500 to 6,000 tokens) that start together, each a session
    of 4 to 12 turns with results of 300 to 2,500 tokens from tools that take 2 s (median; p90 8). A step's groups, one for
    each worker, start within 5 s; the next step's when all of them have ended; 3 steps. Nothing is shared between groups."""
    random, naming = Random(seed), Naming()
    chains: list[Chain] = []
    before: tuple[int, ...] = ()
    for step in range(STEPS):
        first = len(chains)
        for group in range(workers):
            task = random.randint(1_500, 6_000)
            start, at = naming.fresh(task // BLOCK), random.uniform(0, 5)
            for sample in range(SAMPLES):
                steps = [(task % BLOCK, 0.0)]
                steps += [(random.randint(300, 2_500), spread(random, 2, 8)) for _ in range(random.randint(3, 11))]
                turns = talk(random, naming, start, steps, 180, 600, 120_000)
                if before:
                    turns = (replace(turns[0], awaits=before), *turns[1:])
                follows = (before[0], len(chains[before[0]].turns) - 1) if before else None
                chains.append(Chain(at, turns, f"rollout-{step}.{group}.{sample}", follows=follows))
        before = tuple(range(first, len(chains)))
    return Traffic("rollouts", BLOCK, chains)
