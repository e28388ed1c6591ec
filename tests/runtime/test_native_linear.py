"""The native products of a step's rows with a model's weights, beside torch in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from cb_ray.runtime.native import NativeOps, Unavailable, load

TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    loaded = load()
    if isinstance(loaded, Unavailable):
        pytest.skip(f"no native kernels: {loaded.reason}")
    return loaded


def levels() -> list[str]:
    loaded = load()
    return ["portable"] if isinstance(loaded, Unavailable) else list(loaded.levels)


def some(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("level", levels())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    rows=st.one_of(st.integers(0, 20), st.integers(21, 150), st.integers(500, 600)),
    depth=st.sampled_from([32, 64, 96, 576, 800]),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([128, 576, 1000])),
    dtype=st.sampled_from(TYPES),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_linear_is_a_product_a_bias_and_a_residual(
    ops: NativeOps,
    level: str,
    rows: int,
    depth: int,
    columns: int,
    dtype: torch.dtype,
    with_bias: bool,
    with_residual: bool,
    seed: int,
) -> None:
    """Any number of rows and columns; rows of the weight may lie apart."""
    x = some(rows, depth, dtype=dtype, seed=seed)
    weight = some(columns, depth + 32, dtype=dtype, seed=seed + 1, scale=depth**-0.5)[:, :depth]
    bias = some(columns, dtype=dtype, seed=seed + 2) if with_bias else None
    residual = some(rows, columns, dtype=dtype, seed=seed + 3) if with_residual else None
    with ops.at_level(level):
        got = ops.linear(x, weight, bias, residual)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected = expected + bias.double()
    if residual is not None:
        expected = expected.to(dtype).double() + residual.double()
    near(got, expected, dtype)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_three_linears_of_one_input_in_one_call(ops: NativeOps, level: str, dtype: torch.dtype, rows: int) -> None:
    """Queries, keys and values are exactly what three calls give."""
    x = some(1, rows, 64, dtype=dtype, seed=0)
    weights = [some(columns, 64, dtype=dtype, seed=columns) for columns in (96, 32, 40)]
    biases = [None, some(32, dtype=dtype, seed=5), None]
    with ops.at_level(level):
        for got, weight, bias in zip(ops.linear_qkv(x, *weights, *biases), weights, biases, strict=True):
            assert torch.equal(got, ops.linear(x, weight, bias, None))


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 70])
def test_a_gated_mlp_rounds_where_the_model_would(ops: NativeOps, level: str, dtype: torch.dtype, gelu: bool, rows: int) -> None:
    """Gate, activation and product are each rounded to the model's type, as separate operations would."""
    x = some(1, rows, 96, dtype=dtype, seed=1, scale=2.0)
    gate, up = (some(160, 96, dtype=dtype, seed=s, scale=96**-0.5) for s in (2, 3))
    down = some(72, 160, dtype=dtype, seed=4, scale=160**-0.5)
    residual = some(1, rows, 72, dtype=dtype, seed=5)
    with ops.at_level(level):
        got = ops.gated_mlp(x, gate, up, down, gelu, residual)
        assert torch.equal(ops.gated_mlp(x, gate, up, down, gelu, None) + residual, got)
    opened = functional.linear(x.double(), gate.double()).to(dtype).double()
    active = (functional.gelu(opened, approximate="tanh") if gelu else functional.silu(opened)).to(dtype).double()
    inner = (active * functional.linear(x.double(), up.double()).to(dtype).double()).to(dtype)
    near(got, functional.linear(inner.double(), down.double()).to(dtype).double() + residual.double(), dtype)


def test_an_answer_does_not_depend_on_the_number_of_threads(ops: NativeOps) -> None:
    """Columns are shared among threads; a column is always one thread's work."""
    x, weight = some(33, 128, dtype=torch.bfloat16, seed=0), some(500, 128, dtype=torch.bfloat16, seed=1)
    before, expected = torch.get_num_threads(), ops.linear(x, weight, None, None)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(ops.linear(x, weight, None, None), expected)
    finally:
        torch.set_num_threads(before)


def test_extreme_gates_are_numbers(ops: NativeOps) -> None:
    """SiLU and GELU of numbers far from zero neither overflow nor lose their sign."""
    x = torch.tensor([[-1e4, -90.0, -20.0, 20.0, 90.0, 1e4] + [0.0] * 26])
    eye = torch.eye(32)
    for gelu, act in ((False, nn.SiLU()), (True, nn.GELU(approximate="tanh"))):
        ones = torch.zeros(32, 32)
        torch.testing.assert_close(ops.gated_mlp(x, eye, ones, eye, gelu, act(x)), act(x))
        torch.testing.assert_close(
            ops.gated_mlp(x.abs().clamp(max=1) * 3, eye, eye, eye, gelu, None)[0, :6], act(torch.tensor([3.0] * 6)) * 3
        )
        got = ops.gated_mlp(torch.cat([x, torch.ones(1, 32)]), eye, torch.ones(32, 32) / 32, eye, gelu, None)
        assert got.isfinite().all()


