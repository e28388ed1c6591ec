"""Native products, MLPs and choosing tokens, against torch's own and against what the machine's memory gives, all in one run.

    python -m cb_ray.bench.kernels                        SmolLM2-135M's shapes, 1 to 256 rows, bfloat16

Owns the measurement only. As in a real step, weights are cold: every call reads the next of many layers' weights. Each round times
native and then torch, and what is reported are medians over rounds of ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from ..messages import SamplingParams
from ..runtime.native import NativeOps, Unavailable, load
from ..runtime.sampling import draw, warp

COLD_BYTES = 192 * 2**20
SHAPES = {
    "output 576x576": (576, 576),
    "gate and up 3072x576": (3072, 576),
    "down 576x1536": (576, 1536),
    "head 49152x576": (49152, 576),
}
VOCABULARY = 49152
WISHES = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature 1": (1.0, 0, 1.0),
    "top-p 0.9": (0.7, 0, 0.9),
    "top-k 50": (1.0, 50, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row of the table: medians over rounds."""

    what: str
    rows: int
    native_us: float
    torch_us: float
    speedup: float
    gb_per_s: float  # of weights or logits read natively
    gflop_per_s: float


def run(
    *,
    rows: Sequence[int] = (1, 4, 8, 16, 32, 64, 256),
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 7,
    report: Callable[[Measured], None] = lambda row: None,
) -> list[Measured]:
    """Measure everything; `report` hears each row as it is ready. Raises RuntimeError where there are no native kernels."""
    ops = load()
    if isinstance(ops, Unavailable):
        raise RuntimeError(f"native kernels cannot be measured: {ops.reason}")
    found: list[Measured] = []

    def note(row: Measured) -> None:
        found.append(row)
        report(row)

    with torch.inference_mode():
        for what, shape in SHAPES.items():
            for count in rows:
                note(_linear(ops, what, shape, count, dtype, rounds))
        for count in rows:
            note(_mlp(ops, count, dtype, rounds))
        for what, wish in WISHES.items():
            note(_choice(ops, what, wish, 64, dtype, rounds))
    return found


def _layers(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[list[Tensor]]:
    size = sum(n * k for n, k in shapes) * dtype.itemsize
    some = [torch.randn(n, k).to(dtype) * k**-0.5 for n, k in shapes]
    return [[weight.clone() for weight in some] for _ in range(max(2, min(200, COLD_BYTES // size)))]


def _linear(ops: NativeOps, what: str, shape: tuple[int, int], rows: int, dtype: torch.dtype, rounds: int) -> Measured:
    weights, x = cycle(_layers([shape], dtype)), torch.randn(rows, shape[1]).to(dtype)
    size, flops = shape[0] * shape[1] * dtype.itemsize, 2 * rows * shape[0] * shape[1]
    return _measure(
        what,
        rows,
        lambda: ops.linear(x, next(weights)[0], None, None),
        lambda: functional.linear(x, next(weights)[0]),
        size,
        flops,
        rounds,
    )


def _mlp(ops: NativeOps, rows: int, dtype: torch.dtype, rounds: int) -> Measured:
    shapes = [(1536, 576), (1536, 576), (576, 1536)]
    weights, x = cycle(_layers(shapes, dtype)), torch.randn(rows, 576).to(dtype)

    def own() -> Tensor:
        gate, up, down = next(weights)
        return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)

    numbers = 3 * 1536 * 576

    def native() -> Tensor:
        return ops.gated_mlp(x, *next(weights), False, None)

    return _measure("gated MLP 576-1536", rows, native, own, numbers * dtype.itemsize, 2 * rows * numbers, rounds)


def _choice(ops: NativeOps, what: str, wish: tuple[float, int, float], rows: int, dtype: torch.dtype, rounds: int) -> Measured:
    temperature, top_k, top_p = wish
    logits, numbers = (torch.randn(rows, VOCABULARY) * 4).to(dtype), torch.rand(rows, dtype=torch.float64)
    floats, integers = [torch.full((rows,), value) for value in (temperature, top_p, 0.0)], [top_k, 1]
    ks, fewest = (torch.full((rows,), value, dtype=torch.int32) for value in integers)
    params = [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)] * rows

    def own() -> Tensor:
        return draw(warp(logits.float(), params), numbers) if temperature else logits.max(-1).indices

    def native() -> Tensor:
        return ops.sample(logits, floats[0], ks, floats[1], floats[2], fewest, numbers)[1]

    return _measure(what, rows, native, own, logits.nbytes, 0, rounds)


def _clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _seconds(call: Callable[[], Tensor], count: int) -> float:
    started = _clock()
    for _ in range(count):
        call()
    return (_clock() - started) / count


def _measure(
    what: str, rows: int, native: Callable[[], Tensor], own: Callable[[], Tensor], size: int, flops: int, rounds: int
) -> Measured:
    count, slow_count = (max(1, min(200, int(0.03 / _seconds(call, 2)))) for call in (native, own))
    fast, slow = [], []
    for _ in range(rounds):
        fast.append(_seconds(native, count))
        slow.append(_seconds(own, slow_count))
    median = statistics.median(fast)
    return Measured(
        what=what,
        rows=rows,
        native_us=median * 1e6,
        torch_us=statistics.median(slow) * 1e6,
        speedup=statistics.median(s / f for s, f in zip(slow, fast, strict=True)),
        gb_per_s=size / median / 1e9,
        gflop_per_s=flops / median / 1e9,
    )


HEAD = f"{'what':22}{'rows':>6}{'native us':>12}{'torch us':>12}{'speedup':>9}{'GB/s':>7}{'GFLOP/s':>9}"


def line(row: Measured) -> str:
    """One row of the table, under HEAD."""
    text = f"{row.what:22}{row.rows:6}{row.native_us:12.1f}{row.torch_us:12.1f}"
    return text + f"{row.speedup:9.2f}{row.gb_per_s:7.1f}{row.gflop_per_s:9.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray bench kernels", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", default=(1, 4, 8, 16, 32, 64, 256))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch and of the kernels; torch's own choice if not given")
    parser.add_argument("--level", help="a plainer dispatch level of the native kernels than the machine's best")
    parser.add_argument("--json", action="store_true", help="one object per row, one a line")
    given = parser.parse_args(argv)
    if given.threads:
        torch.set_num_threads(given.threads)
    ops = load()
    if isinstance(ops, Unavailable):
        print(f"native kernels cannot be measured: {ops.reason}", file=sys.stderr)
        return 1
    level = given.level or ops.level
    if level not in ops.levels:
        print(f"--level is one of {', '.join(ops.levels)} on this machine, not {level}", file=sys.stderr)
        return 2
    if not given.json:
        print(f"level {level}, {torch.get_num_threads()} threads, {given.dtype}\n{HEAD}")
    with ops.at_level(level):
        run(
            rows=given.rows,
            dtype=getattr(torch, given.dtype),
            rounds=given.rounds,
            report=lambda row: print(json.dumps(asdict(row)) if given.json else line(row), flush=True),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
