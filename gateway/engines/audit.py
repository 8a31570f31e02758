"""What an engine does not offer, what that costs, and the cure."""

from typing import NamedTuple

from gateway.workers import Worker


class Lack(NamedTuple):
    """One thing that is missing."""

    what: str
    costs: str
    cure: dict[str, str]
    """Engine -> what to start it with; ``""`` for any other."""


LACKS = {
    "usage_details": Lack(
        "it does not report cached tokens",
        "hit rates cannot be measured and predictions cannot be corrected",
        {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"},
    ),
    "metrics": Lack(
        "it has no metrics",
        "its queue and its cache size are unknown: load is judged by this gateway's own requests",
        {"sglang": "--enable-metrics", "llamacpp": "--metrics", "vllm": "do not pass --disable-log-stats"},
    ),
    "prefix_cache": Lack(
        "its prefix cache is off",
        "every prompt is computed in full, wherever it is sent",
        {"vllm": "--enable-prefix-caching", "sglang": "do not pass --disable-radix-cache"},
    ),
    "chunked_prefill": Lack(
        "chunked prefill is off",
        "a long prompt stops the generation of all others on that engine",
        {"sglang": "--chunked-prefill-size 8192"},
    ),
    "events": Lack(
        "it publishes no KV events",
        "what its cache holds can only be predicted from what was sent there",
        {"vllm": "--kv-events-config", "sglang": "--kv-events-config"},
    ),
    "replay": Lack(
        "it does not repeat KV events that were missed",
        "after a lost event, and when the gateway starts later than it, its cache is predicted for a while",
        {"vllm": "replay_endpoint in --kv-events-config", "sglang": "replay_endpoint in --kv-events-config"},
    ),
    "salt": Lack(
        "it does not keep caches of different cache_salt apart",
        "isolated tenants can tell by the time of an answer what others have cached there",
        {"": "engines of their own for isolated tenants: tenants[].models; or vLLM, SGLang, TensorRT-LLM"},
    ),
    "small_cache": Lack(
        "its cache is smaller than its sessions' prompts together",
        "sessions lose their cache between turns",
        {"": "more KV memory or more engines"},
    ),
    "returning": Lack(
        "its cache is smaller than what comes in until its sessions return",
        "their turns will be computed again from the start",
        {"": "more KV memory, a tier below the device, or more engines; GET /sessions/{id} has the numbers"},
    ),
}

LOUD = frozenset(("usage_details", "metrics", "prefix_cache", "chunked_prefill", "salt", "small_cache", "returning"))
"""Worth a warning at start; the rest shows in listings only."""


def lacks(worker: Worker) -> list[dict[str, str]]:
    """What ``worker`` lacks, for people and scripts: ``{"code", "what", "costs", "cure"}``."""
    rows = []
    for code in dict.fromkeys(worker.facts.missing + worker.observed):
        lack = LACKS[code]
        cure = lack.cure.get(worker.facts.engine) or lack.cure.get("") or "the engine offers no way"
        rows.append({"code": code, "what": lack.what, "costs": lack.costs, "cure": cure})
    return rows


def lines(worker: Worker) -> list[str]:
    """Warnings worth a log line."""
    return [f"{row['what']}: {row['costs']} (cure: {row['cure']})" for row in lacks(worker) if row["code"] in LOUD]
