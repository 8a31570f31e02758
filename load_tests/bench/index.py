"""Micro-benchmark of the prefix index: ``python -m load_tests.bench.index`` prints one JSON object. Times in microseconds."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from random import Random
from statistics import median
from time import perf_counter

from kv_index.pages import SYMBOL, TEXT_PAGE, paginate
from kv_index.radix import RadixIndex
from policies.base import Fleet, Rates, Request, Target, load as load_policy

PROMPT = 102_400
SHARED = 8_192
PAGES = PROMPT // TEXT_PAGE
TOKENS_PER_PAGE = TEXT_PAGE // 4
NAMESPACE = b"bench"
ROUNDS = 400


def timed(work: Callable[[], object], repeats: int) -> float:
    """Median microseconds of one call."""
    times = []
    for _ in range(repeats):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return median(times) * 1e6


def filled(targets: int, random: Random) -> tuple[RadixIndex, list[bytes]]:
    """An index in use: every target holds the shared start and prompts of its own; and those prompts' symbols."""
    index = RadixIndex()
    shared = random.randbytes(SHARED // TEXT_PAGE * SYMBOL)
    prompts = []
    for target in range(targets):
        index.set_capacity(target, 16 * PAGES)
        for _ in range(max(2, 512 // targets)):
            symbols = shared + random.randbytes((PAGES - SHARED // TEXT_PAGE) * SYMBOL)
            index.insert(NAMESPACE, symbols, target, 0.0)
            prompts.append(symbols)
    return index, prompts


def at_targets(targets: int) -> dict[str, float]:
    """Match, insert and decision for prompts of 100 KB: half of the prompt is known, half is new."""
    random = Random(targets)
    index, prompts = filled(targets, random)
    rates = Rates()  # of one model on one kind of engine: shared, as the gateway has them
    names = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(targets)]
    view = Fleet([Target(number, name, rates) for number, name in enumerate(names)])
    policy = load_policy("cache_aware", {})
    matches, inserts, decisions = [], [], []
    gc.collect()
    for number in range(ROUNDS):
        half = random.choice(prompts)[: PAGES // 2 * SYMBOL]
        symbols = half + random.randbytes((PAGES - PAGES // 2) * SYMBOL)
        began = perf_counter()
        depths = index.match(NAMESPACE, symbols).depths
        matched = perf_counter()
        holdings = {target: pages * TOKENS_PER_PAGE for target, pages in depths.items()}
        request = Request(draw=random.getrandbits(64), tokens=PAGES * TOKENS_PER_PAGE, holdings=holdings)
        prepared = perf_counter()
        choice = policy.choose(request, view, 1.0)
        chosen = perf_counter()
        index.insert(NAMESPACE, symbols, choice.target.id, 1.0 + number)
        ended = perf_counter()
        matches.append(matched - began)
        inserts.append(ended - chosen)
        decisions.append(ended - began - (prepared - matched))
    return {
        "match_us": round(median(matches) * 1e6, 1),
        "insert_us": round(median(inserts) * 1e6, 1),
        "match_insert_us": round(median(a + b for a, b in zip(matches, inserts, strict=True)) * 1e6, 1),
        "decision_and_index_us": round(median(decisions) * 1e6, 1),
    }


def bytes_per_token(holders: int) -> float:
    """Allocated bytes of the index for each distinct token that ``holders`` targets hold."""
    random = Random(holders)
    prompts = [random.randbytes(80 * SYMBOL) for _ in range(400)]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = RadixIndex()
        for number, symbols in enumerate(prompts):
            for target in range(holders):
                index.insert(NAMESPACE, bytes(bytearray(symbols)), target, float(number))
        gc.collect()
        return round((tracemalloc.get_traced_memory()[0] - before) / (len(prompts) * 80 * TOKENS_PER_PAGE), 3)
    finally:
        tracemalloc.stop()


def measure() -> dict[str, object]:
    """All figures."""
    prompt = Random(1).randbytes(PROMPT)
    grown = prompt + prompt[:2048]
    before = paginate(prompt)
    return {
        "paginate_100k_us": round(timed(lambda: paginate(prompt), 200), 1),
        "paginate_grown_us": round(timed(lambda: paginate(grown, before), 200), 1),
        "targets": {str(targets): at_targets(targets) for targets in (64, 1024)},
        "bytes_per_token": {str(holders): bytes_per_token(holders) for holders in (1, 64)},
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
