"""From wish to facts: the arithmetic of memory, and how the knobs that were left open are set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.config import CompileConfig, ContinuousBatchingConfig, EngineFacts, WorkloadHints
from cb_ray.errors import ConfigError, DeviceError
from cb_ray.sizing import GIB, Machine, ModelFacts, resolve

SMALL = ModelFacts(group_bytes_per_token=(1024,), activation_bytes_per_token=4096, logits_bytes_per_row=2048)
LARGE = ModelFacts(  # some 0.5 B parameters in bfloat16, a vocabulary of 150 000
    group_bytes_per_token=(24 * 2 * 2 * 64 * 2,), activation_bytes_per_token=36_352, logits_bytes_per_row=609_536
)
GPU = replace(
    LARGE, device_type="cuda", has_streams=True, has_graphs=True, has_decode_path=True, is_masked=False, page_multiple=256
)


def facts(model: ModelFacts = SMALL, free: int = GIB, hints: WorkloadHints | None = None, **wish: Any) -> EngineFacts:
    machine = Machine(free_bytes=free, free_host_bytes=wish.pop("host", free))
    return resolve(ContinuousBatchingConfig(**wish), model, machine, hints=hints, entropy=42)


@given(
    free=st.integers(40 << 20, 64 * GIB),
    model=st.sampled_from([SMALL, LARGE, GPU, replace(SMALL, group_bytes_per_token=(1024, 4096))]),
    percent=st.sampled_from([None, 0.3, 1.0]),
    blocks=st.sampled_from([None, 4, 16]),
    tokens=st.sampled_from([None, 64, 512]),
)
def test_nothing_is_spent_that_is_not_there(
    free: int, model: ModelFacts, percent: float | None, blocks: int | None, tokens: int | None
) -> None:
    """Whatever the machine and the wish: the items add up to no more than the share that may be used, or it is refused."""
    try:
        found = facts(model, free, max_memory_percent=percent, num_blocks=blocks, max_batch_tokens=tokens)
    except MemoryError:
        assert free < 2 * GIB, "there was room enough"
        return
    assert found.available_bytes <= free
    assert sum(size for _, size in found.spending) <= found.available_bytes
    assert found.num_blocks * found.page_size * model.bytes_per_token <= found.cache_bytes
    assert 1 <= found.max_requests_per_batch <= found.max_batch_tokens
    if tokens is None:
        assert found.max_batch_tokens >= 256
    if blocks is not None:
        assert found.num_blocks * found.page_size >= blocks * 256


def test_small_budgets_shrink_the_step_before_they_fail() -> None:
    """800 MB for a half-billion model used to be a ValueError; now the step shrinks and the cache keeps most of the room."""
    roomy, tight = facts(LARGE, 16 * GIB), facts(LARGE, 800 << 20)
    assert roomy.max_batch_tokens == 512 and roomy.max_requests_per_batch == 512
    assert 16 <= tight.max_requests_per_batch < 512
    assert tight.cache_bytes > tight.available_bytes // 2
    assert facts(GPU, 80 * GIB).max_batch_tokens == 8192
    assert 256 <= facts(GPU, 300 << 20).max_batch_tokens < 8192


def test_what_was_asked_for_is_given_or_refused() -> None:
    """An explicit size is never changed; where it does not fit, the error says by how much and what to change."""
    assert facts(max_batch_tokens=32, max_requests_per_batch=4, num_blocks=6, page_size=8).num_blocks == 6
    with pytest.raises(MemoryError, match="num_blocks=10000000000 of 256 tokens"):
        facts(num_blocks=10**10)
    with pytest.raises(MemoryError, match="max_batch_tokens"):
        facts(LARGE, 100 << 20, max_batch_tokens=100_000)


def test_pages_are_small_where_no_kernel_minds() -> None:
    """The default page becomes 64 tokens on a CPU, with as many tokens in num_blocks; what was chosen stays; kernels have a say."""
    assert (facts().page_size, facts(page_size=128).page_size, facts(GPU, 80 * GIB).page_size) == (64, 128, 256)
    assert facts(num_blocks=3).num_blocks == 12
    with pytest.raises(ConfigError, match="multiple of 256"):
        facts(GPU, 80 * GIB, page_size=16)


def test_groups_of_unequal_size_share_whole_sectors() -> None:
    """Sectors are the smallest size that both groups' blocks divide; the trash sector is counted."""
    model = replace(SMALL, group_bytes_per_token=(3 * 100, 2 * 100))
    found = facts(model, num_blocks=5, page_size=4)
    sector = 4 * 600
    assert found.cache_bytes % sector == 0
    assert found.num_blocks >= 5 and found.cache_bytes >= 5 * 4 * 500 + sector


