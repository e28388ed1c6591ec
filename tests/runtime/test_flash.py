"""The flash backends, with kernels in plain torch in place of the packages: every path against `sdpa`."""

from __future__ import annotations

import importlib
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from cb_ray.core.layout import CacheLayout, LayerSpec
from cb_ray.engine import ways
from cb_ray.errors import UnsupportedModelError
from cb_ray.runtime import flash_kernels
from cb_ray.runtime.attention import Extras, GroupBatch, group_batches
from cb_ray.runtime.backends import EagerBackend, SdpaBackend
from cb_ray.runtime.flash_backend import FlashBackend
from cb_ray.runtime.flash_kernels import Flash2, Flash3, FlashKernels, Missing, TorchVarlen, find
from cb_ray.runtime.inputs import StepInputs
from cb_ray.runtime.kv_cache import KVCache
from cb_ray.runtime.survey import AttentionSite, survey
from tests import tiny
from tests.runtime import flash_fakes
from tests.runtime.driving import generate, random_prompts, run

SOURCES = {"flash_attention_2": flash_fakes.FLASH_2, "flash_attention_3": flash_fakes.FLASH_3, "varlen_attn": flash_fakes.TORCH}


def fake_kernels(name: str) -> FlashKernels:
    kernels = {"flash_attention_2": Flash2, "flash_attention_3": Flash3, "varlen_attn": TorchVarlen}[name](SOURCES[name], "test")
    kernels.dtypes = (torch.float32, *kernels.dtypes)
    return kernels


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three sources are there, and run on any device."""
    monkeypatch.setattr(flash_kernels, "reason_against", lambda name, device: None)
    monkeypatch.setattr(flash_kernels, "find", fake_kernels)


# ---- one layer ------------------------------------------------------------------------------------------------------------------

SHAPES = {  # (start, length) of each row, and the pages that count as short
    "decodes": ([(5, 1), (300, 1), (0, 1)], 2),
    "a chunk beside decodes": ([(300, 1), (17, 1), (3, 40), (256, 1)], 2),
    "chunks first": ([(0, 30), (250, 30), (300, 1), (9, 1)], 2),
    "one long decode": ([(10, 1), (1200, 1), (30, 1)], 2),
    "scattered": ([(10, 1), (0, 7), (1200, 1), (30, 1), (511, 5), (512, 1)], 2),
    "chunks alone": ([(0, 20), (100, 300)], 2),
    "no decode kernel": ([(10, 1), (40, 12)], 0),
}


def step_of(rows: list[tuple[int, int]], page: int, blocks: int) -> StepInputs:
    """A step with pages dealt out at random."""
    width = max(-(-(start + length) // page) for start, length in rows)
    order = (torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    tables = torch.zeros(1, len(rows), width, dtype=torch.int32)
    slots: list[int] = []
    for row, (start, length) in enumerate(rows):
        for column in range(-(-(start + length) // page)):
            tables[0, row, column] = order.pop()
        slots += [int(tables[0, row, p // page]) * page + p % page for p in range(start, start + length)]
    lengths = [length for _, length in rows]
    empty = torch.zeros(0, dtype=torch.int32)
    return StepInputs(
        ids=torch.zeros(sum(lengths), dtype=torch.int32),
        positions=empty,
        cu_q=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        starts=torch.tensor([start for start, _ in rows], dtype=torch.int32),
        last=empty,
        carry_to=empty,
        carry_from=empty,
        slots=torch.tensor([slots], dtype=torch.int32),
        tables=tables,
        row_starts=[start for start, _ in rows],
        row_lengths=lengths,
    )


@cache
def a_site() -> AttentionSite:
    return survey(tiny.make_model("llama")).sites[0]


WINDOWS_AND_CAPS = [(None, 0.0), (33, 0.0), (None, 3.0), (33, 3.0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "window", "softcap"),
    [(name, *both) for name in SOURCES for both in WINDOWS_AND_CAPS if not (both[1] and name == "varlen_attn")],
)
def test_every_call_gives_what_masks_give(name: str, window: int | None, softcap: float, shape: str, flash: None) -> None:
    """Whatever rows a step has, dividing it among kernels gives what one row after the other with a mask gives."""
    extras = Extras(0.25, softcap=softcap or None)
    rows, width = SHAPES[shape]
    page, blocks = 256, 24
    spec = LayerSpec(0, "full" if window is None else "sliding", 2, 16, 16, window)
    pages = KVCache(
        CacheLayout.sized([spec], page_size=page, itemsize=4, num_blocks=blocks), dtype=torch.float32, device=torch.device("cpu")
    )
    pages.flat.normal_(generator=torch.Generator().manual_seed(1))
    inputs = step_of(rows, page, blocks)
    query, key, value = (torch.randn(sum(inputs.row_lengths), heads, 16) for heads in (4, 2, 2))
    backend = FlashBackend(name, page)
    assert backend.reason_against(a_site(), torch.device("cpu")) is None

    def compute(by: FlashBackend | SdpaBackend | EagerBackend) -> torch.Tensor:
        batch: GroupBatch = group_batches(inputs, page, by.prepare(inputs, page, width))[0]
        return by.write_and_attend(query, key, value, pages.layers[0], batch, extras)

    expected = compute(EagerBackend() if extras.softcap else SdpaBackend())
    torch.testing.assert_close(compute(backend), expected, rtol=1e-4, atol=1e-5)


def test_a_chunk_or_a_long_request_leaves_the_decode_kernel_to_the_others(flash: None) -> None:
    """One prefill chunk and one long request have calls of their own; the short decodes share one with a narrow table."""
    rows, width = SHAPES["scattered"]
    parts = FlashBackend("flash_attention_2", 256).prepare(step_of(rows, 256, 24), 256, width)[0]
    shown = [(part.decode, part.rows.kv_lengths.tolist(), tuple(part.rows.table.shape), part.rows.max_q) for part in parts]
    assert shown == [(True, [11, 31], (2, 1), 1), (True, [1201, 513], (2, 5), 1), (False, [7, 516], (2, 3), 7)]


# ---- whole models ---------------------------------------------------------------------------------------------------------------

FAMILIES = ["qwen3", "mistral_sliding", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SOURCES)
def test_a_model_says_the_same_over_flash(name: str, family: str, flash: None) -> None:
    """Chunks, decodes, shared prefixes and windows over pages of 256 tokens: greedy tokens are `model.generate`'s."""
    model = tiny.make_model(family)
    if family == "gemma2" and name == "varlen_attn":
        with pytest.raises(UnsupportedModelError, match=r"varlen_attn: layer 0 caps its attention logits at 2, which it cannot"):
            run(model, [[1, 2, 3]], 2, backend=name)
        return
    prompts = random_prompts([3, 290, 40])
    settings = dict(page_size=256, num_blocks=12, max_batch_tokens=128, max_blocks_per_request=1)
    chunks, _ = run(model, prompts, 8, backend=name, **settings)
    assert [list(chunk.token_ids) for chunk in chunks] == [generate(model, prompt, 8) for prompt in prompts]


