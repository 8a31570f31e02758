"""The simulated engine: paged KV, continuous batching, and the HTTP of vLLM, SGLang and llama.cpp.

It is an independent witness: it imports nothing of the gateway, so that what it counts can contradict the gateway.
"""

from load_tests.engine.engine import Engine
from load_tests.engine.options import EngineOptions
from load_tests.engine.physics import Rates

__all__ = ["Engine", "EngineOptions", "Rates"]
