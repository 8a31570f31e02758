"""Dynamo's RadixTree through its Python binding. Runs with that peer's own Python, which has nothing of ours.

``python dynamo_tree.py '{"events": N, "targets": [...], "depths": [...], "calls": N}'`` prints one JSON object.
"""

import json
import sys
from random import Random
from time import process_time
from typing import Any

from dynamo.llm import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

TOKENS, BLOCKS = 16, 16


def stored(number: int, parent: int | None, hashes: list[int], names: list[int]) -> bytes:
    blocks = [{"block_hash": h, "tokens_hash": t, "mm_extra_info": None} for h, t in zip(hashes, names, strict=True)]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()


def pipeline(events: int) -> dict[str, float]:
    random = Random(1)
    prompts = [[random.randrange(150_000) for _ in range(BLOCKS * TOKENS)] for _ in range(events)]
    began = process_time()
    names = [compute_block_hash_for_seq(tokens, TOKENS) for tokens in prompts]
    hashing = process_time() - began
    payloads: list[bytes] = []
    parent: int | None = None
    for number, row in enumerate(names):
        hashes = [random.getrandbits(63) for _ in range(BLOCKS)]
        payloads.append(stored(number, parent if number % 8 else None, hashes, row))
        parent = hashes[-1]
    tree = RadixTree()
    began = process_time()
    for payload in payloads:
        tree.apply_event(0, payload)
    applying = process_time() - began
    count = events * BLOCKS
    return {
        "hash_us_per_block": hashing / count * 1e6,
        "apply_us_per_block": applying / count * 1e6,
        "pipeline_us_per_block": (hashing + applying) / count * 1e6,
    }


def matching(targets: int, depth: int, calls: int) -> dict[str, float]:
    random = Random(depth)
    names = compute_block_hash_for_seq([random.randrange(150_000) for _ in range(depth * TOKENS)], TOKENS)
    other = compute_block_hash_for_seq([random.randrange(150_000) for _ in range(depth * TOKENS)], TOKENS)
    tree = RadixTree()
    for target in range(targets):
        blocks = depth if target % 4 == 0 else random.randrange(1, depth)
        hashes = [random.getrandbits(63) for _ in range(blocks)]
        tree.apply_event(target, stored(target, None, hashes, names[:blocks]))
    found = {}
    for name, prompt in (("hit_us", names), ("miss_us", other)):
        began = process_time()
        for _ in range(calls):
            tree.find_matches(prompt)
        found[name] = (process_time() - began) / calls * 1e6
    return found


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def bytes_per_block(targets: int) -> float:
    random = Random(targets)
    runs = 64_000 // targets // BLOCKS
    names = [
        compute_block_hash_for_seq([random.randrange(150_000) for _ in range(BLOCKS * TOKENS)], TOKENS)
        for _ in range(runs)
    ]
    tree = RadixTree()
    before, number = resident(), 0
    for target in range(targets):
        for row in names:
            tree.apply_event(target, stored(number, None, [random.getrandbits(63) for _ in range(BLOCKS)], row))
            number += 1
    return (resident() - before) / (runs * BLOCKS * targets)


def main() -> None:
    shape: dict[str, Any] = json.loads(sys.argv[1])
    print(
        json.dumps(
            {
                **pipeline(shape["events"]),
                "match": {
                    f"{t}x{d}": matching(t, d, shape["calls"]) for t in shape["targets"] for d in shape["depths"]
                },
                "bytes_per_block": {str(t): bytes_per_block(t) for t in (1, 64)},
            }
        )
    )


if __name__ == "__main__":
    main()
