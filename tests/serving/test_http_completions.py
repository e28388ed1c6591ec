"""/v1/completions: prompts in four forms, echoes, scores, and the numbering of choices."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as params

from cb_ray.serving.completions_dialect import DEFAULT_MAX_TOKENS, CompletionsBody
from tests.serving.doors import error_of, events, make_door

SAYS = "Hello, 🎉 world"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([70, 71], [[70, 71]]),
        ([[70, 71], [72]], [[70, 71], [72]]),
    ],
)
def test_forms_of_prompts(prompt: Any, prompts: list[Any]) -> None:
    """A string, token ids, and lists of either: one choice each, in order, and each prompt counts once."""
    door = make_door()
    body = door.complete(prompt, max_tokens=40).json()
    want = [door.model.codec.encode(one) if isinstance(one, str) else one for one in prompts]
    assert [list(request.token_ids) for request in door.source.requests] == want
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(i, SAYS) for i in range(len(prompts))]
    assert body["usage"]["prompt_tokens"] == sum(map(len, want))
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")


def test_the_default_length_is_openais() -> None:
    """Without max_tokens a completion has 16 tokens, as OpenAI documents."""
    door = make_door()
    body = door.complete(ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == door.source.requests[0].max_new_tokens == DEFAULT_MAX_TOKENS == 16


@pytest.mark.parametrize("prompt", ["Dogs 🎉 say", [70, 71]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(prompt: Any, stream: bool) -> None:
    """echo puts the prompt before the answer, to the letter, plain and streamed."""
    door = make_door()
    response = door.complete(prompt, echo=True, stream=stream, max_tokens=40)
    choices = [choice for event in events(response) for choice in event["choices"]] if stream else response.json()["choices"]
    begins = prompt if isinstance(prompt, str) else door.model.codec.decode(prompt)
    assert "".join(choice["text"] for choice in choices) == begins + SAYS


def test_n_choices_of_several_prompts() -> None:
    """With n, choices are numbered prompt by prompt, and only copies of one prompt may share its pages."""
    door = make_door()
    body = door.complete(["a", "b"], n=2, best_of=2, stream=False).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    ids = [request.request_id for request in door.source.requests]
    assert [request.fork_of for request in door.source.requests] == [None, ids[0], None, ids[2]]


def test_log_probabilities() -> None:
    """tokens, token_logprobs, top_logprobs and text_offset, one entry per token; pieces of a character have names apart."""
    body = make_door().complete(max_tokens=40, logprobs=2).json()
    logs = body["choices"][0]["logprobs"]
    assert {len(part) for part in logs.values()} == {body["usage"]["completion_tokens"] - 1}
    pieces = [token for token in logs["tokens"] if token.startswith("bytes:")]
    assert pieces == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x8e", "bytes:\\x89"]
    for token, offset, top in zip(logs["tokens"], logs["text_offset"], logs["top_logprobs"], strict=True):
        assert len(top) == 2 and top[token] == -0.5
        assert token in pieces or SAYS[offset:].startswith(token)


def test_a_prompt_is_scored() -> None:
    """echo with max_tokens 0 and logprobs gives each prompt token's log-probability and no completion, as evaluators need it."""
    door = make_door()
    body = door.complete("The cat", max_tokens=0, echo=True, logprobs=0).json()
    choice = body["choices"][0]
    values = choice["logprobs"]["token_logprobs"]
    assert choice["text"] == "The cat" and body["usage"]["completion_tokens"] == 0
    assert values == [None] + [-0.25] * (body["usage"]["prompt_tokens"] - 1)
    assert choice["logprobs"]["text_offset"][0] == 0


def test_an_engine_that_cannot_score_says_so() -> None:
    """Prompt scores that did not come are a refusal, also of a stream, and never an answer without them."""
    for stream in (False, True):
        response = make_door(scores_prompts=False).complete(echo=True, logprobs=1, stream=stream)
        assert response.status_code == 400 and error_of(response)["param"] == "echo"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [2**70]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"prompt": "a" * 300}, "prompt"),
        ({"prompt": "a", "max_tokens": 300}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    """What cannot be served is a 400 that names the parameter, and the engine never hears of it."""
    door = make_door()
    response = door.post("/v1/completions", {"model": "tiny", "prompt": "a", **fields})
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert door.source.requests == []


def test_every_field_of_the_official_client_is_known() -> None:
    """Each parameter that OpenAI documents is either served or refused by name."""
    theirs = set(params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert theirs <= CompletionsBody.model_fields.keys()
