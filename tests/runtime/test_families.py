"""Every decoder family: the way it is served is the one in the docs, and its greedy tokens are those of a recompute without cache."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

from . import families
from .driving import run

NAMES = sorted(families.listed())
pytestmark = pytest.mark.skipif(
    not families.SUITE.exists(), reason="the acceptance suite with the families is not beside the repository"
)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.collect()


def test_the_table_names_every_family() -> None:
    """A family that the acceptance suite knows stands in docs/families.md."""
    assert sorted(families.suite().FAMILIES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_family(name: str) -> None:
    """Two prompts, one in chunks, side by side: greedy tokens equal a recompute; the way is the one that the table names."""
    from cb_ray.engine.ways import find_way

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says about fused kernels that are not installed
        model = families.build(name)
        way = find_way(model, page_size=4)
        prompts = [[7, 11, 13], [(i * 29 + 5) % 300 + 3 for i in range(21)]]
        outputs, _ = run(model, prompts, 4, page_size=4, num_blocks=64, max_batch_tokens=16)
        expected = [families.suite().recompute(model, prompt, 4) for prompt in prompts]
    assert [list(output.token_ids) for output in outputs] == expected
    assert families.shown(way.name) == families.listed()[name]
