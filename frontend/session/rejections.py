"""What the client of a request that the scheduler rejected is told."""

from __future__ import annotations

from frontend import errors
from protocol.frontend import Reject, RejectCode


def error_of(reject: Reject) -> errors.ApiError:
    """What the client of a rejected request is told."""
    message = reject.message or "The request was rejected."
    if reject.code is RejectCode.OVERLOADED:
        return errors.overloaded(message, reject.retry_after_ms)
    if reject.code is RejectCode.NEVER_FITS:
        return errors.ApiError(400, message, code="context_length_exceeded")
    if reject.code is RejectCode.INVALID:
        return errors.ApiError(400, message, code="invalid_value")
    if reject.code is RejectCode.UNSUPPORTED:
        return errors.ApiError(400, message, code="unsupported_parameter")
    return errors.unavailable(message, reject.retry_after_ms or 2000)
