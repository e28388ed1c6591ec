"""The model as it is called: as it stands, or compiled for steps of any shape (varlen) and for steps of single tokens (decode).

Owns the choice between the two calls. The attention function is closed to the compiler: what it reads of a step is not among the call's
arguments, so a compiled layer is two pieces with the kernels between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .inputs import Padded, StepInputs

Keywords = Sequence[tuple[str, Any]]  # of torch.compile; empty: not compiled


class Calls:
    """Two ways to call one model."""

    def __init__(self, varlen: Callable[..., Any], decode: Callable[..., Any], rehearsed: Sequence[Padded] = ()) -> None:
        self._varlen = varlen
        self._decode = decode
        self._rehearsed = list(rehearsed)

    @classmethod
    def compiled(cls, model: Any, varlen: Keywords, decode: Keywords, largest: Padded) -> Calls:
        """`torch.compile` with these keywords, where there are any; `largest`: a step to rehearse with, as one row's chunk."""
        rehearsed: list[Padded] = []
        single = Padded(largest.rows, largest.rows, largest.rows, 1)
        calls: list[Callable[..., Any]] = []
        for keywords, padded in ((varlen, Padded(largest.tokens, 1, 1, largest.width)), (decode, single)):
            calls.append(torch.compile(model, **dict(keywords)) if keywords else model)
            rehearsed += [padded] if keywords else []
        return cls(calls[0], calls[1], rehearsed)

    def of(self, inputs: StepInputs) -> Callable[..., Any]:
        """The call for a step."""
        return self._decode if inputs.ids.shape[0] == inputs.starts.shape[0] else self._varlen

    def rehearsals(self) -> list[Padded]:
        """Sizes of steps that make the compiler work before the first request does."""
        return self._rehearsed
