"""What became of each request, and whether its client could have been spared what was not good."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from time import monotonic

from load_tests.soak.answers import Answer
from load_tests.soak.asked import Asked

SLACK = 25.0
"""Seconds after an engine was harmed in which what breaks there may be of that: as long as the gateway is told to wait."""
LIMITS = frozenset(("requests", "prompt_tokens", "computed_tokens"))
"""What a tenant can be over."""
ROOM = frozenset(("queue_full", "level_full", "tenant_full", "too_long", "deadline", "displaced"))
"""Why the queue turns somebody away."""
SHOWN = 20
"""Examples that are kept of what should not be."""


@dataclass(slots=True)
class Harm:
    """What was done to engines, and when: worker -> (from, to) on the monotonic clock; ``None``: not over."""

    spans: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)

    def begins(self, worker: str) -> None:
        """It is harmed from now on."""
        self.spans.setdefault(worker, []).append((monotonic(), None))

    def ends(self, worker: str) -> None:
        """It is whole again."""
        since, _ = self.spans[worker].pop()
        self.spans[worker].append((since, monotonic()))

    def met(self, worker: str, began: float, ended: float) -> bool:
        """Whether it was harmed, or had just been, while a request ran."""
        spans = self.spans.get(worker, ())
        return any(since <= ended and (till is None or began <= till + SLACK) for since, till in spans)


@dataclass(slots=True)
class Verdicts:
    """All of them, counted."""

    harm: Harm
    good: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    """A foreign, doubled, cut or mixed answer that looks like a good one."""
    lost: list[str] = field(default_factory=list)
    """No answer at all."""
    spared: Counter[str] = field(default_factory=Counter)
    """Could have been spared, by what it was."""
    unspared: Counter[str] = field(default_factory=Counter)
    """Could not."""
    examples: list[str] = field(default_factory=list)
    """Of what could have been spared."""
    ids: set[str] = field(default_factory=set)

    @property
    def asked(self) -> int:
        """Requests that are over."""
        return self.good + self.left + len(self.wrong) + len(self.lost) + self.spared.total() + self.unspared.total()

    def of(self, asked: Asked, answer: Answer, limited: bool, hurried: bool) -> bool:
        """Judge one. ``limited``: its tenant is over its limit; ``hurried``: it gave a time. Returns whether it was good."""
        if answer.left:
            self.left += 1
        elif answer.status is None:
            self.lost.append(f"request {asked.number}: {answer.error}")
        elif answer.status == 200 and answer.whole:
            return self._answered(asked, answer)
        elif answer.status == 200:
            self._broken(asked, answer)
        else:
            self._refused(asked, answer, limited, hurried)
        return False

    def _answered(self, asked: Asked, answer: Answer) -> bool:
        wrong = None
        if answer.text != asked.answer():
            wrong = f"{answer.text!r} is not its answer"
        elif answer.generated != asked.tokens:
            wrong = f"{answer.generated} tokens, not {asked.tokens}"
        elif answer.id in self.ids:
            wrong = f"a second answer has the id {answer.id}"
        self.ids.add(answer.id)
        if wrong is not None:
            self.wrong.append(f"request {asked.number}, by {answer.worker}: {wrong}")
            return False
        self.good += 1
        return True

    def _broken(self, asked: Asked, answer: Answer) -> None:
        whole = asked.answer()
        if not whole.startswith(answer.text):
            self.wrong.append(f"request {asked.number}, by {answer.worker}: {answer.text!r} is no part of its answer")
        elif self.harm.met(answer.worker, answer.began, answer.ended):
            self.unspared["its engine was harmed in the middle of its stream"] += 1
        else:
            self._could(f"broken by {answer.worker}, to which nothing was done", answer)

    def _refused(self, asked: Asked, answer: Answer, limited: bool, hurried: bool) -> None:
        status, reason = answer.status, answer.refused
        if status == 429 and reason in LIMITS and limited:
            self.unspared["its tenant's limit was reached"] += 1
        elif status == 429 and reason in ROOM:
            self.unspared[f"the fleet was full: {reason}"] += 1
        elif status == 504 and reason == "timeout" and hurried:
            self.unspared["the time that it gave was over"] += 1
        else:
            self._could(f"status {status} {reason or ''}".strip(), answer)

    def _could(self, what: str, answer: Answer) -> None:
        self.spared[what] += 1
        if len(self.examples) < SHOWN:
            self.examples.append(f"{what}: {answer.error} (by {answer.worker or 'nobody'})")
