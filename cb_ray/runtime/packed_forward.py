"""One forward pass for a whole step: all rows packed into one sequence, attention over pages. Owns the packed inputs of a step.

Knows plans, the cache and a model; samples nothing. This is how every model is run whose attention layers go through
transformers' attention interface and whose other layers look at one token at a time.
"""

from __future__ import annotations

import inspect
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..core.layout import TRASH
from ..core.plan import BatchPlan
from .attention import PagedAttention
from .attention_switch import AttentionSwitch
from .compilation import Calls
from .graphs import Graphs
from .inputs import Padded, StepInputs, blank, measure, pack, unpack
from .kv_cache import KVCache
from .native.modules import NativeModules
from .orders import Orders
from .ranks import Ranks
from .streams import Staging


class PackedForward:
    """Runs plans as `model(input_ids [1, Q], position_ids [1, Q])` without a cache object."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        attention: PagedAttention,
        long_from: int = 0,
        modules: NativeModules | None = None,
        ranks: Ranks | None = None,
        orders: Orders | None = None,
        graphs: Graphs | None = None,
        calls: Calls | None = None,
    ) -> None:
        """`long_from`: requests of more tokens use the model's long-context rotary factors; 0: there are none.

        `ranks`: the model is divided among them; on the leader they learn through `orders` of everything that is done here.
        `graphs`: steps that fit one are padded to it and replayed. `calls`: the compiled model, where it is compiled.
        """
        self._model = model
        self._cache = cache
        self._attention = attention
        self._long_from = long_from
        self._modules = modules
        self._ranks = ranks
        self._orders = orders
        self._switch = AttentionSwitch(model, attention.name, everyone=calls is not None)
        self._device = cache.flat.device
        self._graphs = graphs
        self._calls = calls or Calls(model, model)
        self._staging = None if self._device.type == "cpu" else Staging(self._device, 1 << 16)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters

    def install(self) -> None:
        """Put the model's attention on our pages, and native kernels under its modules where there are any."""
        if self._orders is not None:
            self._orders.install()
        self._switch.install()
        if self._modules is not None:
            self._modules.refresh()

    def restore(self) -> None:
        """Give the model its own attention and modules back. Idempotent."""
        self._switch.restore()
        if self._modules is not None:
            self._modules.release()
        if self._orders is not None:
            self._orders.restore()

    def reload(self) -> None:
        """Weights are read where they are at each call; only copies of them in another layout would be stale."""
        if self._orders is not None:
            self._orders.reload()
        if self._modules is not None:
            self._modules.reload()

    def close(self) -> None:
        self.restore()
        self._attention.close()

    def run(self, plan: BatchPlan, sampled: torch.Tensor | None, every_token: bool) -> torch.Tensor:
        """Logits [S, V] of the sampling rows' last tokens, or [Q, V] of every token.

        `sampled` holds the tokens of the step before on the device, for rows whose last token is carried over.
        """
        self.move(plan)
        if not self._long_from:
            return self._run(plan, sampled, every_token, phantom=False)
        return self._run_by_length(plan, sampled, every_token)

    def move(self, plan: BatchPlan) -> None:
        """The plan's block copies."""
        if self._orders is not None:
            self._orders.move(plan)
        self._cache.move(plan)

    def execute(
        self,
        host: np.ndarray,
        sizes: tuple[int, ...],
        every_token: bool,
        sampled: torch.Tensor | None = None,
        *,
        plainly: bool = False,
    ) -> torch.Tensor:
        """One pass over a packed buffer (`inputs.pack`): what `run` comes to, on every rank of the model.

        A buffer of the sizes of a graph is one's, unless it is to be run `plainly`.
        """
        if self._graphs is not None and not every_token and not plainly and self._graphs.has(sizes):
            return self._graphs.run(host, sizes, lambda inputs: self._carry(inputs, sampled), lambda i: self._pass(i, False))
        buffer = torch.from_numpy(host) if self._staging is None else self._staging.send(host)
        inputs = unpack(buffer, host, sizes)
        self._carry(inputs, sampled)
        return self._pass(inputs, every_token)

    def _carry(self, inputs: StepInputs, sampled: torch.Tensor | None) -> None:
        """Fill in the tokens that the step before has sampled; on the device, known to no host."""
        if not len(inputs.carry_to):
            return
        assert sampled is not None or self._ranks is not None, "a row carries a token and there was no step before"
        if sampled is not None:
            inputs.ids[inputs.carry_to.long()] = sampled[inputs.carry_from.long()]
        if self._ranks is not None:
            self._ranks.carry(inputs.ids)

    def warmup(self, progress: bool) -> None:
        """Run a step of padding through each graph and each compiled call, the largest first."""
        rehearsals = self._calls.rehearsals() + (self._graphs.rehearsals() if self._graphs is not None else [])
        for padded in tqdm(rehearsals, desc="warming up", unit="step", disable=not progress or not rehearsals):
            self.rehearse(padded)

    def rehearse(self, padded: Padded) -> None:
        """One step of nothing but padding."""
        host, sizes = blank(padded, len(self._cache.layout.groups))
        if self._orders is not None:
            self._orders.run(host, sizes, False)
        self.execute(host, sizes, False)

    def _run_by_length(self, plan: BatchPlan, sampled: torch.Tensor | None, every_token: bool) -> torch.Tensor:
        """Rows of long and of short requests in two passes: the rotary factors follow the highest position of a pass.

        A long request's first chunk has low positions only, so a phantom token at a high one goes with it.
        """
        halves: list[list[int]] = [[], []]
        for index, row in enumerate(plan.rows):
            halves[max(row.num_prompt, row.start + row.length) > self._long_from].append(index)
        if not halves[1]:
            return self._run(plan, sampled, every_token, phantom=False)
        found: dict[int, torch.Tensor] = {}
        for phantom, indices in enumerate(halves):
            if not indices:
                continue
            part = replace(plan, rows=tuple(plan.rows[i] for i in indices), copies=(), parks=(), unparks=())
            logits = self._run(part, sampled, every_token, phantom=bool(phantom))
            counts = [row.length if every_token else int(row.samples) for row in part.rows]
            found.update(zip(indices, logits.split(counts), strict=True))
        return torch.cat([found[index] for index in range(len(plan.rows))])

    def _run(self, plan: BatchPlan, sampled: torch.Tensor | None, every_token: bool, *, phantom: bool) -> torch.Tensor:
        if phantom:
            table = array("i", [TRASH])
            first = plan.rows[0]
            row = first._replace(
                start=0, token_ids=array("i", [0]), tables=(table,) * len(first.tables), samples=False, carry_from=-1
            )
            plan = replace(plan, rows=(*plan.rows, row))
        layout = self._cache.layout
        plainly = phantom or every_token or self._graphs is None or any(row.sampling.embed for row in plan.rows)
        wanted = None if plainly or self._graphs is None else self._graphs.padding(measure(plan))
        host, sizes = pack(plan, layout.page_size, len(layout.groups), wanted)
        if phantom:
            host[2 * sizes[0] - 1] = self._long_from  # the last position
        if self._orders is not None:
            self._orders.run(host, sizes, every_token)
        logits = self.execute(host, sizes, every_token, sampled, plainly=plainly)
        if wanted is not None:
            return logits[: sum(row.samples for row in plan.rows)]
        return logits[:-1] if phantom and every_token else logits

    def _pass(self, inputs: StepInputs, every_token: bool) -> torch.Tensor:
        wanted = inputs.last.long()
        keywords: dict[str, Any] = {"position_ids": inputs.positions[None]} if self._takes_positions else {}
        if self._keeps_rows and not every_token:
            keywords["logits_to_keep"] = wanted if len(wanted) else torch.zeros(1, dtype=torch.int64, device=self._device)
        self._attention.begin(inputs)
        try:
            logits = self._calls.of(inputs)(input_ids=inputs.ids[None], use_cache=False, **keywords).logits[0]
        finally:
            self._attention.end()
        return logits[: len(wanted)] if self._keeps_rows and not every_token else logits if every_token else logits[wanted]
