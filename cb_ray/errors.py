"""The error tree. Every error says what was wanted, what was found and what to do about it.

    CbRayError
    ├── InvalidRequestError (ValueError)      400  the request can never be served as it stands; names the parameter
    ├── ConfigError (ValueError)              400  a setting is out of range or unknown; names the nearest right one
    │   └── DeviceError (RuntimeError)        400  a setting that this device cannot do
    ├── UnsupportedModelError (ValueError)    400  the model has something this engine does not compute
    ├── WeightsError (ValueError)             400  weights that do not fit the model, or cannot be had; the old ones are in place
    ├── WeightsLostError (RuntimeError)       500  loading weights failed half way, and so did putting the old ones back
    ├── UpdateRunningError (RuntimeError)     409  the weights are being updated; one update at a time
    ├── ModelSourceError (RuntimeError)       500  the model's files cannot be had, or are not what they should be
    ├── AuthenticationError                   401  no API key, or one that is not known here
    ├── UnknownModelError (LookupError)       404  no such model is served here
    ├── UnknownResponseError (LookupError)    404  no response of that id is stored here
    ├── BodyTooLargeError (ValueError)        413  the body of an HTTP request is longer than the server reads
    ├── QueueFullError (queue.Full)           429  as many requests wait as may wait; come back later
    ├── TenantLimitError                      429  a tenant uses all that it may; come back later
    ├── RequestCancelledError                 499  the caller gave up first
    ├── NotSupportedError                     501  a route that this model or server does not have
    ├── LogitsError (FloatingPointError)      500  the model gave no finite logits for this request; only it fails
    ├── ProcessorError (RuntimeError)         500  scores could not be processed for this request; only it fails
    ├── EngineStoppedError (RuntimeError)     503  the engine takes no more requests
    ├── EngineFailedError (RuntimeError)      503  a step failed; every request in flight failed with it
    ├── ReplicaLostError (RuntimeError)       503  the replica that served this request is gone
    ├── NoReplicaError (RuntimeError)         503  nothing can serve now
    └── RequestTimeoutError (TimeoutError)    408  the request's own time limit passed

Owns the HTTP status and the OpenAI error type of each. May know nothing but the standard library. Each constructor hands
all its arguments to `super().__init__`, so an error survives pickling between Ray processes with its fields.
"""

from __future__ import annotations

import difflib
import queue
from collections.abc import Iterable


class CbRayError(Exception):
    """Base of all errors of this package."""

    http_status: int = 500
    openai_type: str = "server_error"
    code: str | None = None


class InvalidRequestError(CbRayError, ValueError):
    """A request that can never be served as it stands. `param` names what is wrong in it."""

    http_status = 400
    openai_type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.message, self.param, self.code = message, param, code

    def __str__(self) -> str:
        return self.message


class ConfigError(CbRayError, ValueError):
    """A setting that is unknown, of the wrong type or out of range."""

    http_status = 400
    openai_type = "invalid_request_error"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, field)
        self.message, self.field = message, field

    def __str__(self) -> str:
        return self.message


class DeviceError(ConfigError, RuntimeError):
    """A setting that is right in itself but that the model's device cannot do."""


class UnsupportedModelError(CbRayError, ValueError):
    """The model has a part that this engine would compute wrongly, so it refuses to start."""

    http_status = 400
    openai_type = "invalid_request_error"

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(model, reason)
        self.model, self.reason = model, reason

    def __str__(self) -> str:
        return f"{self.model} is not supported: {self.reason}"


class WeightsError(CbRayError, ValueError):
    """Weights that are refused: they do not fit the model, or cannot be read. The model has the weights it had before."""

    http_status = 400
    openai_type = "invalid_request_error"
    code = "weights_refused"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message, self.param = message, "source"

    def __str__(self) -> str:
        return self.message


class WeightsLostError(CbRayError, RuntimeError):
    """Neither the new nor the old weights are whole. The engine that has them must not compute with them."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"the model's weights are a mixture now and the engine must be made anew: {self.message}"


class UpdateRunningError(CbRayError, RuntimeError):
    """A weight update was asked for while another one runs."""

    http_status = 409
    openai_type = "invalid_request_error"
    code = "update_running"

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"an update to {self.what} is running; wait until it has ended"


class ModelSourceError(CbRayError, RuntimeError):
    """The files of a model cannot be fetched, converted or kept, or are not what they should be."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class UnknownModelError(CbRayError, LookupError):
    """A model name that is not served here."""

    http_status = 404
    openai_type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        super().__init__(model, served)
        self.model, self.served = model, served
        self.param = "model"

    def __str__(self) -> str:
        return f"The model `{self.model}` does not exist; this server has {', '.join(f'`{name}`' for name in self.served)}"


