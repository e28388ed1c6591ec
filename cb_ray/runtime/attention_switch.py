"""Switching a model's attention to a registered name and back. Owns the record of what it was before; computes nothing."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


class AttentionSwitch:
    """Puts a model's attention on one of our names, and back. Owns the record of what it was before."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model = model
        self._name = name
        self._before: list[tuple[Any, str | None]] | None = None

    def install(self) -> None:
        """Idempotent."""
        if self._before is None:
            self._before = [(config, config._attn_implementation) for config in _configs(self._model)]
            for config, _ in self._before:
                config._attn_implementation_internal = self._name

    def restore(self) -> None:
        """Idempotent."""
        if self._before is not None:
            for config, name in self._before:
                config._attn_implementation_internal = name
            self._before = None


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every config object that a module of the model looks its attention up in."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found.setdefault(id(config), config)
    return list(found.values())
