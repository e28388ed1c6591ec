"""Runs plans: forward pass, then sampling. Owns the sampled tokens that stay on the device and the order of device work.

Knows plans and results; no request, no scheduler, no clock. `submit` starts a step, `collect` waits for its tokens; with depth
2 the next step may be submitted before the last is collected, and takes the tokens it lacks from where the last step left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from ..core.plan import BatchPlan, StepResult
from ..messages import TopLogprobs
from .grammar import GrammarMasks
from .hidden_states import HiddenStates, embeddings
from .sampling import Processor, prompt_logprobs, sample


class Forward(Protocol):
    """One way to run a plan's rows through the model."""

    def install(self) -> None: ...
    def restore(self) -> None: ...
    def reload(self) -> None: ...
    def close(self) -> None: ...
    def run(self, plan: BatchPlan, sampled: torch.Tensor | None, every_token: bool) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A step under way."""

    plan: BatchPlan
    result: StepResult


class EvalMode:
    """Dropout and the like are off between `enter` and `leave`; modules that were training before are training again after."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._training: list[nn.Module] | None = None

    def enter(self) -> None:
        """Idempotent."""
        if self._training is None:
            self._training = [module for module in self._model.modules() if module.training]
            self._model.eval()

    def leave(self) -> None:
        """Idempotent."""
        for module in self._training or ():
            module.training = True
        self._training = None


class ModelRunner:
    """The engine's hands: one forward pass and one sampling a step."""

    depth = 1

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        processors: Sequence[Processor] = (),
        mode: EvalMode | None = None,
        grammars: GrammarMasks | None = None,
        hidden: HiddenStates | None = None,
    ) -> None:
        self._forward = forward
        self._mode = mode
        self._device = device
        self._processors = tuple(processors)
        self._grammars = grammars
        self._hidden = hidden or HiddenStates(None)
        self._sampled: torch.Tensor | None = None  # tokens of the last step, on the device, for the step after it

    def install(self) -> None:
        """Make the model ready for steps. Idempotent."""
        if self._mode is not None:
            self._mode.enter()
        self._forward.install()

    def restore(self) -> None:
        """Give the model back as its owner knows it. Idempotent."""
        self._forward.restore()
        if self._mode is not None:
            self._mode.leave()

    def reload(self) -> None:
        """The model's weights are others now: whatever was made from the old ones is made anew."""
        self._forward.reload()

    def warmup(self, progress: bool = False) -> None:
        """Nothing to prepare: eager torch code has no shapes to compile."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self.restore()
        self._forward.close()

    def submit(self, plan: BatchPlan) -> Ticket:
        """Run one step. Raises whatever the model raises; the cache's contents are then not to be trusted."""
        with torch.inference_mode():
            return Ticket(plan, self._step(plan))

    def collect(self, ticket: Ticket) -> StepResult:
        """The step's tokens on the host."""
        return ticket.result

    def _step(self, plan: BatchPlan) -> StepResult:
        if self._grammars is not None:
            self._grammars.forget(plan.released)
        shown = any(row.sampling.prompt_logprobs is not None and row.start < row.num_prompt - 1 for row in plan.rows)
        indices = [index for index, row in enumerate(plan.rows) if row.samples]
        wants_hidden = any(plan.rows[index].sampling.embed for index in indices)
        with self._hidden.watching(wants_hidden) as seen:
            logits = self._forward.run(plan, self._sampled, shown)
        found: dict[int, tuple[list[float], list[TopLogprobs]]] = {}
        if shown:
            found = _of_prompts(plan, logits)
            ends = torch.tensor([row.length for row in plan.rows]).cumsum(0) - 1
            logits = logits[ends[indices].to(logits.device)]
        if not indices:
            return StepResult([], prompt_logprobs=found)
        result = self._sample(logits, plan, indices)
        self._sampled = torch.tensor(result.token_ids, dtype=torch.int32, device=self._device)
        if wants_hidden:
            vectors, wrong = embeddings(seen, plan, indices)
            result = replace(result, embeddings=vectors, errors={**result.errors, **wrong})
        return replace(result, prompt_logprobs=found) if found else result

    def _sample(self, logits: torch.Tensor, plan: BatchPlan, indices: Sequence[int]) -> StepResult:
        """Choose the tokens of the rows `indices` of the plan: logits [S, V], one row for each."""
        rows = [plan.rows[index] for index in indices]
        grammars = self._grammars
        if grammars is None or not any(row.sampling.grammar is not None for row in rows):
            return sample(logits, rows, indices, self._processors)
        rows, wrong = grammars.apply(logits, rows)
        result = sample(logits, rows, indices, self._processors)
        complete = grammars.advance(rows, result.token_ids)
        errors = {**result.errors, **{indices[s]: error for s, error in wrong.items()}}
        return replace(result, errors=errors, complete=frozenset(indices[s] for s in complete))


def _of_prompts(plan: BatchPlan, logits: torch.Tensor) -> dict[int, tuple[list[float], list[TopLogprobs]]]:
    """Per row: the logprobs of prompt tokens start + 1 …, which this step's queries predict. `logits` [Q, V]."""
    found: dict[int, tuple[list[float], list[TopLogprobs]]] = {}
    at = 0
    for index, row in enumerate(plan.rows):
        count = row.sampling.prompt_logprobs
        if count is not None and row.start < row.num_prompt - 1:
            assert row.history is not None
            predicted = min(row.length, row.num_prompt - 1 - row.start)
            following = torch.tensor(row.history[row.start + 1 : row.start + 1 + predicted], device=logits.device)
            found[index] = prompt_logprobs(logits[at : at + predicted], following, count)
        at += row.length
    return found
