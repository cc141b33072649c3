"""Errors as the clients of each interface expect them."""

from __future__ import annotations

import math
from typing import Any

from moeflux.errors import ArgumentError, BudgetError, Error, PeerError, Refused, StateError
from moeflux.serve.fields import RequestError

__all__ = ["ContextError", "anthropic_body", "headers_of", "openai_body", "status_of"]

OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ContextError(RequestError):
    """A prompt is longer than the context."""

    def __init__(self, prompt: int, answer: int, context: int) -> None:
        asked = f"{prompt} tokens of the prompt" + (f" and {answer} for the answer" if answer else "")
        super().__init__(
            f"prompt is too long: this model's maximum context length is {context} tokens, found {asked}", "messages"
        )


def status_of(error: Exception) -> int:
    """What a request is wrong in is 400, a full line 429, no memory or a lost machine 503. The rest is our fault."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, ArgumentError | StateError):  # a template that refuses a conversation says StateError
        return 400
    if isinstance(error, Refused) and error.waiting:  # else it is closing
        return 429
    return 503 if isinstance(error, Refused | BudgetError | PeerError) else 500


def headers_of(error: Exception) -> dict[str, str]:
    """When a client may come again."""
    if status_of(error) not in (429, 503):
        return {}
    seconds = error.seconds if isinstance(error, Refused) else None
    return {"Retry-After": str(1 if seconds is None else max(1, math.ceil(min(seconds, 3600))))}


def openai_body(error: Exception) -> dict[str, Any]:
    status = status_of(error)
    kind = OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = "context_length_exceeded" if isinstance(error, ContextError) else None
    field = error.field if isinstance(error, RequestError) else None
    return {"error": {"message": _words(error), "type": kind, "param": field, "code": code}}


def anthropic_body(error: Exception) -> dict[str, Any]:
    status = status_of(error)
    kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _words(error)}}


def _words(error: Exception) -> str:
    """Ours say what a client may know. What went wrong otherwise stands in the log."""
    return str(error) if isinstance(error, Error) else "the server failed; its log says more"
