"""Reading what every kind of request has in common: limits, sampling, model, cache namespace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from load_tests.engine.errors import ApiError
from load_tests.engine.options import EngineOptions
from load_tests.engine.replies import Wanted
from load_tests.engine.template import JSON


class Traits(NamedTuple):
    """What a request says besides its prompt and reply. ``rank`` and ``slot`` None leave the choice to the engine."""

    namespace: str = ""
    session: str = ""
    report_all: bool = False
    rank: int | None = None
    slot: int | None = None
    priority: int = 0


def traits_of(options: EngineOptions, headers: Mapping[str, str], body: JSON, namespace: str) -> Traits:
    """Session, event reporting and rank, from where each dialect reads them."""
    xargs = body.get("vllm_xargs") if options.dialect == "vllm" else None
    xargs = xargs if isinstance(xargs, dict) else {}
    named = [body.get("session_id")]
    if options.dialect == "vllm":
        named += [headers.get("X-Session-ID"), xargs.get("session_id")]
    session = next((name for name in named if isinstance(name, str) and name), "")
    slot = None
    if options.dialect == "llamacpp" and body.get("id_slot", -1) != -1:
        slot = integer(body, "id_slot", 0)
        if slot is not None and slot >= options.max_running:
            raise ApiError(400, f"id_slot {slot} is not one of {options.max_running} slots", param="id_slot")
    full = xargs.get("kv_cache_report_mode") == "full"
    return Traits(
        namespace, session, full, rank_of(options, headers, body), slot, integer(body, "priority", -(2**31)) or 0
    )


def rank_of(options: EngineOptions, headers: Mapping[str, str], body: JSON) -> int | None:
    """The data-parallel rank asked for. A header that is no number is nothing to vLLM and an error to SGLang."""
    if options.dialect not in ("vllm", "sglang"):
        return None
    text = headers.get("X-Data-Parallel-Rank")
    if text is not None:
        try:
            return int(text)
        except ValueError:
            if options.dialect == "sglang":
                raise ApiError(400, f"X-Data-Parallel-Rank must be an integer, got {text!r}") from None
    if options.dialect == "vllm":
        return None
    for key in ("routed_dp_rank", "data_parallel_rank"):
        if body.get(key) is not None:
            return integer(body, key, 0)
    return None


def integer(body: JSON, key: str, least: int) -> int | None:
    """An integer field, None if absent or null; 400 if it is something else or below ``least``."""
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiError(400, f"{key} must be an integer, got {value!r}", param=key)
    if value < least:
        raise ApiError(400, f"{key} must be at least {least}, got {value}.", param=key)
    return value


def resolve_model(options: EngineOptions, body: JSON) -> tuple[str, str]:
    """(name to answer with, adapter or ""). vLLM and plain OpenAI know their models; the others accept any name."""
    name = body.get("model")
    if name is None or name == "":
        return options.models[0], ""
    if not isinstance(name, str):
        raise ApiError(400, "model must be a string", param="model")
    if name in options.loras:
        return name, name
    if options.dialect == "sglang" and ":" in name and name.split(":", 1)[1] in options.loras:
        return name, name.split(":", 1)[1]
    if name not in options.models and options.dialect in ("vllm", "openai"):
        aliases = ", ".join((*options.models, *options.loras))
        raise ApiError(404, f"The model `{name}` does not exist. Valid aliases: {aliases}", param="model")
    return name, ""


def namespace_of(options: EngineOptions, body: JSON, adapter: str) -> str:
    """What keeps this request's KV apart: adapter, salt, and on SGLang the extra key."""
    parts = [adapter]
    for key in ("cache_salt", "extra_key") if options.dialect == "sglang" else ("cache_salt",):
        value = body.get(key)
        if value is not None and not isinstance(value, str):
            raise ApiError(400, f"{key} must be a string", param=key)
        parts.append(value or "")
    return "\x1f".join(parts) if any(parts) else ""


def overflow(dialect: str, limit: int, prompt: int) -> ApiError:
    """The prompt alone is longer than the context."""
    if dialect == "sglang":
        return ApiError(400, f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens).")
    if dialect == "llamacpp":
        message = f"request ({prompt} tokens) exceeds the available context size ({limit} tokens), try increasing it"
        return ApiError(400, message, kind="exceed_context_size_error")
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {prompt} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    )
    return ApiError(400, message, param="input_tokens")


def wanted_tokens(options: EngineOptions, prompt: int, asked: int | None) -> int:
    """How many tokens may be generated after ``prompt`` tokens; 400 when prompt and ``asked`` overflow the context."""
    limit = options.context_length
    if prompt >= limit:
        raise overflow(options.dialect, limit, prompt)
    if asked is None or options.dialect == "llamacpp":
        return limit - prompt if asked is None else min(asked, limit - prompt)
    if prompt + asked > limit:
        if options.dialect == "sglang":
            message = (
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {prompt + asked} tokens: {prompt} tokens from the input messages and {asked} tokens for the "
                "completion. Please reduce the number of tokens in the input messages or the completion to fit."
            )
            raise ApiError(400, message)
        message = (
            f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length is "
            f"{limit} tokens and your request has {prompt} input tokens ({asked} > {limit} - {prompt})."
        )
        raise ApiError(400, message, param="max_tokens")
    return asked


def stops_of(body: JSON, key: str) -> tuple[str, ...]:
    """Stop strings: one, or a list."""
    value = body.get(key)
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ApiError(400, f"{key} must be a string or a list of strings", param=key)
    return tuple(stops)


def sampling(body: JSON, prompt: Sequence[int], options: EngineOptions, asked: int | None) -> Wanted:
    """What OpenAI's bodies say of the reply, tools apart; ``asked`` is the limit that the surface read."""
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        raise ApiError(400, f"temperature must be non-negative, got {temperature}.", param="temperature")
    stops = stops_of(body, "stop")
    most, least = wanted_tokens(options, len(prompt), asked), integer(body, "min_tokens", 0) or 0
    if least > most:
        raise ApiError(400, f"min_tokens must be less than or equal to max_tokens={most}, got {least}.")
    return Wanted(
        max_tokens=most,
        min_tokens=least,
        ignore_eos=bool(body.get("ignore_eos")),
        stop=stops,
        seed=integer(body, "seed", -(2**63)),
        schema=response_schema(body.get("response_format")),
    )


def response_schema(response_format: Any) -> JSON | None:
    if not isinstance(response_format, dict):
        return None
    if response_format.get("type") == "json_schema":
        schema = response_format.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, dict) else None
        return schema if isinstance(schema, dict) else {"type": "object"}
    if response_format.get("type") == "json_object":
        return {"type": "object", "properties": {"answer": {"type": "string"}}}
    return None
