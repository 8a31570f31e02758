"""What one soak is: sizes, tenants, and the configuration that the gateway is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

STEP_SECONDS = 0.04
"""Of an engine: slow enough for six of them, their clients and the gateway to share two cores."""
SLOTS = 8
"""Sequences that an engine runs at one time."""
ENGINE_FLAGS = (
    "--kv-tokens", "48000", "--max-running", str(SLOTS), "--step-seconds", str(STEP_SECONDS), "--time-scale", "1",
)  # fmt: skip
DIALECTS = ("vllm", "vllm", "sglang")
"""Of engines, in turn."""
POLICIES = ("cache_aware", "least_load", "careful", "lmetric", "power_of_two")
"""Between which reloads switch; ``careful`` is a named set of options."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Seconds and shares."""

    seconds: float
    engines: int = 6
    seed: int = 1
    load: float = 0.7
    """Of what the engines can serve."""
    calibrate: float = 15.0
    pause: float = 6.0
    """Between two things that happen, on average."""

    @property
    def stalled(self) -> float:
        """For which an engine stands still, at most."""
        return min(25.0, self.seconds / 5)

    @property
    def harmed(self) -> int:
        """Engines that may be harmed at one time."""
        return max(1, self.engines // 3)

    @property
    def guests(self) -> int:
        """Engines that the configuration does not list: they join and leave."""
        return max(1, self.engines // 3)


@dataclass(slots=True)
class Tenant:
    """One tenant, as its clients know it."""

    name: str
    key: str
    share: float
    """Of the traffic."""
    limited: bool = False
    """It asks for more than it is granted."""


def tenants() -> list[Tenant]:
    """Those of every soak."""
    return [
        Tenant("research", "soak-research-0", 0.4),
        Tenant("apart", "soak-apart", 0.2),
        Tenant("bulk", "soak-bulk", 0.35),
        Tenant("metered", "soak-metered", 0.05, limited=True),
    ]


@dataclass(slots=True)
class Written:
    """What the configuration's file says now; changed by what happens, then written again."""

    workers: list[str]
    """URLs."""
    key_file: Path
    policy: str = "cache_aware"
    weight: float = 1.0
    concurrency: int = 400
    extra: list[str] = field(default_factory=list)
    """Further tenants."""

    def text(self) -> str:
        """The file."""
        workers = "\n".join(f'  - {{url: "{url}"}}' for url in self.workers)
        extra = "\n".join(f"  - {{name: {name}, keys: [soak-{name}-key]}}" for name in self.extra)
        return f"""
listen: {{host: 127.0.0.1, port: 0}}
admin: {{host: 127.0.0.1, port: 0}}
policy: {self.policy}
policies:
  careful: {{name: session, fallback: cache_aware, spill: {1.0 + self.weight / 4}}}
sessions: {{idle: 20s, max: 2000}}
index: {{max_bytes: 16M}}
doctor: {{memory: 2M}}
timeouts: {{connect: 2s, first_byte: 60s, idle: 20s}}
probes: {{health: 1s, load: 1s, join: 500ms}}
pressure: {{lag: 1s}}
drain: 0s
drain_limit: 20s
tenants:
  - {{name: research, key_files: ["{self.key_file}"], weight: {self.weight}, limits: {{concurrency: {self.concurrency}}}}}
  - {{name: apart, keys: [soak-apart], isolation: isolated}}
  - {{name: bulk, keys: [soak-bulk], priority: bulk, policy: least_load}}
  - {{name: metered, keys: [soak-metered], limits: {{requests_per_minute: 30}}}}
{extra}
workers:
{workers}
"""
