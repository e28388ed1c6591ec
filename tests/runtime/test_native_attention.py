"""The native kernels beside a slow twin in plain torch, at every dispatch level of this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cb_ray.runtime.native import NativeOps, Unavailable, load

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    loaded = load()
    if isinstance(loaded, Unavailable):
        pytest.skip(f"no native kernels: {loaded.reason}")
    return loaded


def levels() -> list[str]:
    loaded = load()
    return ["portable"] if isinstance(loaded, Unavailable) else list(loaded.levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A batch: for each request (tokens in the cache, queries), and what the model looks like."""

    requests: tuple[tuple[int, int], ...]
    kv_heads: int = 1
    group: int = 1
    dk: int = 16
    dv: int = 16
    page: int = 4
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    query_type: torch.dtype = torch.float32
    cache_type: torch.dtype = torch.float32
    layers: int = 2  # pages that share a block
    spare_rows: int = 0  # rows of the query that belong to no request
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    cu_q: Tensor
    starts: Tensor
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None

    def arguments(self) -> tuple:
        return tuple(getattr(self, name) for name in self.__slots__)


def build(s: Shape) -> Case:
    """Random numbers where a request has tokens inside its window, NaN everywhere else, and block 0 as trash."""
    draw = torch.Generator().manual_seed(s.seed)
    reach = max(start + count for start, count in s.requests) + s.page
    columns = -(-reach // s.page)
    blocks = 1 + len(s.requests) * columns + 3
    block = s.layers * s.page * s.kv_heads * (s.dk + s.dv)
    flat = torch.full((7 + blocks * block,), math.nan, dtype=s.cache_type)  # an odd offset: views need not be aligned
    keys_size, strides = s.page * s.kv_heads * s.dk, (block, s.kv_heads * s.dk, s.dk, 1)
    key_cache = flat.as_strided((blocks, s.page, s.kv_heads, s.dk), strides, 7)
    value_strides = (block, s.kv_heads * s.dv, s.dv, 1)
    value_cache = flat.as_strided((blocks, s.page, s.kv_heads, s.dv), value_strides, 7 + keys_size)
    free = (torch.randperm(blocks - 1, generator=draw) + 1).tolist()
    table = torch.zeros((len(s.requests), columns), dtype=torch.int32)
    for b, (start, count) in enumerate(s.requests):
        first = max(0, start - s.window + 1) if s.window else 0
        for position in range(first, start + count):
            if table[b, position // s.page] == 0:
                table[b, position // s.page] = free.pop()
            at = int(table[b, position // s.page]), position % s.page
            key_cache[at] = torch.randn((s.kv_heads, s.dk), generator=draw).to(s.cache_type)
            value_cache[at] = torch.randn((s.kv_heads, s.dv), generator=draw).to(s.cache_type)
    counts = torch.tensor([count for _, count in s.requests])
    rows, heads = int(counts.sum()) + s.spare_rows, s.kv_heads * s.group
    query = torch.randn((heads, rows, s.dk), generator=draw).to(s.query_type).transpose(0, 1)
    return Case(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=table,
        cu_q=torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
        starts=torch.tensor([start for start, _ in s.requests], dtype=torch.int32),
        scale=1.5 * s.dk**-0.5,
        window=s.window,
        softcap=s.softcap,
        sinks=torch.randn(heads, generator=draw).to(s.query_type) if s.sinks else None,
    )


def slow_twin(c: Case) -> Tensor:
    """One query at a time, in float64."""
    rows, heads, _ = c.query.shape
    page, kv_heads = c.key_cache.shape[1:3]
    out = torch.zeros((rows, heads, c.value_cache.shape[3]), dtype=torch.float64)
    for b in range(len(c.starts)):
        for row in range(int(c.cu_q[b]), int(c.cu_q[b + 1])):
            position = int(c.starts[b]) + row - int(c.cu_q[b])
            first = max(0, position - c.window + 1) if c.window else 0
            seen = range(first, position + 1)
            slots = [(int(c.block_table[b, p // page]), p % page) for p in seen]
            keys = torch.stack([c.key_cache[slot] for slot in slots]).double()  # [seen, kv_heads, dk]
            values = torch.stack([c.value_cache[slot] for slot in slots]).double()
            for head in range(heads):
                kv = head // (heads // kv_heads)
                scores = keys[:, kv] @ c.query[row, head].double() * c.scale
                if c.softcap:
                    scores = c.softcap * torch.tanh(scores / c.softcap)
                if c.sinks is not None:
                    scores = torch.cat([scores, c.sinks[head].double().view(1)])
                weights = scores.softmax(0)[: len(slots)]
                out[row, head] = weights @ values[:, kv]
    return out


def check(ops: NativeOps, s: Shape, level: str) -> None:
    case = build(s)
    with ops.at_level(level):
        got = ops.paged_attention(*case.arguments())
    assert got.dtype == s.query_type and got.shape == (*case.query.shape[:2], s.dv)
    # A cache of fewer bits than the query is exact in the twin too: what is left is rounding of the answer, and of
    # the weights where pairs of bf16 are multiplied.
    limit = TOLERANCE[s.query_type]
    torch.testing.assert_close(got.double(), slow_twin(case), rtol=limit, atol=limit)


TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("window", [0, 37])
def test_a_mixed_batch_of_prefill_chunks_and_decodes(ops: NativeOps, level: str, dtype: torch.dtype, window: int) -> None:
    """One call serves decodes, first chunks, later chunks and a request with nothing to do."""
    requests = ((0, 1), (300, 1), (0, 70), (131, 66), (9, 0), (127, 2), (128, 1), (255, 5))
    shape = Shape(requests=requests, kv_heads=3, group=3, dk=64, dv=64, page=16, window=window, spare_rows=3)
    shape = Shape(**{name: getattr(shape, name) for name in shape.__slots__} | {"query_type": dtype, "cache_type": dtype})
    check(ops, shape, level)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    size = st.one_of(st.sampled_from([8, 16, 32, 64, 80, 128]), st.integers(1, 70))
    request = st.tuples(st.integers(0, 300), st.one_of(st.integers(0, 3), st.integers(4, 40)))
    dk = draw(size)
    return Shape(
        requests=tuple(draw(st.lists(request, min_size=1, max_size=4))),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 9, 17])),
        dk=dk,
        dv=draw(st.one_of(st.just(dk), size)),
        page=draw(st.sampled_from([1, 2, 5, 16, 32, 64])),
        window=draw(st.one_of(st.just(0), st.integers(1, 200))),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        query_type=draw(st.sampled_from(TYPES)),
        cache_type=draw(st.sampled_from(TYPES)),
        layers=draw(st.integers(1, 3)),
        spare_rows=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**20)),
    )


@pytest.mark.parametrize("level", levels())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(shape=shapes())
def test_any_shape_equals_its_slow_twin(ops: NativeOps, level: str, shape: Shape) -> None:
    """Types, page sizes, windows, softcaps, sinks, groups, head sizes and chunk positions; what may not be read is NaN."""
    check(ops, shape, level)


def mixed(**changes: object) -> Case:
    requests = ((40, 1), (0, 30), (700, 1), (1000, 9))
    return build(Shape(requests=requests, kv_heads=2, group=3, dk=32, dv=32, page=16, **changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("level", levels())
def test_an_answer_is_the_same_to_the_last_bit_whatever_the_threads_and_the_batch(ops: NativeOps, level: str) -> None:
    """How work is cut depends on a row's own past only, so no batch mate and no thread count can change a token."""
    case, before = mixed(query_type=torch.bfloat16, cache_type=torch.bfloat16), torch.get_num_threads()
    with ops.at_level(level):
        together = ops.paged_attention(*case.arguments())
        try:
            for threads in (1, 2, 7):
                torch.set_num_threads(threads)
                assert torch.equal(ops.paged_attention(*case.arguments()), together)
        finally:
            torch.set_num_threads(before)
        for b in range(len(case.starts)):
            first, end = int(case.cu_q[b]), int(case.cu_q[b + 1])
            alone = (case.block_table[b : b + 1], torch.tensor([0, end - first], dtype=torch.int32), case.starts[b : b + 1])
            arguments = (case.query[first:end], case.key_cache, case.value_cache, *alone, case.scale, 0, 0.0, None)
            assert torch.equal(ops.paged_attention(*arguments), together[first:end])


@pytest.mark.parametrize("slots_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 900])
def test_keys_and_values_are_written_to_their_slots_and_nowhere_else(ops: NativeOps, rows: int, slots_type: torch.dtype) -> None:
    """Any strides over rows and heads, few rows or so many that threads share them; all other bytes stay."""
    page, kv_heads, dk, dv = 8, 3, 40, 24
    blocks = 1 + -(-rows // page)
    item = page * kv_heads * (dk + dv)
    flat = torch.zeros(blocks * item)
    key_cache = flat.as_strided((blocks, page, kv_heads, dk), (item, kv_heads * dk, dk, 1))
    value_cache = flat.as_strided((blocks, page, kv_heads, dv), (item, kv_heads * dv, dv, 1), page * kv_heads * dk)
    key = torch.randn(kv_heads, rows, dk).transpose(0, 1)
    value = torch.randn(rows, kv_heads, dv)
    slots = torch.randperm(blocks * page)[:rows]
    expected = flat.clone()
    expected.as_strided(key_cache.shape, key_cache.stride())[slots // page, slots % page] = key
    expected.as_strided(value_cache.shape, value_cache.stride(), page * kv_heads * dk)[slots // page, slots % page] = value
    ops.write_kv(key, value, key_cache, value_cache, slots.to(slots_type))
    assert torch.equal(flat, expected)


def step(ops: NativeOps, case: Case) -> tuple[tuple, Tensor, Tensor]:
    """The case again as a step whose own keys are still to be written: (arguments, caches after it, answer)."""
    rows = int(case.cu_q[-1])
    slots, page = [], case.key_cache.shape[1]
    for b in range(len(case.starts)):
        for j in range(int(case.cu_q[b + 1] - case.cu_q[b])):
            position = int(case.starts[b]) + j
            slots.append(int(case.block_table[b, position // page]) * page + position % page)
    at = torch.tensor(slots)
    key, value = case.key_cache[at // page, at % page], case.value_cache[at // page, at % page]
    answer, full = ops.paged_attention(*case.arguments()), case.key_cache.clone()
    case.key_cache[at // page, at % page] = math.nan
    case.value_cache[at // page, at % page] = math.nan
    assert rows == len(slots)
    where = (case.key_cache, case.value_cache, at.int(), case.block_table, case.cu_q, case.starts)
    return (case.query, key, value, *where, case.scale, case.window, case.softcap, case.sinks), full, answer


def test_one_call_writes_and_attends(ops: NativeOps) -> None:
    """All rows write before any row reads."""
    arguments, keys, answer = step(ops, mixed())
    assert torch.equal(ops.write_and_attend(*arguments), answer)
    assert torch.equal(arguments[3].nan_to_num(7.0), keys.nan_to_num(7.0))


def test_the_ops_survive_torch_compile(ops: NativeOps) -> None:
    """Traced with fake tensors into one graph, with the caches changed in place; schemas and fakes agree with the kernels."""
    arguments, _, answer = step(ops, mixed())
    scaled = torch.compile(lambda *a: ops.write_and_attend(*a) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(scaled(*arguments), answer * 2)
    assert not arguments[3][arguments[5] // 16, arguments[5] % 16].isnan().any()
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.paged_attention, (arguments[0], *arguments[3:5], *arguments[6:]), test_utils=utils)
    torch.library.opcheck(ops.write_and_attend, arguments, test_utils=utils)
    torch.library.opcheck(ops.write_kv, arguments[1:6], test_utils=utils)
    torch.library.opcheck(ops.greatest, (torch.randn(3, 50),), test_utils=utils)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 3, 16, 65, 1000, 5003])
def test_the_greatest_of_a_row_is_what_torch_says(ops: NativeOps, level: str, dtype: torch.dtype, columns: int) -> None:
    """The first of equals wins; infinities are numbers; a NaN is found and reported as such."""
    rows = torch.randn(6, columns).to(dtype)
    rows[1] = -math.inf
    rows[2, columns // 2] = math.nan
    rows[3, columns // 3] = math.inf
    rows[4] = 1.0
    wide = torch.zeros(6, columns + 3, dtype=dtype)
    wide[:, :columns] = rows
    with ops.at_level(level):
        values, places = ops.greatest(wide[:, :columns])
    expected = rows.max(-1)
    assert torch.equal(places, rows.float().argmax(-1))
    torch.testing.assert_close(values, expected.values.float(), equal_nan=True, rtol=0, atol=0)


def test_wrong_arguments_are_refused_with_a_reason(ops: NativeOps) -> None:
    """A table that points outside the cache, or too few blocks, is an error and not a crash."""
    case = mixed()
    names = Case.__slots__

    def call(**changes: object) -> Tensor:
        return ops.paged_attention(*(changes.get(name, getattr(case, name)) for name in names))

    with pytest.raises(RuntimeError, match="not one of the"):
        call(block_table=case.block_table + 10_000)
    with pytest.raises(RuntimeError, match="its block table reaches"):
        call(block_table=case.block_table[:, :3].contiguous())
    with pytest.raises(RuntimeError, match="int32"):
        call(starts=case.starts.long())
    with pytest.raises(RuntimeError, match="cannot share"):
        call(query=case.query[:, :5])
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        call(query=case.query.double())
    with pytest.raises(RuntimeError, match="must be contiguous"):
        call(key_cache=case.key_cache.transpose(1, 2))
    key = torch.zeros(1, *case.key_cache.shape[2:])
    with pytest.raises(RuntimeError, match="outside the"):
        ops.write_kv(key, key, case.key_cache, case.value_cache, torch.tensor([1_000_000]))
