"""Generated conversations: of people, of short tool users, of agents that come one by one, of agents that call others.

Everything follows from the seed; sizes grow with the number of workers. Where no source is told, figures are round ones of the
kind, not measured.
"""

from dataclasses import replace
from random import Random

from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from load_tests.workloads.draws import BLOCK, length, pause, spread, talk


def chat(workers: int, seed: int = 0) -> Traffic:
    """People who chat under one system prompt of 1,000 tokens: 2 to 12 turns of 60 tokens (median; p90 300), 120 generated
    (p90 350), and 5 to 120 s to read and write between them, most of them short."""
    random, naming = Random(seed), Naming()
    start = naming.fresh(1_000 // BLOCK)
    chains = []
    for number in range(40 * workers):
        steps = [(length(random, 60, 300), 5 * 24 ** random.random()) for _ in range(random.randint(2, 12))]
        turns = talk(random, naming, start, steps, 120, 350, 30_000)
        chains.append(Chain(random.uniform(0, 240), turns, f"chat-{number}"))
    return Traffic("chat", BLOCK, chains)


def tools(workers: int, seed: int = 0) -> Traffic:
    """Short sessions, 2 to 5 turns, each under one of 6 large tool prompts of 6,000 to 14,000 tokens, of which the first is
    asked for six times as often as the last (Zipf); results of 400 tokens (p90 1,500), 3 s (p90 10) for a tool."""
    random, naming = Random(seed), Naming()
    prompts = [naming.fresh((6_000 + 1_600 * rank) // BLOCK) for rank in range(6)]
    random.shuffle(prompts)
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    chains = []
    for number in range(40 * workers):
        start = random.choices(prompts, weights)[0]
        steps = [(length(random, 400, 1_500), spread(random, 3, 10)) for _ in range(random.randint(2, 5))]
        turns = talk(random, naming, start, steps, 80, 250, 60_000)
        chains.append(Chain(random.uniform(0, 240), turns, f"tools-{number}"))
    return Traffic("tools", BLOCK, chains)


def causal(workers: int, seed: int = 0) -> Traffic:
    """Agents that come one by one, over 120 s, to a fleet that is nearly idle: 10 sessions for each worker, of 6 turns with
    8 s (mean) between them. Little is in flight when the next comes, so what is in flight tells little. They share no more
    than the 2,000 tokens of one of two products."""
    random, naming = Random(seed), Naming()
    products = [naming.fresh(2_000 // BLOCK) for _ in range(2)]
    chains = []
    sessions = 10 * workers
    for number in range(sessions):
        steps = [(length(random, 1_500 if not turn else 500, 4_000), random.expovariate(1 / 8)) for turn in range(6)]
        turns = talk(random, naming, random.choice(products), steps, 30, 70, 200_000)
        chains.append(Chain(120 * (number + random.random()) / sessions, turns, f"causal-{number}"))
    return Traffic("causal", BLOCK, chains)


def subagents(workers: int, seed: int = 0) -> Traffic:
    """Coding agents that call others: after a sixth of its turns a main session starts 1 to 4 sub-agents and goes on when all
    have ended. A sub-agent is a session of its own, 3 to 15 turns under one prompt of 6,000 tokens that all of them share.

    A main session's turns are those of published traces of coding agents: 713 new tokens (p90 4,179), 216 generated (p90 898),
    behind a first prompt of 21,600 of which a product shares 15,000; but 10 to 40 of them, to keep a run short.
    """
    random, naming = Random(seed), Naming()
    products = [naming.fresh(15_000 // BLOCK) for _ in range(4)]
    called = naming.fresh(6_000 // BLOCK)
    chains: list[Chain] = []
    for number in range(4 * workers):
        name, main = f"main-{number}", len(chains)
        steps = [(length(random, 6_600, 20_000), 0.0)]
        steps += [(length(random, 713, 4_179), pause(random)) for _ in range(random.randint(9, 39))]
        turns = list(talk(random, naming, random.choice(products), steps, 216, 898, 120_000))
        chains.append(Chain(random.uniform(0, 300), tuple(turns), name))
        for turn in range(len(turns) - 1):
            if random.random() < 1 / 6:
                first = len(chains)
                for place in range(random.randint(1, 4)):
                    session = f"{name}/{turn}.{place}"
                    work = _called(random, naming, called)
                    chains.append(Chain(0.2 + 0.3 * place, work, session, name, (main, turn)))
                awaits = tuple(range(first, len(chains)))
                turns[turn + 1] = replace(turns[turn + 1], awaits=awaits, think=random.uniform(0.1, 0.5))
        chains[main] = replace(chains[main], turns=tuple(turns))
    return Traffic("subagents", BLOCK, chains)


def _called(random: Random, naming: Naming, start: tuple[int, ...]) -> tuple[Turn, ...]:
    """A sub-agent's turns: its task, then tools."""
    steps = [(length(random, 800, 2_500), 0.0)]
    steps += [(length(random, 713, 4_179), spread(random, 4, 12)) for _ in range(random.randint(2, 14))]
    return talk(random, naming, start, steps, 150, 600, 60_000)