def test_a_batch_known_beforehand_takes_no_more_than_it_can_fill() -> None:
    """Three short prompts do not take 60 % of a machine."""
    hints = WorkloadHints(max_prompt_length=100, max_generated_length=28, num_requests=3)
    found = facts(hints=hints)
    assert 3 * 128 <= found.num_blocks * found.page_size <= 4 * 3 * 192
    assert found.max_requests_per_batch == 3
    assert facts(hints=WorkloadHints(num_requests=5000)).max_requests_per_batch == 512
    assert facts(hints=WorkloadHints(max_prompt_length=100, num_requests=3)).num_blocks > 1000


def test_offload_space_is_bounded_by_the_memory_that_is_free() -> None:
    """Gibibytes as asked, cut to the threshold with a note; None takes what the threshold allows; a CPU pays from one purse."""
    assert facts(GPU, 80 * GIB, cpu_offload_space=1.5).cpu_offload_bytes == int(1.5 * GIB)
    cut = facts(GPU, 80 * GIB, host=2 * GIB, cpu_offload_space=8.0)
    assert cut.cpu_offload_bytes == int(1.6 * GIB) and "cpu_offload_space" in cut.notes[0]
    assert facts(GPU, 80 * GIB, host=2 * GIB, cpu_offload_space=None).cpu_offload_bytes == int(1.6 * GIB)
    assert facts(cpu_offload_space=0.5).available_bytes == int(0.5 * GIB * 0.6)


def test_what_a_device_cannot_do() -> None:
    """Overlap on a CPU is an error (also a RuntimeError, as transformers has it); graphs are a note."""
    with pytest.raises(DeviceError) as caught:
        facts(use_async_batching=True)
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, ValueError)
    found = facts(use_cuda_graph=True)
    assert not found.use_varlen_graphs and "graph" in found.notes[0]


def test_a_gpu_overlaps_and_captures_by_itself() -> None:
    """Without a mask: both graphs and overlap, unless they are switched off; asking for paddings asks for graphs."""
    found = facts(GPU, 80 * GIB)
    assert (found.use_async_batching, found.use_varlen_graphs, found.use_decode_graphs) == (True, True, True)
    off = facts(GPU, 80 * GIB, use_async_batching=False, use_cuda_graph=(False, True))
    assert (off.use_async_batching, off.use_varlen_graphs, off.use_decode_graphs) == (False, False, True)
    masked = replace(GPU, is_masked=True)
    assert not facts(masked, 80 * GIB).use_varlen_graphs
    assert facts(masked, 80 * GIB, q_padding_interval_size=32).use_varlen_graphs


def test_the_decode_table_is_as_wide_as_the_batch_needs() -> None:
    """ceil((prompt + generated) / page) + 1, made even; 32 when nothing is known; 0 without the path or when switched off."""
    hints = WorkloadHints(max_prompt_length=1000, max_generated_length=300, num_requests=4)
    assert facts(GPU, 80 * GIB, hints).max_blocks_per_request == 8
    assert facts(GPU, 80 * GIB).max_blocks_per_request == 32
    assert facts(GPU, 80 * GIB, max_blocks_per_request=0).max_blocks_per_request == 0
    assert facts(max_blocks_per_request=8).max_blocks_per_request == 0


def test_compile_levels_and_who_wins() -> None:
    """Explicit config, else the level's, else the generation config's (which used never to be looked at)."""
    card = replace(SMALL, device_type="cuda")
    modes = {level: dict(facts(card, default_compile_level=level).varlen_compile).get("mode") for level in range(4)}
    assert modes == {0: None, 1: "default", 2: "max-autotune-no-cudagraphs", 3: "max-autotune-no-cudagraphs"}
    assert dict(facts(card, default_compile_level=2, varlen_compile_config=CompileConfig(mode="x")).varlen_compile)["mode"] == "x"
    wish, machine = ContinuousBatchingConfig(), Machine(free_bytes=GIB, free_host_bytes=GIB)
    fallback = resolve(wish, card, machine, compile_fallback=CompileConfig(mode="y"))
    assert dict(fallback.varlen_compile)["mode"] == "y"
    ignored = facts(card, decode_compile_config=CompileConfig())
    assert ignored.decode_compile == () and "decode_compile_config" in ignored.notes[0]


def test_on_a_cpu_nothing_is_compiled_and_it_is_said() -> None:
    """Levels used to be facts without effect; now they are refused by name, and the engine serves all the same."""
    for wish, name in (
        ({"default_compile_level": 2}, "default_compile_level=2"),
        ({"varlen_compile_config": CompileConfig()}, "varlen_compile_config"),
    ):
        found = facts(**wish)
        assert (found.varlen_compile, found.decode_compile) == ((), ()) and name in found.notes[0]
    assert not facts(default_compile_level=0).notes


def test_margins_and_seeds() -> None:
    """Each scheduler has its own margin; a seed that is not given comes from outside, so that resolving stays pure."""
    margins = {name: facts(scheduler_type=name).safety_margin for name in ("fifo", "prefill_first", "priority")}
    assert margins == {"fifo": 0.15, "prefill_first": 0.0, "priority": 0.15}
    assert facts(safety_margin=0).safety_margin == 0.0
    assert (facts().seed, facts(seed=7).seed) == (42, 7)
    assert facts() == facts()
