"""The pipeline of KV events, and matching against what they told: ``python -m load_tests.bench.events`` prints one JSON object.

Beside Dynamo's RadixTree, called through its own Python binding in its own environment, where WARMROUTE_PEERS has one. The
same work for both: stores of 16 blocks of 16 tokens; prompts of as many blocks as ``depths`` says, each held by a quarter of
the targets whole and by the others to some depth. Rounds alternate; medians count. Times are CPU of the process.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from array import array
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import Any

import msgspec

from gateway.engines.events import apply, decode
from kv_index.blocks import BlockIndex
from kv_index.groups import Group, Kind
from kv_index.pages import PREFIX_BITS, chain, prefixes
from load_tests.bench.contenders import peer_python

TOKENS, BLOCKS, EVENTS = 16, 16, 2000
DEPTHS = (64, 512, 2048)
TARGETS = (8, 64)
ROUNDS = 3
CALLS = 200


def payloads(random: Random) -> list[bytes]:
    """Batches of one event each, as vLLM writes them; each goes on from the one before, eight to a prompt."""
    made = []
    parent: int | None = None
    for number in range(EVENTS):
        parent = parent if number % 8 else None
        hashes = [random.getrandbits(64) for _ in range(BLOCKS)]
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": [random.randrange(150_000) for _ in range(BLOCKS * TOKENS)],
            "block_size": TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * BLOCKS,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        made.append(msgspec.msgpack.encode([1.0, [event], 0]))
        parent = hashes[-1]
    return made


def pipeline(batches: list[bytes]) -> dict[str, float]:
    """Microseconds a block: decoding, hashing, applying ready hashes, and all of it as the gateway does it."""
    count = len(batches) * BLOCKS
    began = process_time()
    decoded = [decode(batch) for batch in batches]
    decoding = process_time() - began
    stored: list[Any] = [batch.events[0] for batch in decoded]
    ids = [array("I", event.token_ids).tobytes() for event in stored]
    began = process_time()
    named = [prefixes(each, 0) for each in ids]
    hashing = process_time() - began
    ready = [[hash & PREFIX_BITS for hash in event.block_hashes] for event in stored]
    index, group = BlockIndex(), Group(Kind.FULL, TOKENS, 0, 1)
    began = process_time()
    for hashes, found in zip(ready, named, strict=True):
        index.apply(group, hashes, found, 0)
    applying = process_time() - began
    index = BlockIndex()
    began = process_time()
    for batch in batches:
        apply(decode(batch).events, index, 0)
    whole = process_time() - began
    times = {"decode": decoding, "hash": hashing, "apply": applying, "pipeline": whole}
    return {f"{name}_us_per_block": seconds / count * 1e6 for name, seconds in times.items()}


def filled(targets: int, depth: int, random: Random) -> tuple[BlockIndex, bytes, bytes]:
    """An index, the symbols of a prompt that it holds, and of one that it does not."""
    tokens = [random.randrange(150_000) for _ in range(depth * TOKENS)]
    index = BlockIndex()
    for target in range(targets):
        blocks = depth if target % 4 == 0 else random.randrange(1, depth)
        hashes = [random.getrandbits(64) for _ in range(blocks)]
        index.store(target, hashes, None, tokens[: blocks * TOKENS], TOKENS)
    other = [random.randrange(150_000) for _ in range(depth * TOKENS)]
    hit, miss = [chain(array("I", each).tobytes()).symbols for each in (tokens, other)]
    return index, hit, miss


def matching(targets: int, depth: int) -> dict[str, float]:
    """Microseconds of a match, given the prompt's symbols."""
    index, hit, miss = filled(targets, depth, Random(depth))
    found = {}
    for name, symbols in (("hit_us", hit), ("miss_us", miss)):
        began = process_time()
        for _ in range(CALLS):
            index.match(symbols)
        found[name] = (process_time() - began) / CALLS * 1e6
    return found


def bytes_per_block(targets: int) -> float:
    """Allocated bytes for each block of each target."""
    random = Random(targets)
    blocks = 32_000 // targets
    gc.collect()
    tracemalloc.start()
    try:
        runs = [[random.randrange(150_000) for _ in range(BLOCKS * TOKENS)] for _ in range(blocks // BLOCKS)]
        before = tracemalloc.get_traced_memory()[0]
        index = BlockIndex()
        for target in range(targets):
            for tokens in runs:
                index.store(target, [random.getrandbits(64) for _ in range(BLOCKS)], None, tokens, TOKENS)
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / (len(runs) * BLOCKS * targets)
    finally:
        tracemalloc.stop()


def ours() -> dict[str, Any]:
    """One round."""
    return {
        **pipeline(payloads(Random(1))),
        "match": {f"{t}x{d}": matching(t, d) for t in TARGETS for d in DEPTHS},
        "bytes_per_block": {str(t): bytes_per_block(t) for t in (1, 64)},
    }


def dynamo(python: Path) -> dict[str, Any] | None:
    """One round of Dynamo's; ``None`` if it fails."""
    script = Path(__file__).with_name("dynamo_tree.py")
    shape = json.dumps({"events": EVENTS, "targets": TARGETS, "depths": DEPTHS, "calls": CALLS})
    ended = subprocess.run([python, script, shape], capture_output=True, timeout=120, check=False)
    if ended.returncode:
        print(ended.stderr.decode()[-500:], file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def middle(rounds: list[Any]) -> Any:
    """Medians of equally shaped figures."""
    if isinstance(rounds[0], dict):
        return {key: middle([each[key] for each in rounds]) for key in rounds[0]}
    return round(median(rounds), 3)


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """All figures; ``dynamo`` among them where it is installed."""
    python = peer_python("dynamo")
    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(ours())
        if python is not None and (found := dynamo(python)) is not None:
            theirs.append(found)
    return {"warmroute": middle(mine), **({"dynamo": middle(theirs)} if theirs else {})}


if __name__ == "__main__":
    print(json.dumps(measure()))
