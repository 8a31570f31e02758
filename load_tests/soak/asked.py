"""What is asked, and what has to come back: engines' answers follow from the prompt and the length that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from load_tests.engine.language import Language
from load_tests.engine.replies import Wanted, compose
from load_tests.workloads.text import block_text

MODEL = "sim"
SHORTEST, LONGEST = 8, 40
"""Tokens of an answer."""
STARTS = 5
"""That prompts share ..."""
START = 400
"""... each of so many words."""

_language = Language()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    number: int
    messages: list[dict[str, Any]]
    tokens: int
    """Generated, exactly."""
    stream: bool

    def body(self) -> dict[str, Any]:
        """What is sent."""
        told = {"model": MODEL, "messages": self.messages, "max_tokens": self.tokens, "ignore_eos": True}
        if self.stream:
            told |= {"stream": True, "stream_options": {"include_usage": True}}
        return told

    def answer(self) -> str:
        """What every engine answers."""
        prompt = _language.encode(_language.render(self.messages, (), True, {}))
        return compose(prompt, Wanted(max_tokens=self.tokens, ignore_eos=True)).text


class Asking:
    """Makes requests, no two alike."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._seed = seed
        self._number = 0

    def first(self, stream: bool) -> Asked:
        """A conversation's first request."""
        start = block_text(f"start/{self.random.randrange(STARTS)}", START)
        return self.next([{"role": "system", "content": start}], stream)

    def next(self, messages: list[dict[str, Any]], stream: bool) -> Asked:
        """One that goes on from ``messages``."""
        self._number += 1
        number = self._number
        said = f"Request {self._seed}.{number}: {block_text(f'{self._seed}/{number}', self.random.randint(10, 120))}"
        tokens = self.random.randint(SHORTEST, LONGEST)
        return Asked(number, [*messages, {"role": "user", "content": said}], tokens, stream)