def test_flash_is_taken_by_itself_where_it_serves(flash: None) -> None:
    """`auto_switch_to_flash`: the newest first, sdpa where it is off, unless the model was loaded with flash attention."""
    model = tiny.make_model("llama")
    seen = survey(model)

    def names(**wish: object) -> list[str]:
        return [backend.name for backend in ways.backends_for(model, seen, 256, **wish) if backend.name != "cpu"]

    assert names() == ["flash_attention_3", "flash_attention_2", "varlen_attn"]
    assert names(flash=False) == []
    model.config._attn_implementation_internal = "flash_attention_2"
    assert names(flash=False) == ["flash_attention_2"]


def test_an_engine_takes_pages_that_its_kernel_can_read(flash: None) -> None:
    """The default page is 64 tokens, and 256 where flash attention 2 reads it; asking for 16 leaves that kernel out, by name."""
    model = tiny.make_model("llama")
    way = ways.find_way(model, 256, "flash_attention_2")
    assert (way.page_multiple, way.static, way.masked) == (256, True, False)
    with pytest.raises(
        UnsupportedModelError, match="flash_attention_2: pages of 16 tokens are asked for, and it wants a multiple"
    ):
        ways.find_way(model, 16, "flash_attention_2")
    assert ways.find_way(model, 16, "flash_attention_3").page_multiple == 1


# ---- saying why not -------------------------------------------------------------------------------------------------------------


