"""Runs plans on a model. Owns the forward pass, the sampled tokens that stay on the device, and the order of device work.

Knows plans and results; no request, no scheduler, no clock. `submit` starts a step, `collect` waits for its tokens; with depth
2 the next step may be submitted before the last is collected, and takes the tokens it lacks from where the last step left them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.plan import BatchPlan, StepResult
from .attention import PagedAttention
from .attention_switch import AttentionSwitch
from .inputs import StepInputs, pack, unpack
from .kv_cache import KVCache
from .sampling import Processor, prompt_logprobs, sample


@dataclass(frozen=True, slots=True)
class Ticket:
    """A step under way."""

    plan: BatchPlan
    result: StepResult


class ModelRunner:
    """Packed execution: all rows of a step in one forward pass of batch size 1, attention over pages."""

    depth = 1

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, attention: PagedAttention, processors: Sequence[Processor] = ()
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self._switch = AttentionSwitch(model, attention.name)
        self._processors = tuple(processors)
        self._device = cache.flat.device
        self._sampled: torch.Tensor | None = None  # tokens of the last step, on the device, for the step after it
        parameters = inspect.signature(model.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters

    # ---- lifecycle ----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the model's attention on our pages. Idempotent."""
        self._switch.install()

    def restore(self) -> None:
        """Give the model its own attention back. Idempotent."""
        self._switch.restore()

    def warmup(self, progress: bool = False) -> None:
        """Nothing to prepare: eager torch code has no shapes to compile."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Give back the model's attention and the registered name."""
        self.restore()
        self._attention.close()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def submit(self, plan: BatchPlan) -> Ticket:
        """Run one step. Raises whatever the model raises; the cache's contents are then not to be trusted."""
        with torch.inference_mode():
            self._cache.move(plan)
            if not plan.rows:
                return Ticket(plan, StepResult([]))
            inputs = self._inputs(plan)
            logits = self._forward(plan, inputs)
            result = self._sample(plan, inputs, logits)
        return Ticket(plan, result)

    def collect(self, ticket: Ticket) -> StepResult:
        """The step's tokens on the host."""
        return ticket.result

    def _inputs(self, plan: BatchPlan) -> StepInputs:
        layout = self._cache.layout
        host, sizes = pack(plan, layout.page_size, len(layout.groups))
        buffer = torch.from_numpy(host)
        if self._device.type != "cpu":
            buffer = buffer.pin_memory().to(self._device, non_blocking=True)
        inputs = unpack(buffer, host, sizes)
        if len(inputs.carry_to):
            assert self._sampled is not None, "a row carries a token and there was no step before"
            inputs.ids[inputs.carry_to.long()] = self._sampled[inputs.carry_from.long()]
        return inputs

    def _forward(self, plan: BatchPlan, inputs: StepInputs) -> torch.Tensor:
        """Logits [S, V] of the last token of each sampling row, or [Q, V] when a row wants its prompt's logprobs."""
        wanted = slice(None) if self._wants_all(plan) else inputs.last.long()
        keywords: dict[str, Any] = {}
        if self._keeps_rows and not isinstance(wanted, slice):
            keywords["logits_to_keep"] = wanted if len(wanted) else torch.zeros(1, dtype=torch.int64, device=self._device)
        self._attention.begin(inputs)
        try:
            logits = self._model(
                input_ids=inputs.ids[None], position_ids=inputs.positions[None], use_cache=False, **keywords
            ).logits[0]
        finally:
            self._attention.end()
        return logits if self._keeps_rows else logits[wanted]

    @staticmethod
    def _wants_all(plan: BatchPlan) -> bool:
        return any(row.sampling.prompt_logprobs is not None and row.start < row.num_prompt - 1 for row in plan.rows)

    def _sample(self, plan: BatchPlan, inputs: StepInputs, logits: torch.Tensor) -> StepResult:
        found: dict[int, Any] = {}
        if self._wants_all(plan):
            found = self._prompt_logprobs(plan, inputs, logits)
            logits = logits[inputs.last.long()]
        indices = [index for index, row in enumerate(plan.rows) if row.samples]
        if not indices:
            return StepResult([], prompt_logprobs=found)
        result = sample(logits[: len(indices)], [plan.rows[index] for index in indices], indices, self._processors)
        self._sampled = torch.tensor(result.token_ids, dtype=torch.int32, device=self._device)
        if found:
            return StepResult(result.token_ids, result.logprobs, result.top_logprobs, found, result.errors)
        return result

    def _prompt_logprobs(self, plan: BatchPlan, inputs: StepInputs, logits: torch.Tensor) -> dict[int, Any]:
        """Per row: the logprobs of prompt tokens start + 1 …, which this step's queries predict."""
        found: dict[int, Any] = {}
        at = 0
        for index, row in enumerate(plan.rows):
            length = row.length
            count = row.sampling.prompt_logprobs
            if count is not None and row.start < row.num_prompt - 1:
                predicted = min(length, row.num_prompt - 1 - row.start)
                assert row.history is not None
                following = torch.tensor(row.history[row.start + 1 : row.start + 1 + predicted], device=logits.device)
                found[index] = prompt_logprobs(logits[at : at + predicted], following, count)
            at += length
        return found
