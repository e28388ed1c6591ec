"""Grammars as values: the ways to write one, equality, and what stays at home when one travels."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from cb_ray import Grammar
from cb_ray.errors import InvalidRequestError
from cb_ray.messages import SamplingParams


def test_equal_text_is_one_grammar() -> None:
    """Whoever asks, and however the schema was spaced: an engine compiles it once."""
    one = Grammar.json_schema('{"type":   "object"}', param="response_format")
    assert one == Grammar.json_schema({"type": "object"}) == Grammar.json_object()
    assert hash(one) == hash(Grammar.json_object())
    assert one != Grammar.json_schema({"type": "object"}, lenient=True)


def test_the_order_of_properties_is_kept() -> None:
    """Properties are written in the order of the schema, so the order is part of it."""
    first, second = ({"properties": {a: True, b: True}} for a, b in ("xy", "yx"))
    assert Grammar.json_schema(first) != Grammar.json_schema(second)


def test_what_was_compiled_stays_in_its_process() -> None:
    """A request that goes to another replica carries text, and equality never looks at what an engine made of it."""
    compiled = replace(Grammar.regex("a+", param="response_format"), compiled=object())
    arrived = pickle.loads(pickle.dumps(compiled))
    assert arrived == compiled and arrived.param == "response_format" and arrived.compiled is None
    assert replace(arrived, compiled=1) == arrived


def test_a_class_with_a_schema() -> None:
    """A pydantic model is taken as it is."""
    pydantic = pytest.importorskip("pydantic")
    colour = pydantic.create_model("Colour", name=(str, ...))
    assert '"required": ["name"]' in Grammar.json_schema(colour).text


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ({"json_schema": {"type": "integer"}}, "json_schema"),
        ({"json_object": True}, "json_schema"),
        ({"regex": "a|b"}, "regex"),
        ({"choice": ["yes", "no"]}, "lark"),
        ({"lark": 'start: "a"'}, "lark"),
        ({"kind": "regex", "text": "a"}, "regex"),
    ],
)
def test_the_ways_to_write_one(written: dict[str, Any], kind: str) -> None:
    """What a handle call may send instead of a Grammar."""
    assert Grammar.of(written).kind == kind


@pytest.mark.parametrize(
    "written",
    [
        7,
        {},
        {"regexp": "a"},
        {"regex": "a", "choice": ["b"]},
        {"regex": ""},
        {"regex": 5},
        {"choice": []},
        {"choice": [""]},
        {"json_schema": "{"},
        {"json_schema": [1]},
        {"json_schema": {"enum": [float("nan")]}},
        {"kind": "xml", "text": "a"},
        {"kind": "regex", "text": "a", "flags": "i"},
    ],
)
def test_what_is_no_grammar_is_refused_by_name(written: Any) -> None:
    """The error names what the request called it."""
    with pytest.raises(InvalidRequestError) as caught:
        Grammar.of(written, param="response_format")
    assert caught.value.param == "response_format"


def test_sampling_with_a_grammar_reads_history() -> None:
    """What may come next depends on all that came, but no score is weighed by it."""
    params = SamplingParams(grammar=Grammar.json_object())
    assert params.reads_history and not params.weighs_history
    with pytest.raises(InvalidRequestError, match="grammar"):
        SamplingParams(grammar="a+")
