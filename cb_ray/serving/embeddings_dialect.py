"""`/v1/embeddings`: OpenAI's embeddings, made of the hidden state that a model ends a text with, at length 1.

Owns its request fields and the shape of its answers. For models that were trained to embed this way (Qwen3-Embedding, E5-Mistral:
decoders with last-token pooling) these are their embeddings; any other decoder has hidden states too, of what use they may be.
Knows the shared dialect and generation; no sockets.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from ..errors import InvalidRequestError
from ..messages import GenerateRequest, SamplingParams, TokenChunk, TopLogprobs, Usage
from ..text.detokenizer import TextDelta
from .completions_dialect import Prompt
from .generation import Choice, Written
from .openai import MAX_CHOICES, StrictModel
from .reply import Reply, ReplyHead
from .served_model import ServedModel


class EmbeddingsBody(StrictModel):
    """The body of POST /v1/embeddings."""

    model: str = Field(description="A name that GET /v1/models lists.")
    input: Prompt = Field(description=f"Text, token ids, or a list of either; at most {MAX_CHOICES}.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="Only the first so many numbers, at length 1 again.")
    user: str | None = Field(None, description="Accepted; changes nothing.")
    priority: int | None = Field(None, ge=-(2**63), lt=2**63, description="Extension: lower is served earlier.")
    cache_salt: str | None = Field(None, description="Extension: share cached prefixes only within one salt.")

    @property
    def inputs(self) -> list[str | list[int]]:
        one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if one else list(self.input)  # type: ignore[list-item]

    @property
    def num_chars(self) -> int:
        return sum(len(text) for text in self.inputs if isinstance(text, str))


def check_embeddings(body: EmbeddingsBody, most: int) -> None:
    """Raises InvalidRequestError for more than `most` inputs, each of which takes a place in the line."""
    if len(body.inputs) > most:
        raise InvalidRequestError(f"input has {len(body.inputs)} texts; send at most {most} at a time", param="input")


def tokenize_inputs(body: EmbeddingsBody, model: ServedModel) -> list[list[int]]:
    """Token ids of each input, with the special tokens that the tokenizer adds. Slow for long text. Raises InvalidRequestError."""
    return [_token_ids(model, text) for text in body.inputs]


def _token_ids(model: ServedModel, text: str | list[int]) -> list[int]:
    if isinstance(text, str):
        model.check_length(model.codec.at_least(len(text)), None, "input")
        ids = model.codec.encode(text)
    else:
        model.check_token_ids(text, "input")
        ids = text
    if not ids:
        raise InvalidRequestError("an input is empty; it needs at least one token", param="input")
    model.check_length(len(ids), None, "input")
    return ids


@dataclass(slots=True)
class EmbeddingReader:
    """What there is to read of a request that asks for an embedding: one chunk."""

    num_tokens: int = 0
    usage: Usage | None = None
    embedding: tuple[float, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None

    def feed(self, chunk: TokenChunk) -> TextDelta:
        self.usage, self.embedding = chunk.usage or self.usage, chunk.embedding or self.embedding
        return TextDelta(finish_reason="stop" if chunk.is_terminal else None)


def embedding_choices(body: EmbeddingsBody, head: ReplyHead, inputs: Sequence[list[int]]) -> list[Choice]:
    """One Choice for each input."""
    return [
        Choice(
            index=index,
            prompt=index,
            request=GenerateRequest(
                request_id=f"{head.id}-{index}",
                token_ids=tuple(ids),
                max_new_tokens=1,
                sampling=SamplingParams(do_sample=False, embed=True),
                stream=False,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            ),
            text=EmbeddingReader(),
        )
        for index, ids in enumerate(inputs)
    ]


class EmbeddingsReply(Reply):
    """The list of embeddings, in the order of the inputs."""

    def __init__(self, head: ReplyHead, body: EmbeddingsBody, choices: Sequence[Choice]) -> None:
        super().__init__(head, choices)
        self._body = body

    def answer(self, written: Sequence[Written]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": choice.index, "embedding": self._encoded(choice.text.embedding)}  # type: ignore[attr-defined]
            for choice in self.choices
        ]
        return {"object": "list", "data": data, "model": self.head.model, "usage": self.usage(), **self._more()}

    def usage(self) -> dict[str, Any]:
        count = sum(len(choice.request.token_ids) for choice in self.choices)
        return {"prompt_tokens": count, "total_tokens": count}

    def _encoded(self, vector: Sequence[float] | None) -> list[float] | str:
        assert vector is not None, "a request for an embedding ended without one"
        wanted = self._body.dimensions
        if wanted is not None:
            if wanted > len(vector):
                raise InvalidRequestError(
                    f"this model's embeddings have {len(vector)} dimensions, got {wanted}", param="dimensions"
                )
            length = math.sqrt(sum(value * value for value in vector[:wanted])) or 1.0
            vector = [value / length for value in vector[:wanted]]
        if self._body.encoding_format == "base64":
            return base64.b64encode(array("f", vector).tobytes()).decode()  # little-endian float32, as numpy writes it here
        return list(vector)
