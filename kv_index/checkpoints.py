"""Where a prompt may be resumed on models whose cache is not a plain prefix.

A recurrent (linear-attention) layer keeps one state, not a block a token, so an engine can go on only from tokens at which
it kept that state. Where that is, is the engine's own rule:

* `ends`: where a prompt ended and where its generation ended (llama.cpp, SGLang);
* `boundary`: the last block boundary before the last token of each prompt, and where it left what others had computed
  before; nothing while decoding (vLLM);
* `every`: every so many tokens, of prompts and of what is generated.

A usable hit is the deepest checkpoint at or below what the prompt shares with what was computed before.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from kv_index.pages import PAGE_TOKENS


class Rule(NamedTuple):
    """An engine's rule. Of several that are set, all hold."""

    ends: bool = False
    boundary: bool = False
    every: int | None = None

    @classmethod
    def of(cls, text: str) -> "Rule":
        """``ends``, ``boundary`` or ``every:N``. Raises `ValueError`."""
        word, _, number = text.partition(":")
        if word == "every" and number.isascii() and number.isdigit() and 0 < int(number) < 1 << 31:
            return cls(every=int(number))
        if text == "ends":
            return cls(ends=True)
        if text == "boundary":
            return cls(boundary=True)
        raise ValueError(f"{text!r} is not one of ends, boundary, every:N")

    def positions(self, prompt: int, block: int, shared: int = 0) -> list[int]:
        """Tokens of a prompt of that length at which its state is kept; ``block``: tokens in a block of the engine,
        ``shared``: what of it was known to the engine before."""
        found = set()
        if self.ends:
            found.add(prompt)
        if self.boundary:
            last = max(0, prompt - 1)
            found |= {last // block * block, min(shared, last) // block * block}
        if self.every is not None:
            # What is before was kept when that was computed.
            found.update(range(max(self.every, shared // self.every * self.every), prompt + 1, self.every))
        return sorted(found - {0})

    def resumed(self, prompt: int, generated: int) -> int:
        """The last token of a prompt and what was generated behind it from which the next one can go on, if it extends both;
        0: from none behind the prompt."""
        end = prompt + generated
        if self.ends:
            return end
        if self.every is not None and end // self.every * self.every > prompt:
            return end // self.every * self.every
        return 0


class _Mark(NamedTuple):
    tokens: int
    rest: bytes
    """Token ids between the last whole page and the checkpoint; empty where only pages are known."""
    epoch: int


class Checkpoints:
    """Checkpoints of all targets by the prefix (`kv_index.pages.names`) of the last whole page before each; bounded."""

    def __init__(self, most: int = 200_000) -> None:
        if most <= 0:
            raise ValueError("most must be positive")
        self.most = most
        self._marks: OrderedDict[int, dict[int, tuple[_Mark, ...]]] = OrderedDict()
        self._epochs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def put(
        self, target: int, chain: Sequence[int], tokens: int, ids: bytes = b"", page: float = float(PAGE_TOKENS)
    ) -> None:
        """``target`` keeps a state at ``tokens`` of the prompt with these prefixes; ``page``: tokens in one of them.

        Without ``ids`` it counts from the last whole page on, and only to that.
        """
        pages = min(int(tokens / page), len(chain))
        if not pages:
            return
        name = chain[pages - 1]
        rest = ids[4 * pages * PAGE_TOKENS : 4 * tokens]
        mark = _Mark(tokens if ids else int(pages * page), rest, self._epochs.get(target, 0))
        marks = self._marks.get(name)
        if marks is None:
            marks = self._marks[name] = {}
            if len(self._marks) > self.most:
                self._marks.popitem(last=False)
        else:
            self._marks.move_to_end(name)
        kept = tuple([each for each in marks.get(target, ()) if each.rest != rest and each.epoch == mark.epoch])
        marks[target] = (*kept[-3:], mark)

    def usable(
        self,
        chain: Sequence[int],
        shared: Mapping[int, int],
        ids: bytes = b"",
        page: float = float(PAGE_TOKENS),
        most: float = inf,
    ) -> dict[int, int]:
        """target -> the deepest checkpoint that it can go on from, given how many tokens it ``shared``; 0 is left out, and so
        is what is deeper than ``most``.

        What is shared is known in whole pages; with ``ids`` a checkpoint inside the next page is found too.
        """
        found: dict[int, int] = {}
        open_ = {target for target, tokens in shared.items() if tokens}
        if not open_:
            return found
        deepest = min(len(chain), int(max(shared.values()) / page + 1))
        for pages in range(deepest, 0, -1):
            marks = self._marks.get(chain[pages - 1])
            if marks is None:
                continue
            behind = ids[4 * pages * PAGE_TOKENS : 4 * (pages + 1) * PAGE_TOKENS]
            for target in open_ & marks.keys():
                if shared[target] < int(pages * page):
                    continue
                epoch = self._epochs.get(target, 0)
                able = [
                    mark.tokens
                    for mark in marks[target]
                    if mark.epoch == epoch and mark.tokens <= most and behind.startswith(mark.rest)
                ]
                if able:
                    found[target] = max(able)
                    open_.discard(target)
            if not open_:
                break
        return found

    def clear(self, target: int) -> None:
        """``target`` keeps none any more."""
        self._epochs[target] = self._epochs.get(target, 0) + 1
