"""The last hidden state of a prompt, for requests that ask for an embedding instead of tokens.

Owns a watch on what goes into a model's output embeddings, which is on only in steps with such requests. Knows plans and modules;
nothing of attention: it works for every way to run a model that calls its output embeddings as a module.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..core.plan import BatchPlan
from ..errors import NotSupportedError


class HiddenStates:
    """Watches one model. `head` is the module that makes logits of hidden states; None: the model has none to watch."""

    def __init__(self, head: nn.Module | None) -> None:
        self._head = head

    @contextmanager
    def watching(self, wanted: bool) -> Generator[list[torch.Tensor]]:
        """What the head is given inside the block, call by call: [n, H] each. Nothing unless `wanted`."""
        seen: list[torch.Tensor] = []
        if self._head is None or not wanted:
            yield seen
            return

        def note(module: nn.Module, given: tuple[Any, ...]) -> None:
            seen.append(given[0].reshape(-1, given[0].shape[-1]))

        hook = self._head.register_forward_pre_hook(note)
        try:
            yield seen
        finally:
            hook.remove()


def embeddings(
    seen: Sequence[torch.Tensor], plan: BatchPlan, indices: Sequence[int]
) -> tuple[dict[int, tuple[float, ...]], dict[int, Exception]]:
    """The hidden states of those sampling rows (`indices`) that want one, at length 1, and who gets none and why, by row."""
    wanted = [index for index in indices if plan.rows[index].sampling.embed]
    if not wanted:
        return {}, {}
    found = _last_of_rows(seen, plan, indices)
    if found is None:
        reason = NotSupportedError(
            "this model gives no embeddings: its hidden states cannot be seen; ask a server with an embedding model"
        )
        return {}, dict.fromkeys(wanted, reason)
    vectors = torch.stack([found[index] for index in wanted]).float()
    vectors = nn.functional.normalize(vectors, dim=-1)
    return dict(zip(wanted, map(tuple, vectors.tolist()), strict=True)), {}


def _last_of_rows(seen: Sequence[torch.Tensor], plan: BatchPlan, indices: Sequence[int]) -> dict[int, torch.Tensor] | None:
    """The last hidden state of each sampling row, told from how many the head was given: those rows' alone, every token's, or a
    call for each row.
    """
    if len(seen) == 1 and len(seen[0]) == len(indices):
        return dict(zip(indices, seen[0], strict=True))
    if len(seen) == 1 and len(seen[0]) == plan.num_tokens:
        ends = torch.tensor([row.length for row in plan.rows]).cumsum(0) - 1
        return {index: seen[0][int(ends[index])] for index in indices}
    if len(seen) == len(plan.rows):
        return {index: seen[index][-1] for index in indices}
    return None
