"""Fixed rules for a fleet with prefill apart: always a pair, never one, or one from so many uncached tokens on.

They choose engines as `disaggregated` does; only whether to take a pair is not priced.
"""

from collections.abc import Mapping

from policies.base import Fleet, Request
from policies.disaggregated import Disaggregated, Stage, Way


class AlwaysPair(Disaggregated):
    """A pair for every request."""

    name = "always_pair"

    def ways(self, request: Request, fleet: Fleet, stages: Mapping[str, Stage], now: float) -> list[Way]:
        """Those with a prefill engine."""
        ways = super().ways(request, fleet, stages, now)
        return [way for way in ways if way.stage is not None] or ways


class AlwaysLocal(Disaggregated):
    """Decode engines compute all prompts: the others do nothing."""

    name = "always_local"

    def ways(self, request: Request, fleet: Fleet, stages: Mapping[str, Stage], now: float) -> list[Way]:
        """Those without a prefill engine."""
        ways = super().ways(request, fleet, stages, now)
        return [way for way in ways if way.stage is None] or ways


class Threshold(Disaggregated):
    """A pair where the decode engine lacks at least so many tokens, as llm-d's decider and Dynamo's conditional
    disaggregation have it; queues do not count."""

    name = "threshold_512"
    tokens = 512

    def ways(self, request: Request, fleet: Fleet, stages: Mapping[str, Stage], now: float) -> list[Way]:
        """Of each decode engine the one way that its uncached tokens ask for."""
        lacking = {
            target.id: (request.tokens or 0) - request.holdings.get(target.id, 0) >= self.tokens
            for target in fleet.targets
        }
        ways = super().ways(request, fleet, stages, now)
        return [way for way in ways if (way.stage is not None) == lacking[way.target.id]] or ways


class LowThreshold(Threshold):
    """The same from 16 tokens on."""

    name = "threshold_16"
    tokens = 16
