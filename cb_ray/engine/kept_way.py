"""The way of running a model that its trial found, kept on the model for the next engine.

Owns the note on the model and what makes it void. A trial costs a few forward passes; what it proves is how the model's code computes,
so it holds for other weights, and not for other modules, hooks, precision or device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from ..runtime.native.parts import is_plain
from .ways import Way

_NAME = "_cb_ray_way"


class _Note:
    """What was found, and for what. Copies of a model, and models from a file, have an empty one."""

    def __init__(self) -> None:
        self.mark: tuple[Any, ...] = ()
        self.way: Way | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Note, ())


def kept_way(model: PreTrainedModel, wishes: tuple[Any, ...], find: Callable[[], Way]) -> Way:
    """What `find` found the last time, if the wishes are the same and nothing that matters has changed since; else what it finds."""
    note, mark = model.__dict__.get(_NAME), (*wishes, *_mark(model))
    if isinstance(note, _Note) and note.way is not None and note.mark == mark:
        return note.way
    found = _Note()
    found.mark, found.way = mark, find()
    model.__dict__[_NAME] = found
    return found.way


def _mark(model: PreTrainedModel) -> tuple[Any, ...]:
    """Modules by identity: the way holds them, so that no other can come to have the same."""
    modules = tuple((id(module), type(module), is_plain(module)) for module in model.modules())
    return (model.dtype, model.device, model.config._attn_implementation, modules)  # pyright: ignore
