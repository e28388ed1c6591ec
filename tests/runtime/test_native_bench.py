"""The benchmarks of the kernels run, and check what they time."""

from __future__ import annotations

import json

import pytest
import torch

from cb_ray.bench import attention, kernels
from cb_ray.runtime.native import Unavailable, load

TINY = attention.Geometry(name="tiny", heads=4, kv_heads=2, dim=32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory and few shapes: nothing is to be learned here about speed."""
    if isinstance(load(), Unavailable):
        pytest.skip("no native kernels")
    monkeypatch.setattr(attention, "COLD_BYTES", 2**20)
    monkeypatch.setattr(attention, "ROOF_BYTES", 2**20)
    monkeypatch.setattr(kernels, "COLD_BYTES", 2**20)
    monkeypatch.setattr(kernels, "SHAPES", {"small": (64, 96)})
    monkeypatch.setattr(kernels, "VOCABULARY", 500)


@pytest.mark.parametrize("queries", [1, 20])
def test_attention_is_measured_against_torch_and_the_roof(queries: int) -> None:
    """Every combination gives a row, and the two ways are compared before they are timed."""
    rows = attention.run(geometries=[TINY], requests=[1, 3], contexts=[40, 70], queries=queries, rounds=2)
    assert [(row.requests, row.context) for row in rows] == [(1, 40), (1, 70), (3, 40), (3, 70)]
    assert all(row.native_us > 0 and row.torch_us > 0 and row.speedup > 0 and row.share > 0 for row in rows)
    assert (
        len(attention.line(rows[0]).split()) == len(attention.HEAD.replace("native us", "n").replace("torch us", "t").split()) - 1
    )


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that compares a fast wrong answer with a slow right one would be worse than none."""
    real = attention._native
    monkeypatch.setattr(attention, "_native", lambda *a: real(*a) + 1)
    with pytest.raises(AssertionError, match="differ"):
        attention.run(geometries=[TINY], requests=[1], contexts=[40], rounds=1)


def test_kernels_are_measured_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object a line: products, the MLP, and the ways of choosing a token."""
    assert kernels.main(["--rows", "1", "20", "--rounds", "1", "--json", "--dtype", "float32"]) == 0
    rows = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [row["what"] for row in rows] == ["small"] * 2 + ["gated MLP 576-1536"] * 2 + list(kernels.WISHES)
    assert all(row["native_us"] > 0 and row["torch_us"] > 0 for row in rows)


def test_an_unknown_level_is_named_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what this machine has."""
    assert attention.main(["--level", "avx10"]) == 2 and kernels.main(["--level", "avx10"]) == 2
    assert "portable" in capsys.readouterr().err and torch.get_num_threads() > 0
