"""Agent sessions: chains of requests with tools between them.

Each session begins with a system prompt and tools that its group shares (an agent product), then a task of its own. A turn
adds a tool result or a user's message; the engine's own answer is carried along by the client. Between two turns the tool
runs: think time. Everything follows from the seed.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

_WORDS = """
the function returns when list of index file error module test value key path state read write open close
begin end loop map set call line token page cache route queue batch engine prompt model memory block stream
event retry time load share group agent tool result search edit build check fetch parse merge split order
count first last next
""".split()


@dataclass(frozen=True, slots=True)
class Turn:
    """One message that the client adds, and how long it waits before sending."""

    role: str
    content: str
    think: float
    """Seconds since the answer before it."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One chain of requests."""

    name: str
    start: float
    """Seconds after the workload's begin."""
    system: str
    tools: list[dict[str, Any]]
    turns: list[Turn]


def words(random: Random, tokens: int) -> str:
    """Text of about so many tokens."""
    return " ".join(random.choices(_WORDS, k=max(1, tokens)))


def agent_sessions(
    *,
    sessions: int,
    turns: int,
    seed: int = 1,
    groups: int = 3,
    shared_tokens: int = 1200,
    task_tokens: int = 150,
    result_tokens: int = 350,
    output_tokens: int = 40,
    think: float = 1.0,
    spread: float = 2.0,
) -> list[AgentSession]:
    """A fixed list of sessions.

    ``shared_tokens``: system prompt and tools of one of ``groups``; ``think``: mean seconds between turns; ``spread``: seconds
    over which sessions begin; the number of turns varies by a quarter either way.
    """
    random = Random(seed)
    systems = [f"You are agent product {group}. " + words(random, shared_tokens * 3 // 4) for group in range(groups)]
    tools = [[_tool(random, group, number, shared_tokens // 16) for number in range(4)] for group in range(groups)]
    made = []
    for number in range(sessions):
        group = number % groups
        count = max(2, round(turns * random.uniform(0.75, 1.25)))
        first = Turn("user", f"Task {number}: " + words(random, task_tokens), 0.0, output_tokens)
        rest = [
            Turn(
                "user" if random.random() < 0.2 else "tool",
                words(random, max(8, round(result_tokens * random.lognormvariate(0, 0.5)))),
                random.expovariate(1 / think) if think else 0.0,
                max(4, round(output_tokens * random.uniform(0.5, 1.5))),
            )
            for _ in range(count - 1)
        ]
        made.append(
            AgentSession(f"{seed}-{number}", random.uniform(0, spread), systems[group], tools[group], [first, *rest])
        )
    return made


def _tool(random: Random, group: int, number: int, tokens: int) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": f"tool_{group}_{number}",
            "description": words(random, tokens),
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
