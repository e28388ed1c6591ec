"""Runs plans: forward pass, then sampling. Owns the sampled tokens that stay on the device and the order of device work.

Knows plans and results; no request, no scheduler, no clock. `submit` starts a step, `collect` waits for its tokens; with depth
2 the next step may be submitted before the last is collected, and takes the tokens it lacks from where the last step left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from ..core.plan import BatchPlan, Row, StepResult
from ..messages import TopLogprobs
from .grammar import GrammarMasks
from .hidden_states import HiddenStates, embeddings
from .sampling import Processor, Sampled, choose_tokens, prompt_logprobs
from .streams import ComputeStream


class Forward(Protocol):
    """One way to run a plan's rows through the model."""

    def install(self) -> None: ...
    def restore(self) -> None: ...
    def reload(self) -> None: ...
    def close(self) -> None: ...
    def warmup(self, progress: bool) -> None: ...
    def run(self, plan: BatchPlan, sampled: torch.Tensor | None, every_token: bool) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A step under way."""

    plan: BatchPlan
    pending: Pending
    done: Any = None  # the device's event after the step's last copy to the host


@dataclass(frozen=True, slots=True)
class Pending:
    """What a step has sampled, perhaps still on its way to the host."""

    sampled: Sampled | None = None
    rows: Sequence[Row] = ()  # those that sample, as they were sampled
    errors: dict[int, Exception] = field(default_factory=dict[int, Exception])
    prompt_logprobs: dict[int, tuple[list[float], list[TopLogprobs]]] = field(
        default_factory=dict[int, tuple[list[float], list[TopLogprobs]]]
    )
    embeddings: dict[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])


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
    """The engine's hands: one forward pass and one sampling a step.

    With depth 2 step N + 1 may be submitted before step N is collected; on a GPU it then runs while the host takes in what N
    sampled and plans N + 2. All device work is on one stream, in the order of `submit`.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        processors: Sequence[Processor] = (),
        mode: EvalMode | None = None,
        grammars: GrammarMasks | None = None,
        hidden: HiddenStates | None = None,
        depth: int = 1,
    ) -> None:
        self.depth = depth
        self._forward = forward
        self._mode = mode
        self._device = device
        self._processors = tuple(processors)
        self._grammars = grammars
        self._hidden = hidden or HiddenStates(None)
        self._stream = ComputeStream.of(device)
        self._sampled: torch.Tensor | None = None  # tokens of the last step, on the device, for the step after it

    def install(self) -> None:
        """Make the model ready for steps. Idempotent."""
        if self._mode is not None:
            self._mode.enter()
        self._stream.begin()
        self._forward.install()

    def restore(self) -> None:
        """Give the model back as its owner knows it. Idempotent."""
        self._stream.end()
        self._forward.restore()
        if self._mode is not None:
            self._mode.leave()

    def reload(self) -> None:
        """The model's weights are others now: whatever was made from the old ones is made anew."""
        self._forward.reload()

    def warmup(self, progress: bool = False) -> None:
        """Run what compiles or captures; `progress` shows a bar."""
        with self._stream, torch.inference_mode():
            self._forward.warmup(progress)
        self._stream.synchronize()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self._stream.synchronize()

    def close(self) -> None:
        self.restore()
        self._forward.close()

    def submit(self, plan: BatchPlan) -> Ticket:
        """Start one step. Raises whatever the model raises; the cache's contents are then not to be trusted."""
        with self._stream, torch.inference_mode():
            pending = self._step(plan)
            return Ticket(plan, pending, self._stream.record())

    def collect(self, ticket: Ticket) -> StepResult:
        """The step's tokens on the host; waits for the device."""
        if ticket.done is not None:
            ticket.done.synchronize()
        pending = ticket.pending
        if pending.sampled is None:
            return StepResult([], prompt_logprobs=pending.prompt_logprobs)
        result = pending.sampled.result()
        complete: frozenset[int] = frozenset()
        if self._grammars is not None and any(row.sampling.grammar is not None for row in pending.rows):
            index_of = pending.sampled.index_of
            complete = frozenset(index_of[s] for s in self._grammars.advance(pending.rows, result.token_ids))
        return replace(
            result,
            errors={**result.errors, **pending.errors},
            complete=complete,
            prompt_logprobs=pending.prompt_logprobs,
            embeddings=pending.embeddings,
        )

    def _step(self, plan: BatchPlan) -> Pending:
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
            return Pending(prompt_logprobs=found)
        rows: Sequence[Row] = [plan.rows[index] for index in indices]
        errors: dict[int, Exception] = {}
        if self._grammars is not None and any(row.sampling.grammar is not None for row in rows):
            rows, wrong = self._grammars.apply(logits, rows)
            errors = {indices[s]: error for s, error in wrong.items()}
        sampled = choose_tokens(logits, rows, indices, self._processors)
        self._sampled = sampled.tokens.to(self._device, torch.int32)
        sampled.fetch()
        vectors: dict[int, tuple[float, ...]] = {}
        if wants_hidden:
            vectors, wrong = embeddings(seen, plan, indices)
            errors |= wrong
        return Pending(sampled, rows, errors, found, vectors)


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
