"""How long an engine's work takes, in seconds: formulas only, no clock, so that virtual time can share them.

One iteration of continuous batching costs

    base + sum over prefill chunks of (u * token + attention * u * (c + u / 2)) + decodes * decode + attention * contexts

where a chunk computes ``u`` new tokens on top of ``c`` tokens whose KV exists, and ``contexts`` is the sum of the
context lengths of the sequences that decode. The attention term is the exact count of query-key pairs of a causal
chunk: it is what makes a long prompt cost more per token than a short one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds per unit of work. The defaults are those of a mid-size dense model on one accelerator.

    base: one step, whatever is in it (kernel launches, weights read once).
    token: one uncached prompt token through the dense layers.
    decode: one sequence that decodes one token in the step.
    attention: one query-key pair.
    host, disk: one token whose KV is copied back from host memory or from disk.
    handshake, transfer: bringing KV from another engine, once a request and for each token.
    """

    base: float = 8e-3
    token: float = 60e-6
    decode: float = 0.15e-3
    attention: float = 1e-9
    host: float = 2e-6
    disk: float = 20e-6
    handshake: float = 5e-3
    transfer: float = 5e-6

    def scaled(self, factor: float) -> Rates:
        """The same engine, ``factor`` times as slow in what it computes; copying stays as fast."""
        return replace(
            self,
            base=self.base * factor,
            token=self.token * factor,
            decode=self.decode * factor,
            attention=self.attention * factor,
        )


LARGE = Rates(base=25e-3, token=330e-6, decode=0.5e-3, attention=4e-9, transfer=10e-6)
"""A dense model of 70 billion parameters on eight accelerators of 2020, as in Mooncake's published evaluation: about 2,600
prompt tokens a second at that trace's lengths."""


def attention_pairs(context: int, new: int) -> float:
    """Query-key pairs of ``new`` tokens computed on top of ``context`` tokens: u * (c + u / 2)."""
    return new * (context + new / 2)


def prefill_seconds(rates: Rates, context: int, new: int) -> float:
    """Seconds that a chunk of ``new`` tokens on top of ``context`` adds to a step, without the step's base."""
    return new * rates.token + rates.attention * attention_pairs(context, new)


def step_seconds(rates: Rates, chunks: Iterable[tuple[int, int]], decodes: int = 0, contexts: int = 0) -> float:
    """Seconds of one step: ``chunks`` are (context, new) pairs, ``contexts`` sums the decoding sequences' lengths."""
    prefill = sum(prefill_seconds(rates, context, new) for context, new in chunks)
    return rates.base + prefill + decodes * rates.decode + rates.attention * contexts


def unloaded_prefill_seconds(rates: Rates, cached: int, prompt: int, chunk: int) -> float:
    """Seconds from first step to first token of a prompt that is alone, in chunks of at most ``chunk`` tokens."""
    seconds, done = 0.0, cached
    while done < prompt:
        new = min(chunk, prompt - done)
        seconds += step_seconds(rates, ((done, new),))
        done += new
    return seconds
