"""What an operator may choose about the door.

Owns `DoorSettings`. May know the tenants' keys; nothing of Ray, HTTP or models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .openai import MAX_CHOICES, MAX_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """Times are seconds; None: no bound. `docs/http.md` says what each is for."""

    # who may call
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none, and no file: everyone may call
    api_keys_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    num_routers: int = 1  # a tenant's limits are divided by it
    # what may be asked
    max_body_bytes: int = 32 * 2**20
    max_output_tokens: int | None = None
    max_choices: int = MAX_CHOICES
    max_logprobs: int = MAX_LOGPROBS
    ignores_unknown: bool = False  # leave out unknown and unsupported parameters with a warning header, instead of 400
    # how long, and how much
    request_timeout_s: float | None = None  # of generation, from arrival at the engine
    body_timeout_s: float | None = 60.0
    keep_alive_s: float | None = 15.0  # a streamed request that waits longer gets headers and a comment so often
    send_timeout_s: float = 60.0  # a stream whose client takes nothing for so long is ended
    max_unread_bytes: int = 2**20  # of one stream, made and not taken by the client
    stored_response_bytes: int = 64 * 2**20  # 0: no response is stored
    # what is told
    adds_request_id: bool = True  # False where a proxy in front adds X-Request-Id to the response itself
    extension_fields: bool = False  # always tell how an answer was made, not only on X-Cb-Ray-Debug
    access_log: bool = False
    vllm_metric_names: bool = True
    num_tokenizer_threads: int = 4