def test_each_backend_says_why_it_cannot_serve_a_device() -> None:
    """On a CPU nothing is imported or looked for."""
    for name in flash_kernels.NAMES:
        reason = FlashBackend(name, 256).reason_against(a_site(), torch.device("cpu"))
        assert reason == "it runs on CUDA devices and the model is on cpu"


@pytest.mark.parametrize(
    ("name", "capability", "reason"),
    [
        ("flash_attention_3", (8, 0), "it is made for compute capability 9.0 (Hopper) and this device has 8.0"),
        ("flash_attention_3", (10, 0), "it is made for compute capability 9.0 (Hopper) and this device has 10.0"),
        ("flash_attention_2", (7, 5), "it is made for compute capability 8.0 (Ampere) and this device has 7.5"),
        ("flash_attention_2", (12, 0), None),
        ("varlen_attn", (9, 0), None),
    ],
)
def test_a_device_that_is_too_old_is_named(
    name: str, capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert flash_kernels.reason_against(name, torch.device("cuda")) == reason


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Modules that may be imported, by name; no other."""
    there: dict[str, object] = {}

    def load(name: str) -> object:
        if name not in there:
            raise ImportError(f"No module named {name!r}")
        return there[name]

    monkeypatch.setattr(importlib, "import_module", load)
    return there


def test_a_missing_package_is_named(no_packages: dict[str, object]) -> None:
    found = find("flash_attention_2")
    assert isinstance(found, Missing)
    assert found.reason == ("flash_attn: No module named 'flash_attn'; kernels-community/flash-attn2: No module named 'kernels'")


def test_the_hub_loader_stands_in_for_a_package(no_packages: dict[str, object]) -> None:
    """`kernels` is asked for the version that transformers names, where it names one."""
    asked: list[tuple[object, ...]] = []

    def get_kernel(repository: str, **wish: object) -> object:
        asked.append((repository, wish))
        return flash_fakes.FLASH_2

    no_packages["kernels"] = SimpleNamespace(get_kernel=get_kernel)
    no_packages["transformers.modeling_flash_attention_utils"] = SimpleNamespace(
        FLASH_ATTN_KERNEL_VERSIONS={"kernels-community/flash-attn2": 4}
    )
    found = find("flash_attention_2")
    assert isinstance(found, Flash2) and found.origin == "kernels-community/flash-attn2"
    assert asked == [("kernels-community/flash-attn2", {"version": 4})]


def test_functions_without_block_tables_are_no_source(no_packages: dict[str, object]) -> None:
    """What a source can do is read off its signatures: an old package, an old torch."""
    no_packages["flash_attn"] = SimpleNamespace(
        flash_attn_varlen_func=lambda q, k, v: q, flash_attn_with_kvcache=lambda q, k_cache, v_cache: q
    )
    no_packages["torch.nn.attention.varlen"] = SimpleNamespace(varlen_attn=lambda query, key, value, *, scale=None: query)
    for name, said in (("flash_attention_2", "take no block_table"), ("varlen_attn", "takes no block_table")):
        found = find(name)
        assert isinstance(found, Missing) and said in found.reason


def test_torchs_own_function_is_a_source_here() -> None:
    """The installed torch's varlen_attn takes a block table."""
    assert isinstance(find("varlen_attn"), TorchVarlen)


def test_sinks_only_where_the_function_takes_them(flash: None) -> None:
    """vLLM's flash attention 3 takes a logit per head that has no value; the answer is the reference's."""
    kernels = fake_kernels("flash_attention_3")
    assert kernels.sinks and not fake_kernels("flash_attention_2").sinks
    rows, width = SHAPES["scattered"]
    spec = LayerSpec(0, "full", 2, 16, 16)
    pages = KVCache(
        CacheLayout.sized([spec], page_size=16, itemsize=4, num_blocks=400), dtype=torch.float32, device=torch.device("cpu")
    )
    pages.flat.normal_()
    inputs = step_of(rows, 16, 400)
    query, key, value = (torch.randn(sum(inputs.row_lengths), heads, 16) for heads in (4, 2, 2))
    extras = Extras(0.25, sinks=torch.randn(4))
    backend = FlashBackend("flash_attention_3", 16)
    assert backend.reason_against(a_site(), torch.device("cpu")) is None
    found, expected = (
        by.write_and_attend(
            query, key, value, pages.layers[0], group_batches(inputs, 16, by.prepare(inputs, 16, width))[0], extras
        )
        for by in (backend, EagerBackend())
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
