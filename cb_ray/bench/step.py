"""Where a step's time goes: planning, the forward pass with sampling, committing; by the number of decoding requests.

    cb-ray bench step --model demo:smollm2-135m --requests 1 8 64 --roof

Owns the measurement only. `--roof` reads a large tensor and multiplies in registers in the same run, and states what share of both a
step reaches, when it is taken to read every weight and every cached key and value once, and to multiply in the linears alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..messages import GenerateRequest, SamplingParams
from ..runtime.native import Unavailable, load

_ROOF_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """What this machine gives at best, all threads together."""

    gb_per_s: float  # read from memory
    gflop_per_s: float  # multiplied and added in registers, of the model's type

    @classmethod
    def of(cls, dtype: torch.dtype) -> Roof:
        return cls(gb_per_s=read_bandwidth(), gflop_per_s=product_peak(dtype))


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
    gflop_per_s: float  # of the linears
    roof: Roof | None
    memory_share: float | None  # of each roof; a step cannot be faster than either allows
    product_share: float | None


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


def product_peak(dtype: torch.dtype, rounds: int = 5) -> float:
    """GFLOP/s of products in registers on all of torch's threads; the best of `rounds`. 0 where there are no native kernels."""
    ops, threads, work = load(), torch.get_num_threads(), 4_000_000
    if isinstance(ops, Unavailable):
        return 0.0
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            begin = time.perf_counter()
            done = sum(pool.map(lambda _: ops.peak(dtype, work), range(threads)))
            best = max(best, done / (time.perf_counter() - begin) / 1e9)
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
    best = Roof.of(model.dtype) if roof else None
    linears = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    gb, gflop = read / total / 1e9, 2 * linears * requests / total / 1e9
    return Measured(
        requests=requests,
        context=context,
        plan_ms=plan_s * 1e3,
        device_ms=device_s * 1e3,
        commit_ms=commit_s * 1e3,
        tokens_per_s=requests / total,
        gb_per_s=gb,
        gflop_per_s=gflop,
        roof=best,
        memory_share=gb / best.gb_per_s if best else None,
        product_share=gflop / best.gflop_per_s if best and best.gflop_per_s else None,
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
        columns = f"{'GB/s':>6} {'of roof':>8} {'GFLOP/s':>8} {'of roof':>8}"
        print(f"{'requests':>9} {'plan ms':>8} {'device ms':>10} {'commit ms':>10} {'tokens/s':>9} {columns}")
    for requests in given.requests:
        row = measure(model, requests, given.context, given.steps, given.roof)
        if given.json:
            print(json.dumps(asdict(row)), flush=True)
            continue
        shares = [f"{share:.0%}" if share is not None else "-" for share in (row.memory_share, row.product_share)]
        print(
            f"{row.requests:>9} {row.plan_ms:>8.2f} {row.device_ms:>10.1f} {row.commit_ms:>10.2f} {row.tokens_per_s:>9.0f} "
            f"{row.gb_per_s:>6.1f} {shares[0]:>8} {row.gflop_per_s:>8.0f} {shares[1]:>8}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
