"""Errors as each engine words them on the wire.

vLLM, plain OpenAI   {"error": {"message", "type", "param", "code"}}
TensorRT-LLM         {"object": "error", "message", "type", "param", "code"}
SGLang               {"object": "error", "message", "type", "param", "code"}; /generate {"error": {"message"}}
llama.cpp            {"error": {"code", "message", "type"}}
/v1/messages         {"type": "error", "error": {"type", "message"}}, on vLLM and SGLang alike
unknown path         {"detail": "Not Found"}
"""

from __future__ import annotations

from typing import Any

_OPENAI_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "Service Unavailable",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_LLAMA_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

VLLM_BUSY = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
SGLANG_BUSY = "The request queue is full."


class ApiError(Exception):
    """An answer that is an error: ``status`` is HTTP's, ``kind`` overrides the dialect's own type for it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind
        # Whether other engines have heard of it already.
        self.told = False


def queue_full(dialect: str) -> ApiError:
    if dialect == "sglang":
        return ApiError(503, SGLANG_BUSY, kind="SERVICE_UNAVAILABLE")
    return ApiError(503, VLLM_BUSY)


def error_body(dialect: str, path: str, error: ApiError) -> dict[str, Any]:
    """The JSON object that ``dialect`` answers on ``path``."""
    if path.startswith("/v1/messages"):
        kind = error.kind if error.kind in _ANTHROPIC_TYPES.values() else _ANTHROPIC_TYPES.get(error.status)
        return {"type": "error", "error": {"type": kind or "api_error", "message": error.message}}
    if dialect == "llamacpp":
        kind = error.kind or _LLAMA_TYPES.get(error.status, "server_error")
        return {"error": {"code": error.status, "message": error.message, "type": kind}}
    kind = error.kind or _OPENAI_TYPES.get(error.status, "InternalServerError")
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.status}
    if dialect == "tensorrt_llm":
        return {"object": "error", **fields}
    if dialect != "sglang":
        return {"error": fields}
    if path.startswith("/generate"):
        return {"error": {"message": error.message}}
    if path.startswith("/v1/responses"):
        return {"error": fields}
    return {"object": "error", **fields}


def stream_error(dialect: str, path: str, error: ApiError) -> dict[str, Any]:
    """The JSON object of an error event inside a stream whose status is already 200."""
    body = error_body(dialect, path, error)
    if dialect == "sglang" and path == "/generate":
        return {"error": {"message": error.message, "type": error.kind, "code": error.status, "retryable": False}}
    return body if "error" in body else {"error": body}
