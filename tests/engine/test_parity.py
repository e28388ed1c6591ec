"""Parity with transformers by test, not by inheritance: names, order of parameters, defaults, fields, values."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from transformers.generation.continuous_batching import RequestStatus as TheirStatus
from transformers.generation.continuous_batching.requests import GenerationOutput as TheirOutput

from cb_ray.engine import generate
from cb_ray.engine.manager import ContinuousBatchingManager
from cb_ray.messages import GenerationOutput, RequestStatus

ENTRY_POINTS = [
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
]
METHODS = [
    "warmup",
    "is_running",
    "start",
    "stop",
    "join",
    "destroy",
    "pause",
    "add_request",
    "add_requests",
    "cancel_request",
    "get_result",
    "__iter__",
    "request_id_iter",
    "register_result_handler",
]


def positional(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names and defaults of the parameters that may be given by position, but for self or the model."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.kind in kinds][1:]


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_points_take_transformers_parameters(name: str) -> None:
    """As functions of the model, in the same order, with the same defaults."""
    ours, theirs = positional(getattr(generate, name)), positional(getattr(transformers.ContinuousMixin, name))
    assert [p for p, _ in ours] == [p for p, _ in theirs]
    different = {p: (mine, yours) for (p, mine), (_, yours) in zip(ours, theirs, strict=True) if mine != yours}
    assert not different


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_transformers_parameters(name: str) -> None:
    """In the same order, with the same defaults; what is ours is keyword-only."""
    theirs = positional(getattr(transformers.ContinuousBatchingManager, name))
    assert positional(getattr(ContinuousBatchingManager, name)) == theirs


def test_the_manager_is_made_as_transformers_makes_it() -> None:
    """Model, generation config, engine config, hints."""
    ours = [name for name, _ in positional(ContinuousBatchingManager.__init__)]
    assert ours == [name for name, _ in positional(transformers.ContinuousBatchingManager.__init__)]


def test_outputs_have_transformers_fields_first() -> None:
    """Same names, order and defaults; ours come after."""

    theirs = [f.name for f in dataclasses.fields(TheirOutput)]
    assert [f.name for f in dataclasses.fields(GenerationOutput)][: len(theirs)] == theirs
    ours, their_own = GenerationOutput("x"), TheirOutput("x")
    for name in theirs:
        if name != "created_time":
            assert getattr(ours, name) == getattr(their_own, name), name
    assert abs(ours.created_time - their_own.created_time) < 60


def test_statuses_have_transformers_values() -> None:
    """The five of transformers, and CANCELLED after them."""
    assert {status.name: status.value for status in RequestStatus} == {
        **{status.name: status.value for status in TheirStatus},
        "CANCELLED": 5,
    }
