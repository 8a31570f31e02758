"""llama.cpp's server."""

from gateway.engines import Ask, Counts, gauge, owner, served_models, whole
from gateway.workers import Facts, Load


class LlamaCpp:
    """Told by ``/props``. Its cache is one sequence a slot, plus a prompt cache in host memory."""

    name = "llamacpp"
    rank = 20
    health = "/health"

    async def read(self, ask: Ask) -> Facts | None:
        """Capacity is the context of all slots together."""
        props = (await ask("/props")).json()
        if not isinstance(props, dict) or "total_slots" not in props:
            return None
        models = await served_models(ask) or []
        if models and owner(models) not in ("llamacpp", ""):
            return None
        facts = Facts(engine=self.name, models=models, injects_usage=True)
        version = props.get("build_info")
        facts.version = version if isinstance(version, str) else None
        slots = whole(props.get("total_slots"))
        settings = props.get("default_generation_settings")
        context = whole(settings.get("n_ctx")) if isinstance(settings, dict) else None
        facts.context_length = context
        facts.max_running = slots
        facts.slots = slots if slots is not None and slots > 1 else None
        if slots and context:
            facts.kv_tokens = slots * context
        facts.block_size = 1
        if (await ask("/metrics")).status != 200:
            facts.missing.append("metrics")
        facts.missing.append("events")
        return facts

    async def load(self, ask: Ask) -> list[Load] | None:
        """From ``/metrics``, which the server must be started with."""
        metrics = await ask("/metrics")
        if metrics.status != 200:
            return None
        running = gauge(metrics.body, "llamacpp:requests_processing").get("")
        waiting = gauge(metrics.body, "llamacpp:requests_deferred").get("")
        if running is None:
            return None
        return [Load(whole(running), whole(waiting), None)]

    async def counts(self, ask: Ask) -> Counts | None:
        """Not told: it counts what it computed."""
        return None


ENGINE = LlamaCpp()
