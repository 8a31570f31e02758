"""Other routers' rules, from their published descriptions, as policies of the simulation; what `--policy` finds beside ours.

They are made to be compared with, and read what only a simulation can give them (`load_tests.simulate.places`); some keep
a state of their own, which `committed` tells after each choice. So one is made for one run.
"""

from collections.abc import Callable

from load_tests.simulate.baselines.blends import LlmdBlend
from load_tests.simulate.baselines.hashes import SessionHash
from load_tests.simulate.baselines.pairs import AlwaysLocal, AlwaysPair, LowThreshold, Threshold
from load_tests.simulate.baselines.preble import Preble
from load_tests.simulate.baselines.seconds import DynamoCost, LeastWait, MooncakeLeast, Oracle
from load_tests.simulate.baselines.sglang import SglangCacheAware
from policies.base import Policy

BASELINES: dict[str, Callable[[], Policy]] = {
    kind.name: kind
    for kind in (
        AlwaysLocal,
        AlwaysPair,
        DynamoCost,
        LeastWait,
        LlmdBlend,
        LowThreshold,
        MooncakeLeast,
        Oracle,
        Preble,
        SessionHash,
        SglangCacheAware,
        Threshold,
    )
}

__all__ = ["BASELINES"]
