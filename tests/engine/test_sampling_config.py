"""What a generation config means for a request, and what a request may say differently."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from cb_ray.engine.processors import transformers_processors
from cb_ray.engine.sampling_config import REQUEST_KEYWORDS, SamplingPolicy, token_ids
from cb_ray.errors import ConfigError, InvalidRequestError
from cb_ray.messages import SamplingParams


def policy(
    model_config: Any = None, per_request: bool = True, drop: bool = True, logprobs: bool = False, **settings: Any
) -> SamplingPolicy:
    config = GenerationConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    return SamplingPolicy(
        config, model_config, vocab_size=100, per_request=per_request, drop_unsupported=drop, return_logprobs=logprobs
    )


def test_neutral_settings_are_greedy_and_plain() -> None:
    """An empty generation config asks for nothing: greedy, no penalties, no history."""
    params = policy().params(3)
    assert params == SamplingParams(do_sample=False)
    assert params.greedy and not params.reads_history


def test_greedy_ignores_warpers() -> None:
    """do_sample=False leaves temperature, top_k, top_p and min_p neutral, also for logprobs."""
    assert policy(do_sample=False, temperature=3.0, top_k=40, top_p=0.5, min_p=0.1).base == SamplingParams(do_sample=False)


def test_every_native_setting_is_carried_over() -> None:
    """Each under our name, with transformers' meaning."""
    params = policy(
        do_sample=True,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        min_new_tokens=3,
        bad_words_ids=[[1, 2], [3]],
        suppress_tokens=[7, 200],
        sequence_bias={(8,): 1.5},
        eos_token_id=[9, -1],
        logprobs=True,
    ).base
    assert params == SamplingParams(
        do_sample=True,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=3,
        bad_words=((1, 2), (3,)),
        logit_bias=((7, -math.inf), (8, 1.5)),
        eos_token_ids=(9,),
        logprobs=0,
    )


def test_the_end_of_sequence_comes_from_the_nearest_that_names_one() -> None:
    """Request, then generation config, then model config (whose id used to be forgotten); negative ids mean never."""
    model = SimpleNamespace(eos_token_id=5)
    assert policy(model).params(1).stop_ids == {5}
    assert policy(model, eos_token_id=6).params(1).stop_ids == {6}
    assert policy(model, eos_token_id=-1).params(1).stop_ids == frozenset()
    assert policy(model, eos_token_id=6).params(1, [7, 8]).stop_ids == {7, 8}
    assert policy(model, eos_token_id=6).params(1, -1).stop_ids == frozenset()
    assert policy(model).params(1, keywords={"ignore_eos": True}).stop_ids == frozenset()


def test_min_length_counts_the_prompt() -> None:
    """As transformers has it: prompt and output together; min_new_tokens counts the output alone."""
    both = policy(min_length=10, min_new_tokens=3)
    assert [both.params(n).min_tokens for n in (2, 9, 20)] == [8, 3, 3]


def test_how_long_a_request_may_get() -> None:
    """The request's own limit, else the config's max_new_tokens, else its max_length less the prompt, else none."""
    assert policy(max_new_tokens=5).max_new_tokens(3, 0) == 0
    assert policy(max_new_tokens=5).max_new_tokens(3, np.int64(7)) == 7
    assert policy(max_new_tokens=5, max_length=9).max_new_tokens(3, None) == 5
    assert policy(max_length=9).max_new_tokens(3, None) == 6
    assert policy(max_length=9).max_new_tokens(30, None) == 0
    assert policy().max_new_tokens(3, None) is None
    for bad in (1.5, True, "3"):
        with pytest.raises(InvalidRequestError):
            policy().max_new_tokens(3, bad)


def test_a_request_may_say_it_differently() -> None:
    """Every field of SamplingParams has a keyword; numbers may be integers, arrays or tensors; None leaves it as it is."""
    own = policy(do_sample=True, temperature=0.7, top_k=50)
    params = own.params(
        3,
        keywords={
            "temperature": 1,
            "top_k": torch.tensor(0),
            "top_p": None,
            "logit_bias": {3: 1, 2: -1.0},
            "stop_token_ids": np.array([4, 5]),
            "stop_sequences": [[1, 2], (3,)],
            "bad_words": [[6]],
            "allowed_token_ids": [1, 2],
            "seed": 11,
            "logprobs": 2,
        },
    )
    assert (params.temperature, params.top_k, params.top_p, params.seed, params.logprobs) == (1, 0, 1.0, 11, 2)
    assert params.logit_bias == ((2, -1.0), (3, 1.0))
    assert (params.stop_token_ids, params.stop_sequences, params.bad_words) == ((4, 5), ((1, 2), (3,)), ((6,),))
    assert own.params(3, keywords={"temperature": 0.0}).greedy
    assert "eos_token_ids" not in REQUEST_KEYWORDS and "full_history" not in REQUEST_KEYWORDS


