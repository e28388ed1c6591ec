"""CUDA graphs without CUDA: a recorder in their place, the same static buffers, poisoned between steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.engine import build as engine_build
from cb_ray.runtime import flash_kernels
from cb_ray.runtime.graphs import Graphs, Sizes, row_steps
from cb_ray.runtime.inputs import Padded, blank, unpack
from cb_ray.runtime.packed_forward import PackedForward
from tests import tiny
from tests.runtime.driving import generate, random_prompts, run
from tests.runtime.recorder import DispatchRecorder
from tests.runtime.test_flash import fake_kernels

SIZES = Sizes(varlen=True, decode=True, decode_width=2, full_width=20, max_rows=40, q_interval=16, kv_pages=4, page_size=16)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=45) | st.lists(st.just(1), min_size=1, max_size=45),
    width=st.integers(1, 24),
)
def test_a_step_is_padded_to_something_larger_that_a_graph_has(lengths: list[int], width: int) -> None:
    """Padding never cuts anything off, only single tokens are taken for single tokens, and the padded step finds its graph."""
    found = Padded(sum(lengths), len(lengths), len(lengths), width)
    padded = SIZES.padding(found)
    if padded is None:
        assert width > 20 or found.tokens > 128 or (found.tokens == found.rows and found.rows > 40)
        return
    assert padded.tokens >= found.tokens and padded.rows >= found.rows and padded.width >= width
    assert padded.rows > found.rows or padded.tokens == found.tokens, "padding tokens need a row"
    assert (padded.tokens == padded.rows) == (found.tokens == found.rows)
    assert padded.samples == padded.rows and SIZES.has(padded)
    groups = 2
    host, sizes = blank(padded, groups)
    assert len(host) + 2 * padded.tokens <= SIZES.capacity(groups)
    inputs = unpack(torch.from_numpy(host), host, sizes)
    assert sum(inputs.row_lengths) == padded.tokens and not inputs.tables.any()


def test_there_are_few_sizes() -> None:
    """A thousand requests in a step have 35 numbers of rows; the rehearsals are these, the largest first."""
    rows = sorted({row_steps(n) for n in range(1, 1025)})
    assert rows[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and rows[-2:] == [960, 1024] and len(rows) == 35
    assert [padded.rows for padded in SIZES.rehearsals()] == [40, 32, 24, 16, 8, 4, 2, 1]


# ---- engines ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> DispatchRecorder:
    """Flash kernels and graphs on the CPU; everything that a graph reads or gives is poisoned between steps."""
    made = DispatchRecorder()
    monkeypatch.setattr(flash_kernels, "reason_against", lambda name, device: None)
    monkeypatch.setattr(flash_kernels, "find", fake_kernels)
    monkeypatch.setattr(engine_build, "graph_recorder", lambda device: made)
    plain = Graphs.run

    def poisoned(self: Graphs, host, sizes, carry, compute) -> torch.Tensor:
        self.buffer.fill_(2**30)
        for kept in self._kept.values():
            kept.output.fill_(torch.nan)
        result = plain(self, host, sizes, carry, compute).clone()
        self.buffer.fill_(2**30)
        return result

    monkeypatch.setattr(Graphs, "run", poisoned)
    return made


SETTINGS = dict(page_size=16, num_blocks=60, max_batch_tokens=48, max_requests_per_batch=8, max_blocks_per_request=2)


@pytest.mark.parametrize("graphs", [(False, True), (True, True)], ids=["decode", "all"])
@pytest.mark.parametrize("family", ["qwen3", "mistral_sliding"])
def test_replays_say_what_the_model_says(family: str, graphs: tuple[bool, bool], recorder: DispatchRecorder) -> None:
    """Chunks, decodes, a request whose table is wider than the others': each pass is captured once and replayed for every step of
    its size, and tokens are `model.generate`'s.
    """
    model = tiny.make_model(family)
    prompts = random_prompts([3, 70, 20, 33, 5])
    chunks, stats = run(
        model, prompts, 12, backend="flash_attention_3", use_cuda_graph=graphs, q_padding_interval_size=16, **SETTINGS
    )
    assert [list(chunk.token_ids) for chunk in chunks] == [generate(model, prompt, 12) for prompt in prompts]
    replays = [capture.count for capture in recorder.captures]
    assert sum(replays) >= (stats.num_steps if graphs[0] else 10) and max(replays) > 2


def test_padding_rows_touch_nothing_of_others(recorder: DispatchRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows are padded to eight: whatever the padding computes goes to the trash block, and to nobody's logits."""
    written: list[torch.Tensor] = []
    plain = Graphs.run

    def watched(self: Graphs, host, sizes, carry, compute) -> torch.Tensor:
        q, b, _, _, g, _ = sizes
        inputs = unpack(torch.from_numpy(host), host, sizes)
        real = int((inputs.tables[0, :, 0] != 0).sum())
        written.append(inputs.slots[:, real:])
        assert (q, b) == (8, 8) and real == 5
        return plain(self, host, sizes, carry, compute)

    monkeypatch.setattr(Graphs, "run", watched)
    model = tiny.make_model("llama")
    prompts = random_prompts([4, 5, 6, 7, 8])
    chunks, _ = run(model, prompts, 6, backend="flash_attention_3", use_cuda_graph=(False, True), **SETTINGS)
    assert [list(chunk.token_ids) for chunk in chunks] == [generate(model, prompt, 6) for prompt in prompts]
    assert written and all(not slots.any() for slots in written)


