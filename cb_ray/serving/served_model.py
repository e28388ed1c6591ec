"""`ServedModel`: what the door knows of the model behind it. Loaded once per Router from the model's own files.

Owns the model's public name, its codec, its limits and the sampling defaults of its author. Knows no HTTP, no Ray, no weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ..errors import InvalidRequestError, UnknownModelError
from ..text.codec import TextCodec

# Generation settings that a model's author may have set and that a request may override; the rest is not sampling.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under its public name. `context_length`: tokens of prompt and answer together; None: not known, not checked."""

    name: str
    codec: TextCodec
    vocab_size: int
    context_length: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict[str, float])
    created: int = field(default_factory=lambda: int(time.time()))
    max_prompt_tokens: int | None = None  # the operator's bound; None: the context's
    beside: tuple[ServedModel, ...] = ()  # other models behind the same door, each with a door of its own
    version: str = ""  # whatever changes answers: goes into the fingerprint

    @classmethod
    def load(cls, path: str, name: str, max_model_len: int | None = None) -> ServedModel:
        """The model in directory `path`, or of that hub id. Reads its config, generation config and tokenizer; no weights."""
        from transformers import AutoConfig, GenerationConfig

        codec = TextCodec.load(path, name)
        config = AutoConfig.from_pretrained(path)
        text_config = config.get_text_config()
        try:
            generation = GenerationConfig.from_pretrained(path)
        except OSError:  # the file is optional
            generation = GenerationConfig.from_model_config(config)
        made_for = getattr(text_config, "max_position_embeddings", None)
        lengths = [length for length in (made_for, max_model_len) if isinstance(length, int) and length > 0]
        return cls(
            name=name,
            codec=codec,
            vocab_size=int(getattr(text_config, "vocab_size", None) or codec.size),
            context_length=min(lengths, default=None),
            eos_token_ids=_eos_token_ids(codec, generation, text_config),
            defaults={key: value for key in _DEFAULTS if (value := getattr(generation, key, None)) is not None},
            version=str(getattr(config, "_commit_hash", None) or config.to_json_string()),
        )

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: the same for as long as the same model answers."""
        return "fp_" + blake2b(f"{self.name} {self.version}".encode(), digest_size=6).hexdigest()

    def card(self) -> dict[str, Any]:
        """The model as `/v1/models` shows it."""
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "cb-ray", "root": self.name}
        return {**card, "parent": None, "max_model_len": self.context_length}

    def check_name(self, name: str) -> None:
        """Raises UnknownModelError unless `name` is this model."""
        if name != self.name:
            raise UnknownModelError(name, (self.name, *(model.name for model in self.beside)))

    def check_length(self, num_tokens: int, max_new_tokens: int | None, param: str) -> None:
        """Raises InvalidRequestError (`context_length_exceeded`) when prompt and answer cannot fit into the context.

        `num_tokens` may be a lower bound: what is refused by the bound would be refused by the count.
        """
        most = self.max_prompt_tokens
        if most is not None and num_tokens > most:
            raise InvalidRequestError(
                f"this server takes prompts of at most {most} tokens, but the {param} made {num_tokens} or more; shorten it",
                param=param,
                code="prompt_too_long",
            )
        limit = self.context_length
        if limit is None:
            return
        if num_tokens >= limit:
            raise InvalidRequestError(
                f"this model's maximum context length is {limit} tokens, but the {param} made {num_tokens} or more; shorten it",
                param=param,
                code="context_length_exceeded",
            )
        if max_new_tokens is not None and num_tokens + max_new_tokens > limit:
            raise InvalidRequestError(
                f"this model's maximum context length is {limit} tokens, but {num_tokens} in the {param} and {max_new_tokens} "
                f"to generate make {num_tokens + max_new_tokens}; shorten the {param} or ask for at most {limit - num_tokens}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def check_token_ids(self, token_ids: list[int], param: str) -> None:
        """Raises InvalidRequestError naming `param` for a token id outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"{param} has token id {token_id}, and this model's ids lie between 0 and {self.vocab_size - 1}", param=param
                )


def _eos_token_ids(codec: TextCodec, *configs: Any) -> tuple[int, ...]:
    """All ids that end an answer: of the first config that names some, and of the tokenizer (chat models may name only one)."""
    found: list[int] = []
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        found = [value] if isinstance(value, int) else list(value or ())
        if found:
            break
    return tuple(dict.fromkeys(found + ([codec.eos_token_id] if codec.eos_token_id is not None else [])))