def test_a_temperature_asks_for_sampling() -> None:
    """On a greedy engine a request that names one is sampled (it was dropped in silence), unless it says do_sample=False."""
    greedy = policy()
    assert not greedy.params(1, keywords={"temperature": 0.5}).greedy
    assert greedy.params(1, keywords={"temperature": 0.0}).greedy
    assert greedy.params(1, keywords={"temperature": 0.5, "do_sample": False}).greedy
    assert greedy.params(1, keywords={"seed": 3}).greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tempratur", 0.5),
        ("temperature", "hot"),
        ("temperature", math.nan),
        ("temperature", -1),
        ("top_p", 0.0),
        ("top_p", 7),
        ("top_k", 5.5),
        ("min_p", 2),
        ("seed", "x"),
        ("do_sample", 1),
        ("min_tokens", 1.5),
        ("logprobs", "all"),
        ("logprobs", 99),
        ("logit_bias", 5),
        ("logit_bias", [(1,)]),
        ("stop_token_ids", ["x"]),
        ("stop_sequences", 5),
        ("repetition_penalty", 0),
    ],
)
def test_what_cannot_be_is_named(name: str, value: Any) -> None:
    """Unknown, of the wrong type, or out of range: a ValueError with the parameter."""
    with pytest.raises(InvalidRequestError) as caught:
        policy().params(1, keywords={name: value})
    assert caught.value.param == name


def test_closed_engines_say_how_to_open_them() -> None:
    """Without per_request_processors, keywords are refused; the end of sequence is nobody's processor."""
    with pytest.raises(InvalidRequestError, match="per_request_processors=True"):
        policy(per_request=False).params(1, keywords={"temperature": 0.5})
    assert policy(per_request=False).params(1, 7).stop_ids == {7}


def test_what_nothing_computes_is_never_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Dropped with a warning that names it, or refused by name; neutral values and what only renormalizes say nothing."""
    settings = {"guidance_scale": 1.5, "forced_eos_token_id": 3, "renormalize_logits": True, "num_beams": 1}
    with caplog.at_level(logging.WARNING):
        policy(**settings)
    assert "guidance_scale" in caplog.text and "forced_eos_token_id" in caplog.text and "beams" not in caplog.text
    with pytest.raises(ConfigError, match="guidance_scale"):
        policy(drop=False, **settings)
    caplog.clear()
    policy(drop=False, renormalize_logits=True, encoder_repetition_penalty=1.0, no_repeat_ngram_size=0)
    assert not caplog.records


def test_transformers_own_processors_serve_the_rest() -> None:
    """What needs the history runs before the native temperature; what must follow the temperature takes the warpers along."""
    from tests.tiny import make_model

    model = make_model("llama")

    def names(**settings: Any) -> list[str]:
        config = GenerationConfig()
        for name, value in {"do_sample": True, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.3, **settings}.items():
            setattr(config, name, value)
        return [type(processor).__name__ for processor in transformers_processors(model, config)]

    assert names() == []
    assert names(no_repeat_ngram_size=2, sequence_bias={(1, 2): 1.0}) == [
        "SequenceBiasLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
    ]
    assert names(typical_p=0.5) == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TypicalLogitsWarper"]
    assert names(typical_p=0.5, do_sample=False) == []


def test_late_processors_leave_the_native_warpers_neutral() -> None:
    """Temperature is applied once; a request cannot set one beside them."""
    late = policy(do_sample=True, temperature=0.5, top_k=3, typical_p=0.5)
    assert late.base == SamplingParams(do_sample=True, full_history=True)
    with pytest.raises(InvalidRequestError, match="typical_p"):
        late.params(1, keywords={"temperature": 0.7})
    early = policy(do_sample=True, temperature=0.5, no_repeat_ngram_size=2)
    assert early.base == SamplingParams(do_sample=True, temperature=0.5, full_history=True)


def test_token_ids_come_in_many_forms() -> None:
    """One, a list, a tensor; negative ones are left out; what is no id is an error."""
    assert token_ids(3, "x") == token_ids([3, -1], "x") == token_ids(torch.tensor([3]), "x") == (3,)
    assert token_ids(torch.tensor(3), "x") == (3,)
    for bad in ("a", [1.5], True, None):
        with pytest.raises(InvalidRequestError):
            token_ids(bad, "x")
