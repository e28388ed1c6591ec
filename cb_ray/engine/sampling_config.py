"""From transformers' GenerationConfig, and the keywords of one request, to SamplingParams.

Owns `SamplingPolicy`: what an engine's generation config means, and what a request may say differently. Knows the names of
transformers' settings but imports nothing of it; never changes the object it reads. A setting that would change tokens and that
is not computed here is dropped with a warning, or refused by name where `drop_unsupported_processors` is False.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

from ..errors import ConfigError, InvalidRequestError, nearest
from ..grammar import Grammar
from ..messages import SamplingParams
from .processors import WARPERS, early_settings, has_long_biases, late_settings

logger = logging.getLogger(__name__)

_OWN_WAY = ("eos_token_ids", "full_history")  # fields of SamplingParams that are set in another way
REQUEST_KEYWORDS = tuple(sorted(f.name for f in fields(SamplingParams) if f.name not in _OWN_WAY))
_SEQUENCES = ("allowed_token_ids", "stop_token_ids")
_NESTED = ("bad_words", "stop_sequences")

# Settings of transformers that change tokens and that nothing here computes: name -> the values under which they do nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "guidance_scale": (None, 1, 1.0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "stop_strings": (None,),
    "max_time": (None,),
}


class SamplingPolicy:
    """What one engine's generation config means for its requests.

    Raises ConfigError when the config asks for something that is refused, and InvalidRequestError for values out of range.
    """

    def __init__(
        self,
        generation_config: Any,
        model_config: Any,
        *,
        vocab_size: int,
        per_request: bool,
        drop_unsupported: bool,
        return_logprobs: bool,
    ) -> None:
        self._per_request = per_request
        self._say_what_is_missing(generation_config, drop_unsupported)
        self._late = late_settings(generation_config)
        self.num_return_sequences: int = generation_config.num_return_sequences or 1
        self._max_new_tokens: int | None = generation_config.max_new_tokens
        self._max_length: int | None = generation_config.max_length
        self._min_length: int = generation_config.min_length or 0
        self.base = _base(generation_config, model_config, vocab_size, return_logprobs)

    def params(self, num_prompt: int, eos_token_id: Any = None, keywords: Mapping[str, Any] | None = None) -> SamplingParams:
        """The parameters of one request. `eos_token_id`: one id, several, a negative one for never, or None for the engine's own.

        Raises InvalidRequestError naming the parameter: unknown, of the wrong type, out of range, or not open to requests here.
        """
        changes: dict[str, Any] = {}
        if eos_token_id is not None:
            changes["eos_token_ids"] = token_ids(eos_token_id, "eos_token_id")
        for name, value in (keywords or {}).items():
            self._check_keyword(name)
            if name in WARPERS and self._late:
                raise InvalidRequestError(f"{name} cannot be set per request beside {self._late[0]} of the engine", param=name)
            if value is not None and name != "filter_value":
                changes[name] = _plain(name, value)
        if "do_sample" not in changes and not self.base.do_sample and any(changes.get(name) for name in WARPERS):
            changes["do_sample"] = True  # a request that names a temperature wants to be sampled
        if self._min_length > num_prompt and "min_tokens" not in changes:
            changes["min_tokens"] = max(self.base.min_tokens, self._min_length - num_prompt)
        return replace(self.base, **changes) if changes else self.base

    def max_new_tokens(self, num_prompt: int, asked: Any) -> int | None:
        """How many tokens a request may generate; None: as many as the model and the cache allow."""
        if asked is not None:
            asked = asked.item() if hasattr(asked, "item") else asked
            if not isinstance(asked, int) or isinstance(asked, bool):
                raise InvalidRequestError(f"max_new_tokens must be a whole number or None, got {asked!r}", param="max_new_tokens")
            return asked
        if self._max_new_tokens is not None:
            return self._max_new_tokens
        return None if self._max_length is None else max(0, self._max_length - num_prompt)

    def _check_keyword(self, name: str) -> None:
        if name not in REQUEST_KEYWORDS and name != "filter_value":
            raise InvalidRequestError(
                f"a request has no parameter {name!r}; {nearest(name, REQUEST_KEYWORDS)}", param=name, code="unknown_parameter"
            )
        if not self._per_request and name != "grammar":
            raise InvalidRequestError(
                f"{name} cannot be set per request in this engine; make it with per_request_processors=True", param=name
            )
        if name == "filter_value":
            logger.warning("filter_value is ignored: what a filter removes has probability zero")

    def _say_what_is_missing(self, generation_config: Any, drop: bool) -> None:
        names = unsupported_settings(generation_config)
        if names and not drop:
            raise ConfigError(
                f"the generation config asks for {', '.join(names)}, which this engine does not compute; leave it out, or drop "
                "it with drop_unsupported_processors=True",
                names[0],
            )
        for name in names:
            logger.warning("%s of the generation config is dropped: this engine does not compute it", name)


def unsupported_settings(generation_config: Any) -> list[str]:
    """Names of the settings that would change tokens and that no part of the engine computes."""
    return [name for name, neutral in _UNSUPPORTED.items() if getattr(generation_config, name, None) not in neutral]


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Token ids from one id or several (list, tensor); negative ones, which mean never, are left out."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    several = cast("Iterable[Any]", value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    ids: list[int] = []
    for item in several:
        if not isinstance(item, int) or isinstance(item, bool):
            raise InvalidRequestError(f"{name} must be a token id or several, got {value!r}", param=name)
        if item >= 0:
            ids.append(item)
    return tuple(ids)


def _base(config: Any, model_config: Any, vocab_size: int, return_logprobs: bool) -> SamplingParams:
    eos = config.eos_token_id
    if eos is None:
        eos = getattr(model_config, "eos_token_id", None)
    sampled: dict[str, Any] = {}
    if config.do_sample and not late_settings(config):
        for name in WARPERS:
            if getattr(config, name) is not None:
                sampled[name] = getattr(config, name)
    bias = {token: -math.inf for token in token_ids(config.suppress_tokens or (), "suppress_tokens") if token < vocab_size}
    if not has_long_biases(config):
        for sequence, value in _biases(config):
            bias[sequence[0]] = bias.get(sequence[0], 0.0) + value
    return SamplingParams(
        do_sample=bool(config.do_sample),
        repetition_penalty=1.0 if config.repetition_penalty is None else config.repetition_penalty,
        min_tokens=config.min_new_tokens or 0,
        bad_words=tuple(tuple(word) for word in config.bad_words_ids or ()),
        logit_bias=tuple(sorted(bias.items())),
        eos_token_ids=() if eos is None else token_ids(eos, "eos_token_id"),
        logprobs=0 if return_logprobs else None,
        full_history=bool(early_settings(config) or late_settings(config)),
        **sampled,
    )


def _biases(config: Any) -> list[tuple[tuple[int, ...], float]]:
    """`sequence_bias` in either of its forms: {ids: bias} or [[ids, bias], …]."""
    given: Any = config.sequence_bias or ()
    pairs = cast("Iterable[tuple[Any, Any]]", given.items() if hasattr(given, "items") else given)
    return [(tuple(ids), float(bias)) for ids, bias in pairs]


def _plain(name: str, value: Any) -> Any:
    """A keyword's value in the form SamplingParams keeps: tuples, and plain numbers out of arrays and tensors."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if name == "grammar":
        return Grammar.of(value)
    try:
        if name in _SEQUENCES:
            return token_ids(value, name)
        if name in _NESTED:
            return tuple(token_ids(sequence, name) for sequence in value)
        if name == "logit_bias":
            pairs = cast("Iterable[tuple[Any, Any]]", value.items() if hasattr(value, "items") else value)
            return tuple(sorted((int(token), float(bias)) for token, bias in pairs))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name} cannot be read from {value!r}: {error}", param=name) from error
    if name in ("do_sample", "ignore_eos", "embed") and not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be True or False, got {value!r}", param=name)
    if name in ("min_tokens", "min_tokens_to_keep", "logprobs", "prompt_logprobs") and not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number, got {value!r}", param=name)
    return value
