"""Native attention against gathering and torch's own, and against what the machine's memory gives, all in one run.

    python -m cb_ray.bench.attention                      decode: 1, 8, 64 requests of 128, 512, 2048 tokens, two geometries
    python -m cb_ray.bench.attention --prefill            chunks of 512 tokens instead

Owns the measurement only. Each round times native, then torch, then a plain sum over a big tensor, and what is reported are
medians over rounds of ratios within a round: foreign load that comes and goes hits all three. As in a real step, memory is cold:
every call reads another layer of a cache that is larger than any processor cache, and the pages of a request lie scattered.
With one thread its own processor time is taken, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..runtime.native import NativeOps, Unavailable, advise_huge_pages, load

COLD_BYTES = 192 * 2**20
ROOF_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What attention knows of a model."""

    name: str
    heads: int
    kv_heads: int
    dim: int


SMOLLM2 = Geometry(name="SmolLM2-135M", heads=9, kv_heads=3, dim=64)
LLAMA_8B = Geometry(name="Llama-8B", heads=32, kv_heads=8, dim=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row of the table. Times are of one layer, medians over rounds."""

    geometry: str
    requests: int
    queries: int  # of each request
    context: int  # tokens each request sees at its last query
    native_us: float
    torch_us: float
    speedup: float  # torch / native, median over rounds
    gb_per_s: float  # keys and values read by native attention
    gflop_per_s: float
    roof_gb_per_s: float  # a plain sum over a big tensor
    share: float  # of the roof, median over rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    query: Tensor
    layers: list[_Layer]
    table: Tensor
    cu_q: Tensor
    starts: Tensor
    context: int


def run(
    *,
    geometries: Sequence[Geometry] = (SMOLLM2, LLAMA_8B),
    requests: Sequence[int] = (1, 8, 64),
    contexts: Sequence[int] = (128, 512, 2048),
    queries: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 16,
    huge_pages: bool = True,
    rounds: int = 7,
    report: Callable[[Measured], None] = lambda row: None,
) -> list[Measured]:
    """Measure every combination; `report` hears each row as it is ready. Raises RuntimeError where there are no native kernels."""
    ops = load()
    if isinstance(ops, Unavailable):
        raise RuntimeError(f"native attention cannot be measured: {ops.reason}")
    big = torch.ones(ROOF_BYTES // 4)  # ones, not zeros: untouched pages of zeros are all the same page
    rows: list[Measured] = []
    with torch.inference_mode():
        for geometry in geometries:
            for count in requests:
                for context in contexts:
                    step = _make(geometry, count, max(context, queries), queries, dtype, page_size, huge_pages)
                    rows.append(_measure(ops, geometry, step, big, rounds))
                    report(rows[-1])
    return rows


def _make(g: Geometry, requests: int, context: int, queries: int, dtype: torch.dtype, page: int, huge: bool) -> _Step:
    columns = -(-context // page)
    blocks, item = 1 + requests * columns, page * g.kv_heads * g.dim
    layers = max(1, min(400, COLD_BYTES // (2 * requests * columns * item * dtype.itemsize) + 1))
    block = layers * 2 * item
    flat = torch.empty(blocks * block, dtype=dtype)
    if huge:
        advise_huge_pages(flat)
    some = torch.randn(2**20).to(dtype)
    for at in range(0, len(flat), len(some)):
        flat[at : at + len(some)] = some[: len(flat) - at]
    shape, strides = (blocks, page, g.kv_heads, g.dim), (block, g.kv_heads * g.dim, g.dim, 1)

    def pages(offset: int) -> Tensor:
        return flat.as_strided(shape, strides, offset)

    return _Step(
        query=torch.randn(requests * queries, g.heads, g.dim).to(dtype),
        layers=[_Layer(keys=pages(2 * i * item), values=pages((2 * i + 1) * item)) for i in range(layers)],
        table=(torch.randperm(blocks - 1) + 1).view(requests, columns).int(),
        cu_q=torch.arange(0, requests * queries + 1, queries).int(),
        starts=torch.full((requests,), context - queries, dtype=torch.int32),
        context=context,
    )


def _native(ops: NativeOps, step: _Step, layer: _Layer) -> Tensor:
    scale = step.query.shape[-1] ** -0.5
    where = (layer.keys, layer.values, step.table, step.cu_q, step.starts)
    return ops.paged_attention(step.query, *where, scale, 0, 0.0, None)


def _torch(step: _Step, layer: _Layer) -> Tensor:
    requests = len(step.starts)
    queries = len(step.query) // requests
    mask = None
    if 1 < queries < step.context:
        mask = torch.ones(queries, step.context, dtype=torch.bool).tril(step.context - queries)
    answers = []
    for b in range(requests):
        blocks = step.table[b].long()
        keys = layer.keys[blocks].flatten(0, 1)[: step.context].transpose(0, 1)
        values = layer.values[blocks].flatten(0, 1)[: step.context].transpose(0, 1)
        query = step.query[b * queries : (b + 1) * queries].transpose(0, 1)
        causal = 1 < queries == step.context
        answer = scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, is_causal=causal, enable_gqa=True
        )
        answers.append(answer[0].transpose(0, 1))
    return torch.cat(answers)


def _clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _seconds(call: Callable[[_Layer], Tensor], layers: Iterator[_Layer], count: int) -> float:
    started = _clock()
    for _ in range(count):
        call(next(layers))
    return (_clock() - started) / count


def _measure(ops: NativeOps, g: Geometry, step: _Step, big: Tensor, rounds: int) -> Measured:
    def around() -> Iterator[_Layer]:
        while True:
            yield from step.layers

    layers, slow_layers = around(), around()
    first = step.layers[0]
    worst = (_native(ops, step, first).float() - _torch(step, first).float()).abs().max().item()
    assert worst < 0.05, f"native and torch differ by {worst}"
    count = len(step.layers)
    slow_count = max(1, min(count, int(0.05 / _seconds(lambda layer: _torch(step, layer), slow_layers, 1))))
    requests, queries = len(step.starts), len(step.query) // len(step.starts)
    read = 2 * requests * step.context * g.kv_heads * g.dim * first.keys.element_size()
    seen = requests * sum(range(step.context - queries + 1, step.context + 1))
    fast, slow, roof = [], [], []
    for _ in range(rounds):
        fast.append(_seconds(lambda layer: _native(ops, step, layer), layers, count))
        slow.append(_seconds(lambda layer: _torch(step, layer), slow_layers, slow_count))
        started = _clock()
        big.sum()
        roof.append(big.nbytes / (_clock() - started))
    median = statistics.median
    return Measured(
        geometry=g.name,
        requests=requests,
        queries=queries,
        context=step.context,
        native_us=median(fast) * 1e6,
        torch_us=median(slow) * 1e6,
        speedup=median(s / f for s, f in zip(slow, fast, strict=True)),
        gb_per_s=read / median(fast) / 1e9,
        gflop_per_s=4 * seen * g.heads * g.dim / median(fast) / 1e9,
        roof_gb_per_s=median(roof) / 1e9,
        share=median(read / f / r for f, r in zip(fast, roof, strict=True)),
    )


HEAD = f"{'geometry':14}{'requests':>9}{'queries':>8}{'context':>8}{'native us':>11}{'torch us':>11}"
HEAD += f"{'speedup':>9}{'GB/s':>7}{'GFLOP/s':>9}{'roof GB/s':>11}{'share':>7}"


def line(row: Measured) -> str:
    """One row of the table, under HEAD."""
    text = f"{row.geometry:14}{row.requests:9}{row.queries:8}{row.context:8}{row.native_us:11.1f}{row.torch_us:11.1f}"
    return text + f"{row.speedup:9.1f}{row.gb_per_s:7.1f}{row.gflop_per_s:9.1f}{row.roof_gb_per_s:11.1f}{row.share:7.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray bench attention", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--prefill", action="store_true", help="chunks of 512 tokens at the end of their context, not decodes")
    parser.add_argument("--requests", type=int, nargs="+", metavar="N")
    parser.add_argument("--contexts", type=int, nargs="+", metavar="TOKENS")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--small-pages", action="store_true", help="do not ask the system for large memory pages")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch; its own choice if not given")
    parser.add_argument("--level", help="a plainer dispatch level of the native kernels than the machine's best")
    parser.add_argument("--json", action="store_true", help="one object per row, one a line")
    given = parser.parse_args(argv)
    if given.threads:
        torch.set_num_threads(given.threads)
    ops = load()
    if isinstance(ops, Unavailable):
        print(f"native attention cannot be measured: {ops.reason}", file=sys.stderr)
        return 1
    level = given.level or ops.level
    if level not in ops.levels:
        print(f"--level is one of {', '.join(ops.levels)} on this machine, not {level}", file=sys.stderr)
        return 2
    if not given.json:
        print(f"level {level}, {torch.get_num_threads()} threads, {given.dtype}, pages of {given.page_size} tokens\n{HEAD}")
    with ops.at_level(level):
        run(
            requests=given.requests or ((1, 8) if given.prefill else (1, 8, 64)),
            contexts=given.contexts or ((512, 2048) if given.prefill else (128, 512, 2048)),
            queries=512 if given.prefill else 1,
            dtype=getattr(torch, given.dtype),
            page_size=given.page_size,
            huge_pages=not given.small_pages,
            rounds=given.rounds,
            report=lambda row: print(json.dumps(asdict(row)) if given.json else line(row), flush=True),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
