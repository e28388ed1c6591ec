"""Settings of a generation config that no native code computes: transformers' own processors, over each request's whole history.

Owns the choice of those that can be run this way, which are those that depend on a sequence alone. It is the slow path: one call
per processor and row, on known tokens only. What must follow the temperature takes temperature, top-k, top-p and min-p along, so
that transformers' order is kept.

    no_repeat_ngram_size, sequence_bias, …        before the native temperature, top-k, top-p, min-p
    typical_p, epsilon_cutoff, eta_cutoff, top_h  after them: all of them by transformers' processors, native ones neutral
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.sampling import Processor

WARPERS = ("temperature", "top_k", "top_p", "min_p")
_EARLY: dict[str, tuple[Any, ...]] = {  # setting -> the values under which it does nothing
    "no_repeat_ngram_size": (None, 0),
    "remove_invalid_values": (None, False),
}
_LATE: dict[str, tuple[Any, ...]] = {
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
}


def early_settings(config: Any) -> list[str]:
    """Settings in effect that come before the temperature."""
    names = [name for name, neutral in _EARLY.items() if getattr(config, name, None) not in neutral]
    return names + (["sequence_bias"] if has_long_biases(config) else [])


def late_settings(config: Any) -> list[str]:
    """Settings in effect that come after the temperature. Without sampling there are none."""
    if not config.do_sample:
        return []
    return [name for name, neutral in _LATE.items() if getattr(config, name, None) not in neutral]


def has_long_biases(config: Any) -> bool:
    """Whether `sequence_bias` names sequences of more than one token, which only the whole history tells."""
    given: Any = config.sequence_bias or ()
    return any(len(entry if isinstance(given, dict) else entry[0]) > 1 for entry in given)


def transformers_processors(model: Any, config: Any) -> list[Processor]:
    """The processors that serve the early and late settings of `config`, in transformers' order; empty when there are none."""
    early, late = early_settings(config), late_settings(config)
    if not early and not late:
        return []
    wanted = {*early, *late, *(WARPERS if late else ()), "do_sample"}
    chosen = copy.deepcopy(config)
    plain: dict[str, Any] = type(config)().__dict__
    for name, value in plain.items():
        if name[0] != "_" and name not in wanted:
            setattr(chosen, name, value)
    if not late:
        chosen.do_sample = False
    length = 1  # any: none of these depends on where the prompt ends
    return list(model._get_logits_processor(chosen, input_ids_seq_length=length, device=model.device))
