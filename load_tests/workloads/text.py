"""Text for prompts that are known as ids of blocks, so that any traffic can be sent over HTTP.

Every id stands for its own run of words, always the same: two texts share a prefix exactly as far as their ids agree. All
words are short, one token each for the simulated engine's tokenizer and for most others.

What an engine answers is not the text of `Turn.after`: a replay over HTTP finds the *prompts* of a session again, not the
answers, which the next prompt carries in words of ours.
"""

from collections.abc import Hashable
from functools import lru_cache
from random import Random

from load_tests.workloads.chains import Chain, Turn

WORDS = """
the when list of index file error module test value key path state read write open close begin end loop map set call line
token page cache route queue batch engine prompt model memory block stream event retry time load share group agent tool result
search edit build check fetch parse merge split order count first last next
""".split()


def prompt_text(turn: Turn, block: int, rest: Hashable = None) -> str:
    """As many words as the prompt has tokens; ``rest`` names the words behind the last full block.

    Where ``rest`` is an id, they are the first words of that block: the one which the prompt begins to fill.
    """
    pieces = [block_text(id_, block) for id_ in turn.blocks]
    left = turn.tokens - block * len(turn.blocks)
    place = 0
    while left > 0:
        name = rest if not place and isinstance(rest, int) else f"{rest}/{place}"
        pieces.append(" ".join(block_text(name, block).split(" ")[:left]))
        left, place = left - block, place + 1
    return " ".join(pieces)


def begun_block(chain: Chain, number: int) -> int | None:
    """The id of the block that the prompt of a chain's turn begins to fill: the answer's first, or the next prompt's; ``None``
    where nothing goes on from it."""
    turn = chain.turns[number]
    if turn.after:
        return turn.after[0]
    full = len(turn.blocks)
    following = chain.turns[number + 1].blocks if number + 1 < len(chain.turns) else ()
    return following[full] if len(following) > full and following[:full] == turn.blocks else None


@lru_cache(8192)
def block_text(name: Hashable, size: int) -> str:
    """``size`` words, the same for the same name; those of an id begin with the id in letters."""
    random = Random(f"{name}")
    first = _letters(name) if isinstance(name, int) else []
    return " ".join([*first, *random.choices(WORDS, k=size)][:size])


def _letters(number: int) -> list[str]:
    """A number as words of at most 6 letters, each number in its own way."""
    found = []
    while True:
        number, low = divmod(number, 26**6)
        word = ""
        for _ in range(6):
            low, letter = divmod(low, 26)
            word += chr(97 + letter)
        found.append(word)
        if not number:
            return found
