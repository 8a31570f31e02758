"""Asking engines to keep KV that would not survive until its session returns, by their own means and nothing else.

SGLang with ``--radix-eviction-policy priority`` evicts what requests of a low ``priority`` left first (where priorities mean
nothing for its scheduler); TensorRT-LLM takes a priority and a time for ranges of tokens
(``kv_cache_retention_config``). Neither pins anything: an engine that needs the room takes it.
"""

from typing import Any

import msgspec

from gateway.workers import Worker

RETAINED = 80
"""TensorRT-LLM's priority of what is to be kept, of 100; 35 is ordinary."""
RAISED = b"1"
"""SGLang's priority of what is to be kept; 0 is ordinary, and higher is kept longer."""
LONGEST = 3600.0
"""Seconds for which anything is asked to be kept."""


def able(worker: Worker) -> bool:
    """Whether its engine can be asked."""
    return worker.facts.retains or (worker.spec.retention and worker.facts.engine == "tensorrt_llm")


def hint(worker: Worker, gap: float) -> dict[str, bytes]:
    """Members of a request whose session returns within ``gap`` seconds: name -> JSON."""
    if worker.facts.engine == "sglang":
        return {"priority": RAISED}
    if worker.facts.engine != "tensorrt_llm":
        return {}
    milliseconds = round(min(gap, LONGEST) * 1000)
    told: dict[str, Any] = {
        "token_range_retention_configs": [{"token_start": 0, "priority": RETAINED, "duration_ms": milliseconds}],
        "decode_retention_priority": RETAINED,
        "decode_duration_ms": milliseconds,
    }
    return {"kv_cache_retention_config": msgspec.json.encode(told)}
