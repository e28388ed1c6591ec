"""What the two OpenAI dialects share: reading a body strictly, and turning its fields into SamplingParams.

Owns the common request fields and the usage object. Every field that is not listed here or in a dialect
is refused by name, and so is a listed one that this server cannot honour: nothing is silently ignored. Knows pydantic and the
messages; no sockets, no Ray.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from ..errors import InvalidRequestError, nearest
from ..grammar import Grammar
from ..messages import SamplingParams, Usage
from .served_model import ServedModel

MAX_STOPS = 4
MAX_CHOICES = 128  # sequences of one request: prompts times n
MAX_LOGPROBS = 20
_INT64 = 2**63
_LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write

Body = TypeVar("Body", bound=BaseModel)


def text_or_list(value: Any) -> str | None:
    """Discriminator of a string from a list, so that an error speaks of what was sent."""
    return "(text)" if isinstance(value, str) else "(list)" if isinstance(value, list) else None


Stop = Annotated[
    Annotated[str, Field(min_length=1), Tag("(text)")]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS), Tag("(list)")],
    Discriminator(text_or_list, custom_error_type="stop", custom_error_message="Should be a string or a list of strings"),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StrictModel(BaseModel):
    """JSON types as they are written: no text for numbers, no unknown keys, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(StrictModel):
    """`stream_options`: only with `stream: true`."""

    include_usage: bool | None = Field(None, description="One more chunk before [DONE], without choices and with the usage.")
    include_obfuscation: bool | None = Field(None, description="Accepted; this server pads nothing.")
    continuous_usage_stats: bool | None = Field(None, description="Extension: the usage so far on every chunk.")


class GenerationBody(StrictModel):
    """Request fields that chat completions and completions have in common. `null` means not given."""

    model: str = Field(description="A name that GET /v1/models lists.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0: always the best token.")
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stop | None = Field(None, description=f"Up to {MAX_STOPS} strings; the answer ends before the first.")
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, description="Token id to bias.")
    user: str | None = Field(None, description="Accepted; changes nothing.")
    # Extensions that many servers share.
    top_k: int | None = Field(None, ge=-1, description="Extension: choose among the k best; 0 or -1: all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Extension: least probability, relative to the best token's.")
    min_tokens: int | None = Field(None, ge=0, description="Extension: no end before so many tokens.")
    ignore_eos: bool | None = Field(None, description="Extension: go on to max_tokens.")
    repetition_penalty: float | None = Field(None, gt=0, description="Extension: divides the logits of tokens seen before.")
    stop_token_ids: list[TokenId] | None = Field(None, description="Extension: tokens that end the answer.")
    allowed_token_ids: list[TokenId] | None = Field(None, description="Extension: choose only among these tokens.")
    include_stop_str_in_output: bool | None = Field(None, description="Extension: keep the stop string in the answer.")
    skip_special_tokens: bool | None = Field(None, description="Extension: false shows special tokens as text.")
    priority: int | None = Field(None, ge=-_INT64, lt=_INT64, description="Extension: lower is served earlier.")
    cache_salt: str | None = Field(None, description="Extension: share cached prefixes only within one salt.")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def parse_body(kind: type[Body], raw: bytes, ignored: list[str] | None = None) -> Body:
    """A body as `kind`. Raises InvalidRequestError whose `param` is the path of the first fault.

    With a list for `ignored`, fields that are unknown or not supported are left out instead, and their paths put there.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        if ignored is None:
            raise _explain(kind, error) from None
        return _parse_leniently(kind, raw, ignored)


_IGNORABLE = {"extra_forbidden", "none_required"}


def _parse_leniently(kind: type[Body], raw: bytes, ignored: list[str]) -> Body:
    value, rounds = None, 0
    while True:
        try:
            return kind.model_validate_json(raw if value is None else json.dumps(value))
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False)
            places = [fault["loc"] for fault in faults if fault["type"] in _IGNORABLE]
            if not places or len(places) < len(faults) or rounds == 8:
                raise _explain(kind, error, skip=_IGNORABLE if len(places) < len(faults) else frozenset()) from None
        value, rounds = json.loads(raw) if value is None else value, rounds + 1
        for place in places:
            _leave_out(value, place)
            ignored.append(_path(place))


def _leave_out(value: Any, place: tuple[str | int, ...]) -> None:
    *rooms, last = [part for part in place if isinstance(part, int) or not part.startswith("(")]
    for room in rooms:
        value = value[room]
    value.pop(last, None)


def _explain(kind: type[BaseModel], error: ValidationError, skip: Collection[str] = ()) -> InvalidRequestError:
    fault = next(fault for fault in error.errors(include_url=False, include_context=False) if fault["type"] not in skip)
    param = _path(fault["loc"])
    what, message, found = fault["type"], fault["msg"], fault.get("input")
    if what == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    if not param:
        return InvalidRequestError(f"the body must be a JSON object, got {_short(found)}")
    if what == "missing":
        return InvalidRequestError(f"{param} is required", param=param)
    if what == "extra_forbidden":
        hint = f"; {nearest(param, kind.model_fields)}" if len(fault["loc"]) == 1 else ""
        return InvalidRequestError(f"unknown parameter {_short(param)}{hint}", param=param)
    if what == "none_required":
        return InvalidRequestError(f"{param} is not supported by this server; leave it out", param=param)
    return InvalidRequestError(f"{param}: {message[:1].lower()}{message[1:]}, got {_short(found)}", param=param)


def _path(loc: Iterable[str | int]) -> str:
    """('messages', 0, '(list)', 'type') becomes 'messages[0].type'; tags of unions stand in brackets and are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("("):
            path += f".{part}" if path else part
    return path


