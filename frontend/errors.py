"""Errors a client sees: one type, one body, and constructors for the rows of the error table."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

MAX_MESSAGE = 2_000
"""Characters of an error message: an answer never repeats a large input."""

MAX_RETRY_AFTER = 60


class ApiError(Exception):
    """A request that fails with a status and the OpenAI error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body ``{"error": {…}}``; also the data of an error event in a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def invalid_type(param: str | None, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_type", param=param)


def missing(param: str) -> ApiError:
    return ApiError(400, f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param)


def unsupported(param: str, message: str = "") -> ApiError:
    return ApiError(
        400,
        message or f"The parameter '{param}' is not supported here yet.",
        code="unsupported_parameter",
        param=param,
    )


def unknown_field(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="unknown_parameter", param=param)


def context_exceeded(context: int, prompt: int, completion: int, *, where: str, param: str) -> ApiError:
    """The prompt alone fills the model's context of ``context`` tokens."""
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, you requested {prompt + completion} tokens "
        f"({prompt} in the {where}, {completion} in the completion).",
        code="context_length_exceeded",
        param=param,
    )


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"The model '{model}' does not exist here.", code="model_not_found", param="model")


def overloaded(message: str, retry_after_ms: int = 1000) -> ApiError:
    return ApiError(
        429, message, kind="rate_limit_error", code="overloaded", headers={"Retry-After": retry_after(retry_after_ms)}
    )


def unavailable(message: str, retry_after_ms: int = 2000) -> ApiError:
    return ApiError(
        503, message, kind="server_error", code="unavailable", headers={"Retry-After": retry_after(retry_after_ms)}
    )


def nothing_allowed() -> ApiError:
    """The request's own constraints leave no token at some point of its output."""
    return ApiError(
        400,
        "No token is left to go on with: 'allowed_token_ids', 'bad_words' and 'min_tokens' together forbid every one.",
        code="invalid_value",
    )


def engine_error(message: str) -> ApiError:
    """A fault that will repeat, so clients are told not to try again."""
    return ApiError(500, message, kind="server_error", code="engine_error", headers={"x-should-retry": "false"})


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, kind="timeout_error", code="timeout", headers={"x-should-retry": "false"})


def retry_after(milliseconds: int) -> str:
    """Whole seconds for Retry-After, jittered upwards by up to a half so that clients do not come back together."""
    seconds = max(1.0, milliseconds / 1000)
    return str(min(MAX_RETRY_AFTER, round(seconds * random.uniform(1.0, 1.5))))
