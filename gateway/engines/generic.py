"""Any OpenAI-compatible server."""

from gateway.engines import Ask, Counts, served_models
from gateway.workers import Facts, Load


class Generic:
    """All that is known is its list of models, if it has one."""

    name = "generic"
    rank = 90
    health = "/v1/models"

    async def read(self, ask: Ask) -> Facts | None:
        """Declines only while the list of models fails."""
        if (await ask("/v1/models")).status >= 500:
            # It has a list and cannot show it now: whatever it is, it is not ready.
            return None
        models = await served_models(ask)
        facts = Facts(engine=self.name, models=models or [])
        facts.context_length = min((m.max_length for m in models or [] if m.max_length is not None), default=None)
        facts.missing += ["metrics", "events"]
        return facts

    async def load(self, ask: Ask) -> list[Load] | None:
        """Not told."""
        return None

    async def counts(self, ask: Ask) -> Counts | None:
        """Not told."""
        return None


ENGINE = Generic()