def _short(value: Any, width: int = 80) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= width else text[: width - 1] + "…"


def check_stream_options(body: GenerationBody) -> None:
    """Raises InvalidRequestError for stream options on a request that does not stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options are for streams; set stream to true or leave them out", param="stream_options")


def sampling_params(
    body: GenerationBody,
    model: ServedModel,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    choice: int = 0,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """How the tokens of choice number `choice` are chosen; with a seed each choice has its own, derived from it.

    Fields that were not given are as the model's author set them, or else neutral. Raises InvalidRequestError.
    """
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    chosen = {**model.defaults, **{name: value for name, value in given.items() if value is not None}}
    if chosen.get("top_p") == 0:
        chosen["top_p"] = 1e-9  # OpenAI allows 0, which leaves the best token, as does anything tiny
    model.check_token_ids(body.stop_token_ids or [], "stop_token_ids")
    model.check_token_ids(body.allowed_token_ids or [], "allowed_token_ids")
    return SamplingParams(
        **chosen,  # type: ignore[arg-type]
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, model),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        eos_token_ids=model.eos_token_ids,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        seed=None if body.seed is None else body.seed + choice,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def _logit_bias(bias: Mapping[str, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and int(key[:20]) < model.vocab_size):
            raise InvalidRequestError(
                f"the keys of logit_bias are token ids between 0 and {model.vocab_size - 1} as text, got {_short(key)}",
                param="logit_bias",
            )
        pairs.append((int(key), value))
    return tuple(pairs)


def usage_object(
    prompts: Iterable[int], completion: int, cached: Iterable[Usage | None], reasoning: int | None = None
) -> dict[str, Any]:
    """OpenAI's usage of a request with one entry of `prompts` (token counts) and of `cached` for each prompt.

    The cached tokens are null where the engine did not say, which happens when a stop string ended the request early.
    `reasoning`: tokens of the completion that were thought; None: not a question here.
    """
    prompt = sum(prompts)
    told = [usage.num_cached_tokens for usage in cached if usage is not None]
    details = {"cached_tokens": sum(told)} if told else None
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    return usage if reasoning is None else {**usage, "completion_tokens_details": {"reasoning_tokens": reasoning}}


def plain_logprob(value: float) -> float:
    """A log-probability that JSON can write: never above 0, never minus infinity, never NaN."""
    return min(0.0, max(_LOWEST_LOGPROB, value)) if value == value else _LOWEST_LOGPROB
