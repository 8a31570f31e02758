"""TensorRT-LLM's OpenAI server."""

from gateway.engines import Ask, Counts, owner, served_models, whole
from gateway.workers import Facts, Load


class TensorRT:
    """Told by who owns its models. Its ``/metrics`` is drained by reading, so it is not polled: that is the operator's."""

    name = "tensorrt_llm"
    rank = 40
    health = "/health"

    async def read(self, ask: Ask) -> Facts | None:
        """Blocks are 32 tokens unless ``/server_info`` says otherwise."""
        models = await served_models(ask)
        if models is None or owner(models) != "tensorrt_llm":
            return None
        version = (await ask("/version")).json()
        info = (await ask("/server_info")).json()
        facts = Facts(engine=self.name, models=models, injects_usage=True)
        if isinstance(version, dict) and isinstance(version.get("version"), str):
            facts.version = version["version"]
        tokens = whole(info.get("tokens_per_block")) if isinstance(info, dict) else None
        facts.block_size = tokens or 32
        # Asking for its events takes them from whoever else asks: that is the operator's to decide.
        facts.missing.append("events")
        return facts

    async def load(self, ask: Ask) -> list[Load] | None:
        """Not told without taking it from others."""
        return None

    async def counts(self, ask: Ask) -> Counts | None:
        """Not told."""
        return None


ENGINE = TensorRT()
