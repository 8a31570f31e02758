"""Tokenising the next turn of a long agent session: ``python -m load_tests.bench.tokens TOKENIZER`` prints one JSON object.

A prompt of 100 KB in the markup of a chat, and the same with 2 KB more, as often as it takes: what a turn costs when all but
its end is known. CPU of the process, microseconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from random import Random
from statistics import median
from time import process_time

from gateway.tokens import Tokenizer

PROMPT, TURN, PIECE = 100_000, 2_000, 1_500
TURNS = 20


WORDS = (
    *(
        "the ",
        "engine ",
        "of ",
        "a request ",
        "is ",
        "then ",
        "the cache ",
        "and ",
        "which ",
        "routing ",
        "café ",
        "because ",
    ),
    *(
        "def ",
        "return ",
        "self.",
        "value",
        " = ",
        "(",
        ")",
        ":\n        ",
        "\n    ",
        "if ",
        "not ",
        "None",
        " -> ",
        "index",
    ),
    *(
        "[",
        "]",
        ", ",
        ".append",
        "for ",
        "in ",
        "tokens",
        "_seconds",
        "float",
        '"',
        "#  why: ",
        "\n\n",
        "await ",
        "import ",
    ),
)


def prose(random: Random, size: int) -> str:
    """Text and code, about ``size`` bytes."""
    made: list[str] = []
    length = 0
    while length < size:
        word = random.choice(WORDS) if random.randrange(20) else f"{random.randrange(10**4)} "
        made.append(word)
        length += len(word)
    return "".join(made)[:size]


def turn(random: Random, size: int) -> str:
    """Messages, about ``size`` bytes in all."""
    return "".join(
        f"<|im_start|>{random.choice(('user', 'assistant'))}\n{prose(random, min(PIECE, size))}<|im_end|>\n"
        for _ in range(max(1, size // PIECE))
    )


def measure(path: str) -> dict[str, object]:
    """All figures."""
    random, tokenizer = Random(1), Tokenizer(path)
    text = turn(random, PROMPT)
    began = process_time()
    tokenizer.ids(text)
    first = process_time() - began
    times = []
    for _ in range(TURNS):
        text += turn(random, TURN)
        began = process_time()
        ids = tokenizer.ids(text)
        times.append(process_time() - began)
    return {
        "first_100k_us": round(first * 1e6),
        "next_turn_us": round(median(times) * 1e6),
        "bytes": len(text.encode()),
        "tokens": len(ids) // 4,
    }


def main(arguments: Sequence[str]) -> int:
    """0 unless the tokenizer cannot be read."""
    print(json.dumps(measure(arguments[0])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
