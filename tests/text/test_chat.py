"""Messages reach the template as it reads them, and what it cannot read is an error that names the place."""

from __future__ import annotations

from typing import Any

import pytest

from cb_ray.errors import InvalidRequestError
from cb_ray.text.chat import chat_token_ids, knows_tools, render_chat
from tests.text.tokenizers_made import byte_fallback, byte_level

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]"
    "{% for c in m.get('tool_calls', []) %}<{{ c['function']['name'] }} {{ c['function']['arguments']['a'] }}>{% endfor %}"
    "{% endfor %}{% if tools %}{tools:{{ tools | length }}}{% endif %}{% if add_generation_prompt %}[assistant:{% endif %}"
)
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the first turn is the user’s') }}{% endif %}ok"
WITH_BOS = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}"


def render(messages: list[dict[str, Any]], template: str = PLAIN, **options: Any) -> str:
    return render_chat(byte_level(420, template), messages, **options)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_turns_and_parts_in_order() -> None:
    """Text parts are read one after the other, as if they were one text."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render([{"role": "system", "content": "s"}, user(parts)]) == "[system:s][user:ab][assistant:"
    assert render([user("a")], add_generation_prompt=False) == "[user:a]"


def test_the_template_writes_the_only_beginning() -> None:
    """A template that writes <s> and a tokenizer that adds <s> make one, not two."""
    codec = byte_fallback(WITH_BOS)
    ids = chat_token_ids(codec, [user("a")], add_generation_prompt=False)
    assert ids.count(1) == 1 and ids[0] == 1


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    """OpenAI's newer role name must not become a role that the model has never seen."""
    assert render([{"role": "developer", "content": "s"}, user("a")]).startswith("[system:s]")
    knowing = "{% for m in messages %}{% if m['role'] == 'developer' %}D{% endif %}{% endfor %}"
    assert render([{"role": "developer", "content": "s"}], knowing) == "D"


def test_calls_of_tools_come_back_as_objects() -> None:
    """Clients send a call's arguments as JSON text and its content as null; templates read an object and a string."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    turns = [user("1+6?"), {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "7"}]
    assert render(turns) == "[user:1+6?][assistant:]<add 7>[tool:7][assistant:"


def test_tools_reach_the_template() -> None:
    """Tools are the template's to show; whether it does can be asked."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert "{tools:1}" in render([user("a")], tools=[tool])
    assert knows_tools(byte_level(420, PLAIN)) and not knows_tools(byte_level(420, WITH_BOS))


def test_a_message_can_be_gone_on_with() -> None:
    """continue_final_message leaves the last turn open; together with a generation prompt it makes no sense."""
    turns = [user("a"), {"role": "assistant", "content": "the answer"}]
    text = render(turns, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("[assistant:the answer")
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        render(turns, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least one"),
        ([{"role": "asistant", "content": "a"}], "messages[0].role", "assistant"),
        ([user("a"), user(None)], "messages[1].content", "None"),
        ([{"role": "assistant"}], "messages[0].content", "None"),
        ([user(5)], "messages[0].content", "5"),
        (
            [user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])],
            "messages[0].content[1].type",
            "image_url",
        ),
        ([user([{"type": "text"}])], "messages[0].content[0].text", "None"),
        ([user(["a"])], "messages[0].content[0].type", "only parts of type 'text'"),
    ],
)
def test_the_place_of_a_fault_is_named(messages: list[dict[str, Any]], param: str, says: str) -> None:
    """Every fault of a conversation says where it is and what was found there."""
    with pytest.raises(InvalidRequestError, match=says) as caught:
        render(messages)
    assert caught.value.param == param


def test_a_refusal_of_the_template_is_the_callers_error() -> None:
    """What the model's author raises in a template reaches the caller in the author's words."""
    with pytest.raises(InvalidRequestError, match="the first turn is the user’s") as caught:
        render([{"role": "system", "content": "s"}], STRICT)
    assert caught.value.param == "messages"


def test_a_template_that_breaks_tells_no_internals() -> None:
    """A template that stumbles over a message is an error of the request, without file names or Python's words."""
    with pytest.raises(InvalidRequestError, match="could not be filled in") as caught:
        render([user("a")], "{{ messages[0]['content'] + 1 }}")
    assert "File" not in str(caught.value)


def test_a_model_without_template_says_so() -> None:
    """Base models have no chat template; the error points to completions."""
    with pytest.raises(InvalidRequestError, match="no chat template"):
        render_chat(byte_level(), [user("a")])


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "tools"])
def test_template_variables_cannot_take_over_the_rendering(name: str) -> None:
    """chat_template_kwargs set variables of the template, not options of the function that fills it in."""
    with pytest.raises(InvalidRequestError, match=name):
        render([user("a")], template_kwargs={name: "x"})
    assert render([user("a")], "{{ mood }}", template_kwargs={"mood": "calm"}) == "calm"