def test_the_products_survive_torch_compile_and_refuse_what_they_cannot(ops: NativeOps) -> None:
    """Fakes agree with the kernels; a depth that is no multiple of 32 is an error with a reason."""
    x, weight = some(2, 3, 64, dtype=torch.float32, seed=0), some(96, 64, dtype=torch.float32, seed=1)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.linear, (x, weight, None, None), test_utils=utils)
    torch.library.opcheck(ops.linear_qkv, (x, weight, weight, weight, None, None, None), test_utils=utils)
    torch.library.opcheck(ops.gated_mlp, (x, weight, weight, weight.T.contiguous(), False, x), test_utils=utils)
    with pytest.raises(RuntimeError, match="multiple of 32"):
        ops.linear(x[..., :33].contiguous(), weight[:, :33], None, None)
    with pytest.raises(RuntimeError, match="type of x"):
        ops.linear(x, weight.half(), None, None)
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.linear(x.transpose(0, 1), weight, None, None)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 33), (700, 128), (0, 64), (3, 1)])
def test_norms_round_where_each_family_rounds(ops: NativeOps, level: str, dtype: torch.dtype, rows: int, width: int) -> None:
    """Llama rounds before its weight, others after it, Gemma adds one to it."""
    x, weight = some(rows, width, dtype=dtype, seed=0, scale=3.0), some(width, dtype=dtype, seed=1)
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = [weight * y.to(dtype), (weight.float() * y).to(dtype), ((1 + weight.float()) * y).to(dtype)]
    limit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]  # one unit in the last place
    with ops.at_level(level):
        for style in range(3):
            torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5, style), expected[style], rtol=limit, atol=limit)
    torch.library.opcheck(ops.rms_norm, (x, weight, 1e-5, 0), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("float_angles", [False, True])
@pytest.mark.parametrize(("rows", "width", "turned"), [(1, 64, 64), (7, 80, 20), (600, 128, 128), (3, 6, 2)])
def test_rotary_turns_halves_in_place(
    ops: NativeOps, level: str, dtype: torch.dtype, float_angles: bool, rows: int, width: int, turned: int
) -> None:
    """As transformers' rotate_half, for all of a head or its first numbers only."""
    angles = some(1, rows, turned, dtype=torch.float32, seed=3, scale=3.0)
    cos, sin = angles.cos(), angles.sin()
    if not float_angles:
        cos, sin = cos.to(dtype), sin.to(dtype)
    query, key = (some(1, rows, heads, width, dtype=dtype, seed=heads) for heads in (4, 1))
    expected = []
    for x in (query, key):
        part, rest = x[..., :turned], x[..., turned:]
        rotated = torch.cat((-part[..., turned // 2 :], part[..., : turned // 2]), -1)
        products = (part * cos[:, :, None]).to(dtype), (rotated * sin[:, :, None]).to(dtype)
        expected.append(torch.cat((products[0] + products[1], rest), -1))
    with ops.at_level(level):
        ops.rotary_(query, key, cos, sin)
    for got, wanted in zip((query, key), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)
    torch.library.opcheck(ops.rotary_, (query, key, cos, sin), test_utils=("test_schema", "test_faketensor"))


@pytest.fixture
def own_threads(ops: NativeOps) -> Iterator[None]:
    """Helper threads of our own, four of them whatever the machine."""
    before = ops.own_threads(4)
    try:
        yield
    finally:
        ops.own_threads(before)


@pytest.mark.usefixtures("own_threads")
def test_our_own_threads_give_the_same_answers(ops: NativeOps) -> None:
    """Whether helpers come, come late or not at all, and however many callers there are at once."""
    x = some(1, 70, 96, dtype=torch.bfloat16, seed=1)
    gate, up, down = (some(*shape, dtype=torch.bfloat16, seed=s) for s, shape in enumerate([(640, 96), (640, 96), (96, 640)]))
    ops.own_threads(0)
    expected = ops.gated_mlp(x, gate, up, down, False, None), ops.linear(x, gate, None, None), ops.rms_norm(x, x[0, 0], 1e-5, 0)
    ops.own_threads(4)

    def work(_: int) -> bool:
        got = ops.gated_mlp(x, gate, up, down, False, None), ops.linear(x, gate, None, None), ops.rms_norm(x, x[0, 0], 1e-5, 0)
        return all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))

    assert all(work(0) for _ in range(300))
    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(work, range(400)))


@pytest.mark.usefixtures("own_threads")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_helpers_of_its_own(ops: NativeOps) -> None:
    """A child has none of its parent's threads, and must not wait for them."""
    x, weight = some(40, 96, dtype=torch.float32, seed=1), some(640, 96, dtype=torch.float32, seed=2)
    expected = ops.linear(x, weight, None, None)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(ops.linear(x, weight, None, None), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.usefixtures("own_threads")
def test_an_error_leaves_the_helpers_in_order(ops: NativeOps) -> None:
    """After a call that fails, the next one works."""
    x, weight = some(40, 96, dtype=torch.float32, seed=1), some(640, 96, dtype=torch.float32, seed=2)
    with pytest.raises(RuntimeError, match="type of x"):
        ops.linear(x, weight.half(), None, None)
    torch.testing.assert_close(ops.linear(x, weight, None, None), x @ weight.T, rtol=1e-4, atol=1e-3)
