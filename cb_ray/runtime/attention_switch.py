"""Switching a model's attention to a registered name and back, for one thread. Owns the switch; computes nothing.

    engine thread   config._attn_implementation ──▶ our name       the model runs on our pages
    other threads   config._attn_implementation ──▶ "sdpa", …      the model is its owner's: plain forward passes, training

A model looks its attention up in its config at every call, so the answer may depend on who asks. While a switch is installed the
config's class is a subclass of its own, in which that one attribute is a property; the config's contents are never touched.
"""

from __future__ import annotations

import threading
from typing import Any

from transformers import PreTrainedModel

_FIELD = "_attn_implementation_internal"


class AttentionSwitch:
    """Puts a model's attention on one of our names for the thread that installs it, and back."""

    def __init__(self, model: PreTrainedModel, name: str, *, everyone: bool = False) -> None:
        """`everyone`: for all threads, by the plain attribute: a compiler cannot trace a question about threads."""
        self._model = model
        self._name = name
        self._everyone = everyone
        self._olds: list[str | None] = []
        self._thread: int | None = None
        self._configs: list[Any] = []

    def install(self) -> None:
        """For the calling thread. Idempotent; another thread's call moves the switch to that thread."""
        thread = threading.get_ident()
        if self._thread == thread:
            return
        self.restore()
        self._configs = _configs(self._model)
        self._thread = thread
        if self._everyone:
            self._olds = [config.__dict__.get(_FIELD) for config in self._configs]
            for config in self._configs:
                config.__dict__[_FIELD] = self._name
            return
        for config in self._configs:
            names: dict[int, str] | None = getattr(type(config), "_names_by_thread", None)
            if names is None:
                names = {}
                config.__class__ = _asking_who(type(config), names)
            names[thread] = self._name

    def restore(self) -> None:
        """From any thread. Idempotent."""
        for config, old in zip(self._configs, self._olds, strict=False):
            config.__dict__[_FIELD] = old
        self._olds = []
        for config in self._configs:
            names: dict[int, str] = getattr(type(config), "_names_by_thread", {})
            if self._thread is not None:
                names.pop(self._thread, None)
            if not names and "_names_by_thread" in vars(type(config)):
                config.__class__ = type(config).__base__
        self._configs, self._thread = [], None


def _asking_who(base: type, names: dict[int, str]) -> type:
    """A subclass of a config's class that gives some threads another attention. It is copied and pickled as its base."""

    def get(config: Any) -> str | None:
        return names.get(threading.get_ident()) or config.__dict__.get(_FIELD)

    def put(config: Any, value: str | None) -> None:
        config.__dict__[_FIELD] = value

    def reduce(config: Any, protocol: Any) -> Any:
        return _remake, (base, config.__dict__.copy())

    members = {
        _FIELD: property(get, put),
        "_names_by_thread": names,
        "__init__": base.__init__,  # type: ignore[misc]
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), members)


def _remake(base: type, contents: dict[str, Any]) -> Any:
    config: Any = object.__new__(base)
    config.__dict__.update(contents)
    return config


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every config object that a module of the model looks its attention up in."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, _FIELD):
            found.setdefault(id(config), config)
    return list(found.values())
