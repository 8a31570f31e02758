"""Which paths each dialect has."""

from __future__ import annotations

from load_tests.engine import anthropic, info, openai, pooling, responses, sglang
from load_tests.engine.http import Route
from load_tests.engine.options import Dialect

VLLM: tuple[Dialect, ...] = ("vllm",)
SGLANG: tuple[Dialect, ...] = ("sglang",)
LLAMA: tuple[Dialect, ...] = ("llamacpp",)
TENSORRT: tuple[Dialect, ...] = ("tensorrt_llm",)
# The two that serve at scale, and all that print metrics of their own.
BIG: tuple[Dialect, ...] = ("vllm", "sglang")
MEASURED: tuple[Dialect, ...] = ("vllm", "sglang", "llamacpp")

ROUTES: list[Route] = [
    Route("POST", "/v1/chat/completions", openai.chat_completions, infers=True),
    Route("POST", "/v1/completions", openai.completions, infers=True),
    Route("POST", "/v1/responses", responses.create, infers=True),
    Route("GET", "/v1/responses/{id}", responses.retrieve),
    Route("DELETE", "/v1/responses/{id}", responses.delete),
    Route("POST", "/v1/responses/{id}/cancel", responses.cancel),
    Route("POST", "/v1/messages", anthropic.messages, MEASURED, infers=True),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens, MEASURED),
    Route("POST", "/v1/embeddings", pooling.embeddings, infers=True),
    Route("POST", "/v1/rerank", pooling.rerank, MEASURED, infers=True),
    Route("POST", "/v1/score", pooling.score, BIG, infers=True),
    Route("POST", "/v1/audio/transcriptions", pooling.transcriptions, infers=True, parses=False),
    Route("POST", "/generate", sglang.generate, SGLANG, infers=True),
    Route("GET", "/v1/models", info.models),
    Route("GET", "/health", info.health),
    Route("GET", "/health_generate", info.health, SGLANG),
    Route("GET", "/ping", info.health, BIG),
    Route("POST", "/ping", info.health, BIG),
    Route("GET", "/metrics", info.metrics_page, MEASURED),
    Route("GET", "/version", info.version, (*VLLM, *TENSORRT)),
    Route("GET", "/metrics", info.iterations, TENSORRT),
    Route("GET", "/server_info", info.context_info, TENSORRT),
    Route("GET", "/load", info.load, VLLM),
    Route("GET", "/kv_event_sources", info.kv_event_sources, VLLM),
    Route("GET", "/model_info", info.model_info, SGLANG),
    Route("GET", "/get_model_info", info.model_info, SGLANG),
    Route("GET", "/server_info", info.server_info, SGLANG),
    Route("GET", "/get_server_info", info.server_info, SGLANG),
    Route("GET", "/v1/loads", info.loads, SGLANG),
    Route("GET", "/props", info.props, LLAMA),
    Route("GET", "/slots", info.slots, LLAMA),
    Route("POST", "/tokenize", info.tokenize_text, MEASURED),
    Route("POST", "/v1/tokenize", info.tokenize_text, SGLANG),
    Route("POST", "/detokenize", info.detokenize_ids, MEASURED),
    Route("POST", "/v1/detokenize", info.detokenize_ids, SGLANG),
    Route("POST", "/reset_prefix_cache", info.reset_prefix_cache, VLLM),
    Route("GET", "/flush_cache", info.flush_cache, SGLANG),
    Route("POST", "/flush_cache", info.flush_cache, SGLANG),
    Route("POST", "/open_session", info.open_session, SGLANG),
    Route("POST", "/close_session", info.close_session, SGLANG),
    Route("POST", "/abort_request", info.abort_request, SGLANG),
]
