"""Drives a real engine step by step without a thread, for tests of the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from cb_ray.config import ContinuousBatchingConfig
from cb_ray.engine.build import build
from cb_ray.messages import EngineStats, GenerateRequest, SamplingParams, TokenChunk, merge_chunks

GREEDY = SamplingParams(do_sample=False)


def run(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    backend: str | None = None,
    sampling: Sequence[SamplingParams] | SamplingParams = GREEDY,
    fields: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[TokenChunk], EngineStats]:
    """Each prompt's whole output, in order, and the engine's stats; laws are checked at every step."""
    parts = build(model, model.generation_config, ContinuousBatchingConfig.of(settings), backend=backend)
    core, runner = parts.core, parts.runner
    runner.install()
    chunks: dict[str, list[TokenChunk]] = {}
    try:
        for index, prompt in enumerate(prompts):
            params = sampling if isinstance(sampling, SamplingParams) else sampling[index]
            core.add(
                GenerateRequest(
                    request_id=f"r{index}", token_ids=tuple(prompt), max_new_tokens=count, sampling=params, **(fields or {})
                ),
                0.0,
            )
        while core.has_work:
            plan = core.plan(0.0)
            ticket = runner.submit(plan)
            core.commit(plan, runner.collect(ticket), 0.0)
            core.check()
            for chunk in core.take_chunks():
                chunks.setdefault(chunk.request_id, []).append(chunk)
    finally:
        runner.close()
    return [merge_chunks(chunks[f"r{index}"]) for index in range(len(prompts))], core.stats()


@torch.no_grad()
def generate(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What `model.generate` says for one prompt, greedily."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def random_prompts(lengths: Sequence[int], vocab: int = 300, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