def test_the_warm_up_captures_every_number_of_rows_and_shows_it(recorder: DispatchRecorder, capsys) -> None:
    """After it no step of single tokens has to be captured; the bar counts the captures."""
    model = tiny.make_model("llama")
    parts = engine_build.build(
        model,
        model.generation_config,
        engine_build.ContinuousBatchingConfig.of(SETTINGS | {"use_cuda_graph": (False, True)}),
        backend="flash_attention_3",
    )
    parts.runner.install()
    parts.runner.warmup(progress=True)
    assert len(recorder.captures) == 4 and "warming up: 100%" in capsys.readouterr().err
    parts.runner.close()
    assert dict(parts.facts.spending)["graphs"] > 0


def test_no_more_graphs_are_kept_than_allowed() -> None:
    """The one used longest ago goes first, unless it was used lately: then the new one is run plainly, and nothing is captured
    over and over.
    """
    recorder = DispatchRecorder()
    graphs = Graphs(SIZES, recorder, torch.device("cpu"), 1, limit=2, patience=1)

    def go(rows: int) -> float:
        host, sizes = blank(Padded(rows, rows, rows, 2), 1)
        return float(graphs.run(host, sizes, lambda inputs: None, lambda inputs: inputs.ids.float() + rows)[0])

    assert [go(1), go(2), go(1), go(4), go(1)] == [1.0, 2.0, 1.0, 4.0, 1.0]
    assert len(graphs) == 2 and [key[0] for key in graphs._kept] == [4, 1]
    assert go(2) == 2.0 and len(recorder.captures) == 4
    graphs._patience = 100
    assert go(4) == 4.0 and len(recorder.captures) == 4 and [key[0] for key in graphs._kept] == [1, 2]


def test_a_pass_that_cannot_be_captured_is_run_plainly(recorder: DispatchRecorder, monkeypatch, caplog) -> None:
    """A layer that asks the device for a number: a warning, no more graphs, the same tokens."""
    model = tiny.make_model("llama")
    plain = model.model.norm.forward

    def asks(hidden: torch.Tensor) -> torch.Tensor:
        assert float(hidden.abs().sum()) >= 0.0
        return plain(hidden)

    monkeypatch.setattr(model.model.norm, "forward", asks)
    prompts = random_prompts([4, 9])
    chunks, _ = run(model, prompts, 5, backend="flash_attention_3", use_cuda_graph=True, **SETTINGS)
    assert [list(chunk.token_ids) for chunk in chunks] == [generate(model, prompt, 5) for prompt in prompts]
    assert "steps are run without graphs from now on: RuntimeError: operation not permitted" in caplog.text


def test_what_a_graph_cannot_show_is_run_plainly(recorder: DispatchRecorder) -> None:
    """Logprobs of prompts need every token's logits, embeddings need the hidden states: such steps are no graph's."""
    from cb_ray.messages import SamplingParams

    model = tiny.make_model("llama")
    wish = SamplingParams(do_sample=False, prompt_logprobs=0)
    plain, _ = run(model, [[5, 6, 7, 8]], 3, sampling=wish, backend="sdpa", page_size=16, num_blocks=8)
    found, _ = run(model, [[5, 6, 7, 8]], 3, sampling=wish, backend="flash_attention_3", use_cuda_graph=True, **SETTINGS)
    assert found[0].token_ids == plain[0].token_ids
    assert (found[0].prompt_logprobs or ())[1:] == pytest.approx((plain[0].prompt_logprobs or ())[1:], abs=1e-4)
    embed = SamplingParams(embed=True)
    one, _ = run(model, [[5, 6, 7]], 1, sampling=embed, backend="sdpa", page_size=16, num_blocks=8)
    other, _ = run(model, [[5, 6, 7]], 1, sampling=embed, backend="flash_attention_3", use_cuda_graph=True, **SETTINGS)
    assert other[0].embedding == pytest.approx(one[0].embedding, abs=1e-4)


def test_followers_of_a_divided_model_find_the_same_graph(recorder: DispatchRecorder) -> None:
    """A packed buffer and its sizes are all a follower gets; from them alone it runs the leader's graph."""
    model = tiny.make_model("llama")
    parts = engine_build.build(
        model,
        model.generation_config,
        engine_build.ContinuousBatchingConfig.of(SETTINGS | {"use_cuda_graph": True}),
        backend="flash_attention_3",
    )
    forward: PackedForward = parts.runner._forward
    parts.runner.install()
    with torch.inference_mode():
        host, sizes = blank(Padded(4, 4, 4, 2), 1)
        forward.execute(host, sizes, False)
        forward.execute(host, sizes, False)
    parts.runner.close()
    assert [capture.count for capture in recorder.captures] == [2]
