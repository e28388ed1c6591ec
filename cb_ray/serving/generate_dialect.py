"""`/generate`: tokens in, tokens out, for programs that keep their own tokenizer: rollouts of reinforcement learning above all.

Owns its request fields and the shape of its answers. Knows generation and the messages; no text is made. Every token comes back
with its log-probability where asked for, and with the weights versions that made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from pydantic import Field, create_model

from ..errors import InvalidRequestError
from ..messages import GenerateRequest, SamplingParams, TokenChunk, TopLogprobs, Usage
from ..text.detokenizer import TextDelta, TokenInfo
from .answer_form import StructuredOutputs, grammar_of
from .generation import Choice, Written
from .openai import MAX_CHOICES, StrictModel, TokenId, plain_logprob
from .reply import Reply, ReplyHead
from .served_model import ServedModel

_HINTS = get_type_hints(SamplingParams)
_NOT_FOR_CLIENTS = {"full_history", "grammar", "embed"}  # the engine's own; and what is asked for in other ways
# The fields of SamplingParams, each optional: what is left out is as the model's author set it.
_FIELDS: Any = {
    spec.name: (_HINTS[spec.name] | None, None) for spec in fields(SamplingParams) if spec.name not in _NOT_FOR_CLIENTS
}
Sampling = create_model("Sampling", __base__=StrictModel, __doc__="How tokens are chosen: fields of SamplingParams.", **_FIELDS)


class GenerateBody(StrictModel):
    """The body of POST /generate."""

    model: str | None = Field(None, description="Optional: there is one model.")
    token_ids: list[TokenId] = Field(min_length=1)
    max_new_tokens: int | None = Field(None, ge=1, lt=2**31, description="By default the room left in the context.")
    sampling: Sampling | None = None  # type: ignore[valid-type]
    structured_outputs: StructuredOutputs | None = Field(None, description="What the answer must look like, in text.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower is served earlier, by the priority scheduler.")
    cache_salt: str | None = Field(None, description="Share cached prefixes only within one salt.")


@dataclass(slots=True, kw_only=True)
class TokenReader:
    """What `TextStream` is to text: reads the chunks of one request, but leaves tokens as they are."""

    num_tokens: int = 0
    usage: Usage | None = None
    stop_token: int | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None

    def feed(self, chunk: TokenChunk) -> TextDelta:
        self.usage = chunk.usage or self.usage
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        self.prompt_top_logprobs = chunk.prompt_top_logprobs or self.prompt_top_logprobs
        self.num_tokens += len(chunk.token_ids)
        self.stop_token = chunk.stop_token
        reason = chunk.finish_reason if chunk.finish_reason in ("stop", "length") else None
        return TextDelta(token_ids=chunk.token_ids, tokens=tuple(self._tokens(chunk)), finish_reason=reason)

    def _tokens(self, chunk: TokenChunk) -> Iterable[TokenInfo]:
        for index, token_id in enumerate(chunk.token_ids):
            logprob = chunk.logprobs[index] if chunk.logprobs else None
            top = chunk.top_logprobs[index] if chunk.top_logprobs else ()
            yield TokenInfo(token_id=token_id, offset=0, logprob=logprob, top=top)


def sampling_of(given: Mapping[str, Any], model: ServedModel, copy: int = 0) -> SamplingParams:
    """SamplingParams of the fields that were given. Raises InvalidRequestError naming the field."""
    values = {**model.defaults, "eos_token_ids": model.eos_token_ids, **given}
    if values.get("seed") is not None:
        values["seed"] = (values["seed"] + copy) % 2**63
    try:
        params = SamplingParams(**values)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"sampling.{error}", param=f"sampling.{error.param}", code=error.code) from None
    named = {
        **{name: getattr(params, name) for name in ("stop_token_ids", "allowed_token_ids", "eos_token_ids")},
        **{name: sum(getattr(params, name), ()) for name in ("bad_words", "stop_sequences")},
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
    }
    for name, ids in named.items():
        model.check_token_ids(list(ids), f"sampling.{name}")
    return params


def generate_choices(body: GenerateBody, model: ServedModel, head: ReplyHead) -> list[Choice]:
    """One Choice for each of n sequences. Raises InvalidRequestError."""
    model.check_token_ids(body.token_ids, "token_ids")
    model.check_length(len(body.token_ids), body.max_new_tokens, "token_ids")
    given = body.sampling.model_dump(exclude_none=True) if body.sampling is not None else {}
    if body.structured_outputs is not None:
        given["grammar"] = grammar_of(body.structured_outputs)
    choices: list[Choice] = []
    for index in range(body.n or 1):
        request = GenerateRequest(
            request_id=f"{head.id}-{index}",
            token_ids=tuple(body.token_ids),
            max_new_tokens=body.max_new_tokens,
            sampling=sampling_of(given, model, index),
            stream=bool(body.stream),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            fork_of=f"{head.id}-0" if index else None,
        )
        choices.append(Choice(index=index, request=request, text=TokenReader()))
    return choices


class GenerateReply(Reply):
    """Answers of kind `generation`; a stream's events are of the same kind with what is new in them."""

    kind = chunk_kind = "generation"

    def __init__(self, head: ReplyHead, choices: Sequence[Choice]) -> None:
        super().__init__(head, choices, include_usage=True)
        self._begun: set[int] = set()

    def events(self, choice: Choice, delta: TextDelta) -> Iterable[dict[str, Any]]:
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        yield self._choice(choice, delta.tokens, delta.finish_reason, with_prompt=first)

    def whole(self, choice: Choice, written: Written) -> dict[str, Any]:
        return self._choice(choice, written.tokens, written.finish_reason, with_prompt=True)

    @staticmethod
    def _choice(choice: Choice, tokens: Sequence[TokenInfo], reason: str | None, *, with_prompt: bool) -> dict[str, Any]:
        sampling, text = choice.request.sampling, choice.text
        found: dict[str, Any] = {"index": choice.index, "token_ids": [token.token_id for token in tokens]}
        if sampling.logprobs is not None:
            found["logprobs"] = [_plain(token.logprob) for token in tokens]
        if sampling.logprobs:
            found["top_logprobs"] = [_pairs(token.top) for token in tokens]
        if sampling.prompt_logprobs is not None and with_prompt:
            found["prompt_logprobs"] = [_plain(value) for value in text.prompt_logprobs or ()]
        if sampling.prompt_logprobs and with_prompt:
            found["prompt_top_logprobs"] = [_pairs(top) for top in text.prompt_top_logprobs or ()]
        found["finish_reason"] = reason
        if reason is not None:
            found["stop_token"] = getattr(text, "stop_token", None)
            found["weights_versions"] = list(text.usage.weights_versions) if text.usage else []
        return found


def _plain(value: float | None) -> float | None:
    return None if value is None else plain_logprob(value)


def _pairs(top: TopLogprobs) -> list[tuple[int, float]]:
    return [(token_id, plain_logprob(value)) for token_id, value in top]
