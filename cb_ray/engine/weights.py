"""Other weights for a model that is running: all of them, or none.

Owns the check of names and shapes, the copying in place, and the way back when copying fails half way. Knows tensors and a model;
no engine, no request: whoever calls sees to it that nobody computes meanwhile.

    open ─▶ check names and shapes ─▶ read once, fingerprint ─▶ (engine stands still) copy ─▶ done
                  │ refused: nothing was touched                        │ fails: the old weights are put back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..errors import WeightsError, WeightsLostError
from ..runtime.ranks import local, share_of
from .weights_source import OpenWeights, WeightsSource, describe, fingerprint, open_weights

_SHOWN = 3  # names in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What an update did. `fingerprint` is equal wherever the same weights were read; `pause_s` is how long no step was made."""

    version: int
    source: str
    fingerprint: str
    num_bytes: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class _Copy:
    """One tensor of the model and the name it is read under."""

    target: Tensor
    name: str


class Update:
    """New weights for one model, checked whole. Raises WeightsError, with the model untouched, when they do not fit."""

    def __init__(self, source: WeightsSource, model: PreTrainedModel, *, progress: bool = False) -> None:
        self.source = describe(source)
        self.fingerprint = ""
        self._model, self._progress = model, progress
        self._weights = open_weights(source, model)
        self._copies: list[_Copy] = []
        if not self._weights.at_standstill:
            self._prepare()

    @property
    def num_bytes(self) -> int:
        return sum(copy.target.nbytes for copy in self._copies)

    def apply(self, restore_from: WeightsSource | None = None) -> None:
        """Copy every tensor into the model. Nobody may compute meanwhile.

        If that fails, the old weights are read again from `restore_from`; without it they are kept in host memory while copying,
        which takes as much of it as the model has weights. Raises WeightsError when the old weights are in place again (or were
        never touched), and WeightsLostError when they are not.
        """
        if not self._copies:
            self._prepare()
        kept: list[tuple[Tensor, Tensor]] = []
        try:
            for copy in self._shown():
                if restore_from is None:
                    kept.append((local(copy.target), local(copy.target).to("cpu", copy=True)))
                _put(self._weights.tensor(copy.name), copy.target)
        except BaseException as error:
            self._restore(restore_from, kept, error)
            if not isinstance(error, Exception):
                raise
            raise WeightsError(f"the weights of {self.source} could not be copied, the old ones are back: {error}") from error

    def _prepare(self) -> None:
        self._copies = fit(self._weights, self._model)
        self.fingerprint = fingerprint(self._weights, [copy.name for copy in self._copies])

    def _shown(self) -> Any:
        return tqdm(self._copies, desc="Loading weights", unit="tensor", disable=not self._progress)

    def _restore(self, restore_from: WeightsSource | None, kept: Sequence[tuple[Tensor, Tensor]], error: BaseException) -> None:
        try:
            for target, old in kept:
                _put(old, target)
            if restore_from is not None:
                weights = open_weights(restore_from, self._model)
                for copy in fit(weights, self._model):
                    _put(weights.tensor(copy.name), copy.target)
        except Exception as second:
            raise WeightsLostError(f"{self.source}: {error}; then the old weights: {second}") from error


class OtherRanks(Protocol):
    """How the ranks that have no manager of their own are reached. Each method blocks, and gives their fingerprints."""

    def prepare_weights(self, source: WeightsSource) -> list[str]: ...
    def apply_weights(self, restore_from: WeightsSource | None) -> list[str]: ...


class SharedUpdate(Update):
    """New weights for all ranks of a model: checked by each of them before one of them copies."""

    def __init__(self, source: WeightsSource, model: PreTrainedModel, others: OtherRanks, *, progress: bool = False) -> None:
        super().__init__(source, model, progress=progress)
        self._others = others
        read = others.prepare_weights(source)
        if any(one != self.fingerprint for one in read):
            raise WeightsError(f"{self.source} gives other weights to other ranks; it must give the same everywhere")

    def apply(self, restore_from: WeightsSource | None = None) -> None:
        """As `Update.apply`. A rank that fails once the first has copied leaves the model without whole weights: WeightsLostError."""
        super().apply(restore_from)
        try:
            read = self._others.apply_weights(restore_from)
        except Exception as error:
            raise WeightsLostError(f"{self.source}: one rank has the new weights, another failed: {error}") from error
        if any(one != self.fingerprint for one in read):
            raise WeightsLostError(f"{self.source} gave other weights to other ranks")


def _put(value: Tensor, target: Tensor) -> None:
    """Into a tensor of the model, or into this rank's share of it."""
    with torch.no_grad():
        local(target).copy_(share_of(value, target))


def fit(weights: OpenWeights, model: PreTrainedModel) -> list[_Copy]:
    """Which tensor goes where. Raises WeightsError naming what is missing, unknown, of another shape or of another kind.

    Tensors that a model uses under several names are copied once; a source may name any of them, or all, if they are equal.
    """
    shapes, targets = weights.shapes(), {name: value.detach() for name, value in model.state_dict().items()}
    unknown = [name for name in shapes if name not in targets and not _is_recomputed(model, name)]
    wrong = [name for name, shape in shapes.items() if name in targets and tuple(targets[name].shape) != shape]
    same: dict[tuple[Any, ...], list[str]] = {}
    for name, target in targets.items():
        place = (target.device, local(target).data_ptr(), target.shape, target.stride()) if target.numel() else (name,)
        same.setdefault(place, []).append(name)
    missing = [names[0] for names in same.values() if not any(name in shapes for name in names)]
    for what, names in (("lacks", missing), ("has, and the model has not,", unknown)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise WeightsError(f"the source {what} {', '.join(names[:_SHOWN])}{more}; all weights of the model are wanted")
    if wrong:
        name = wrong[0]
        raise WeightsError(f"{name} must have the shape {tuple(targets[name].shape)}, got {shapes[name]}")
    copies: list[_Copy] = []
    for names in same.values():
        given = [name for name in names if name in shapes]
        first = weights.tensor(given[0])
        for other in given[1:]:
            if not torch.equal(first.cpu(), weights.tensor(other).cpu()):
                raise WeightsError(f"{given[0]} and {other} are one tensor in this model, and the source has two different ones")
        target = targets[given[0]]
        if first.dtype.is_floating_point != target.dtype.is_floating_point or (
            not target.dtype.is_floating_point and first.dtype != target.dtype
        ):
            raise WeightsError(f"{given[0]} must be of type {target.dtype}, got {first.dtype}")
        copies.append(_Copy(target, given[0]))
    return copies


def _is_recomputed(model: PreTrainedModel, name: str) -> bool:
    """A buffer that the model makes for itself; older checkpoints hold some."""
    return name in {buffer for buffer, _ in model.named_buffers()}
