"""Where a step's time goes: planning, the forward pass with sampling, committing; by the number of decoding requests.

    cb-ray bench step --model demo:smollm2-135m --requests 1 8 64 --roof

Owns the measurement only. `--roof` reads a large tensor in the same run and states what share of that bandwidth a step reaches, when
it is taken to read every weight and every cached key and value once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..messages import GenerateRequest, SamplingParams

_ROOF_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row of the table, medians over steps."""

    requests: int
    context: int
    plan_ms: float
    device_ms: float
    commit_ms: float
    tokens_per_s: float
    gb_per_s: float  # weights, keys and values that the step has to read
    roof_gb_per_s: float | None
    roof_share: float | None


def read_bandwidth(rounds: int = 5) -> float:
    """GB/s of summing a tensor that no cache holds; the best of `rounds`.

    Of int64: torch sums other integers through a conversion, ten times slower than memory.
    """
    data = torch.ones(_ROOF_BYTES // 8, dtype=torch.int64)
    best = 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        data.sum()
        best = max(best, _ROOF_BYTES / (time.perf_counter() - begin) / 1e9)
    return best


def measure(model: Any, requests: int, context: int, steps: int, roof: bool) -> Measured:
    """Decode `steps` tokens of `requests` requests that are `context` tokens long."""
    from ..config import ContinuousBatchingConfig
    from ..engine.build import build

    wish = ContinuousBatchingConfig(
        max_requests_per_batch=requests, max_batch_tokens=max(512, requests), allow_block_sharing=False
    )
    parts = build(model, model.generation_config, wish)
    core, runner = parts.core, parts.runner
    for index in range(requests):
        ids = tuple((index * 7919 + i * 31 + 5) % parts.limits.vocab_size for i in range(context))
        core.add(GenerateRequest(request_id=str(index), token_ids=ids, sampling=SamplingParams(do_sample=False)), 0.0)
    times: list[tuple[float, float, float]] = []
    runner.install()
    try:
        while len(times) < steps:
            begin = time.perf_counter()
            plan = core.plan(0.0)
            planned = time.perf_counter()
            result = runner.collect(runner.submit(plan))
            ran = time.perf_counter()
            core.commit(plan, result, 0.0)
            core.take_chunks()
            done = time.perf_counter()
            if plan.is_decode and len(plan.rows) == requests:
                times.append((planned - begin, ran - planned, done - ran))
    finally:
        runner.close()
    plan_s, device_s, commit_s = (statistics.median(column) for column in zip(*times, strict=True))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    per_token = parts.facts.cache_bytes // max(1, (parts.facts.num_blocks + 1) * parts.facts.page_size)
    read = weights + requests * (context + steps / 2) * per_token
    total = plan_s + device_s + commit_s
    bandwidth = read_bandwidth() if roof else None
    return Measured(
        requests=requests,
        context=context,
        plan_ms=plan_s * 1e3,
        device_ms=device_s * 1e3,
        commit_ms=commit_s * 1e3,
        tokens_per_s=requests / total,
        gb_per_s=read / total / 1e9,
        roof_gb_per_s=bandwidth,
        roof_share=read / total / 1e9 / bandwidth if bandwidth else None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from transformers import AutoModelForCausalLM

    from ..engine.model_source import resolve_model

    parser = argparse.ArgumentParser(prog="cb-ray bench step", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, nargs="+", default=(1, 8, 64), metavar="N")
    parser.add_argument("--context", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--roof", action="store_true", help="measure the machine's read bandwidth in the same run")
    parser.add_argument("--json", action="store_true", help="one object per row, one a line")
    given = parser.parse_args(argv)
    path = resolve_model(given.model).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, given.dtype))
    if not given.json:
        print(f"{'requests':>9} {'plan ms':>8} {'device ms':>10} {'commit ms':>10} {'tokens/s':>9} {'GB/s':>6} {'of roof':>8}")
    for requests in given.requests:
        row = measure(model, requests, given.context, given.steps, given.roof)
        if given.json:
            print(json.dumps(asdict(row)), flush=True)
            continue
        share = f"{row.roof_share:.0%}" if row.roof_share is not None else "-"
        print(
            f"{row.requests:>9} {row.plan_ms:>8.2f} {row.device_ms:>10.1f} {row.commit_ms:>10.2f} {row.tokens_per_s:>9.0f} "
            f"{row.gb_per_s:>6.1f} {share:>8}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