class UnknownResponseError(CbRayError, LookupError):
    """A response that is not stored, or no longer."""

    http_status = 404
    openai_type = "invalid_request_error"
    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id)
        self.response_id = response_id

    def __str__(self) -> str:
        return f"no response {self.response_id[:80]!r} is stored here; it was made with store: false, or has been thrown out"


class NotSupportedError(CbRayError):
    """Something that this server knows of and does not do."""

    http_status = 501
    openai_type = "invalid_request_error"
    code = "not_supported"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class AuthenticationError(CbRayError):
    """The server asks for an API key, and the request has none or a wrong one."""

    http_status = 401
    openai_type = "invalid_request_error"
    code = "invalid_api_key"

    def __str__(self) -> str:
        return "this server asks for an API key: send a known one as `Authorization: Bearer KEY` or `x-api-key: KEY`"


class BodyTooLargeError(CbRayError, ValueError):
    """The body of an HTTP request is longer than this server reads."""

    http_status = 413
    openai_type = "invalid_request_error"
    code = "body_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit

    def __str__(self) -> str:
        return f"the body is longer than the {self.limit} bytes that this server reads"


class QueueFullError(CbRayError, queue.Full):
    """The service is at its admission limit; the caller should slow down and try again."""

    http_status = 429
    openai_type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, waiting: int, limit: int, retry_after_s: float = 1.0) -> None:
        super().__init__(waiting, limit, retry_after_s)
        self.waiting, self.limit, self.retry_after_s = waiting, limit, retry_after_s

    def __str__(self) -> str:
        return f"{self.waiting} requests are waiting and the limit is {self.limit}; retry in {self.retry_after_s:g} s"


class TenantLimitError(CbRayError):
    """A tenant is at its own limit, whatever the server could still do. `what` names the limit."""

    http_status = 429
    openai_type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, what: str, limit: int, retry_after_s: float) -> None:
        super().__init__(what, limit, retry_after_s)
        self.what, self.limit, self.retry_after_s = what, limit, retry_after_s

    def __str__(self) -> str:
        return f"your limit of {self.limit} {self.what} is reached; retry in {self.retry_after_s:.1f} s"


class RequestCancelledError(CbRayError):
    """The request was cancelled by its caller."""

    http_status = 499
    openai_type = "invalid_request_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request {self.request_id} was cancelled"


class LogitsError(CbRayError, FloatingPointError):
    """The model computed NaN or infinity for one request. Any other replica would compute the same, so nobody is asked again."""

    code = "nan_logits"

    def __str__(self) -> str:
        return "the model gave no finite logits for this request: its weights are broken, or its dtype is too small for them"


class ProcessorError(CbRayError, RuntimeError):
    """A logits processor raised on one request's scores. `cause` is the text of the original exception."""

    code = "processor_failed"

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        return f"the scores of this request's next token could not be processed: {self.cause}"


class EngineStoppedError(CbRayError, RuntimeError):
    """The engine takes no more requests: it is stopping, stopped or destroyed."""

    http_status = 503
    code = "engine_stopped"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class EngineFailedError(CbRayError, RuntimeError):
    """A step of the engine failed. `cause` is the text of the original exception."""

    http_status = 503
    code = "engine_failed"

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        return self.cause


class ReplicaLostError(CbRayError, RuntimeError):
    """The replica that was serving this request died or was taken away."""

    http_status = 503
    code = "replica_lost"

    def __init__(self, replica: str, tokens_so_far: int = 0) -> None:
        super().__init__(replica, tokens_so_far)
        self.replica, self.tokens_so_far = replica, tokens_so_far

    def __str__(self) -> str:
        return f"the replica serving this request was lost after {self.tokens_so_far} tokens; send the request again"


class NoReplicaError(CbRayError, RuntimeError):
    """No replica can serve a request now, and none is expected in time."""

    http_status = 503
    code = "no_replica"

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message, retry_after_s)
        self.message, self.retry_after_s = message, retry_after_s

    def __str__(self) -> str:
        return self.message


class RequestTimeoutError(CbRayError, TimeoutError):
    """The request's own time limit passed before it ended."""

    http_status = 408
    openai_type = "invalid_request_error"
    code = "timeout"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"the request did not end within its time limit of {self.timeout_s:g} s"


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that helps with a misspelt name: the closest known one, or the whole list when nothing is close."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(choices)}"
