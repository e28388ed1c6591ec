"""`/v1/responses` through the official client: text, events, tools, what is stored, and what is made in the background."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cb_ray.errors import EngineFailedError, QueueFullError
from cb_ray.serving.response_store import LEASE_S, ResponseStore
from cb_ray.serving.settings import DoorSettings
from cb_ray.text.codec import TextCodec
from tests.serving.doors import DoorUnderTest, error_of, listening, make_door, make_model
from tests.tiny import make_tokenizer

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALLS = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
URL = "/v1/responses"


def ask(door: DoorUnderTest, **fields: Any) -> httpx.Response:
    return door.post(URL, {"model": "tiny", "input": "Hi", **fields})


@pytest.fixture
def door() -> Iterator[tuple[DoorUnderTest, openai.OpenAI]]:
    """A door on a real connection, and the official client."""
    made = make_door(model=make_model(context_length=4000))
    with listening(made.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield made, client


def test_a_response(door: tuple[DoorUnderTest, openai.OpenAI]) -> None:
    """Text, status and usage are where the official client looks for them."""
    made, client = door
    answer = client.responses.create(model="tiny", input="Hi", instructions="Be brief.", metadata={"a": "b"})
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", made.source.says)
    assert answer.usage is not None and answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens == 7 and answer.metadata == {"a": "b"}
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    made.post("/v1/chat/completions", {"model": "tiny", "messages": chat})
    assert made.source.requests[0].token_ids == made.source.requests[1].token_ids


def test_a_stream_tells_its_response_event_by_event(door: tuple[DoorUnderTest, openai.OpenAI]) -> None:
    """From created to completed, numbered without gaps; the deltas are the text, and the last event is the whole response."""
    made, client = door
    events = list(client.responses.create(model="tiny", input="Hi", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == made.source.says
    last = events[-1].response
    assert last.output_text == made.source.says and last.usage.output_tokens > 0
    assert client.responses.retrieve(last.id).output_text == made.source.says


def test_the_clients_own_stream_helper(door: tuple[DoorUnderTest, openai.OpenAI]) -> None:
    """`client.responses.stream` accumulates the events by itself, and checks their order while doing so."""
    made, client = door
    with client.responses.stream(model="tiny", input="Hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == made.source.says


def test_a_limit_makes_a_response_incomplete() -> None:
    """The status says so, whole and streamed."""
    answer = ask(make_door(), max_output_tokens=3).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    streamed = ask(make_door(), max_output_tokens=3, stream=True).text
    assert "event: response.incomplete\n" in streamed


def test_calls_become_items(door: tuple[DoorUnderTest, openai.OpenAI]) -> None:
    """A call is an item of its own, streamed with its arguments, and what it gave is read in the next response."""
    made, client = door
    made.source.says = CALLS
    first = client.responses.create(model="tiny", input="1+1?", tools=[TOOL])
    assert [item.type for item in first.output] == ["message", "function_call"]
    call: Any = first.output[1]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    events = list(client.responses.create(model="tiny", input="1+1?", tools=[TOOL], stream=True))
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(arguments)) == {"a": 1}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    made.source.says = "2"
    by_id = client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[TOOL])
    in_full: Any = [{"role": "user", "content": "1+1?"}, *first.output, result]
    by_hand = client.responses.create(model="tiny", input=in_full, tools=[TOOL])
    assert by_id.output_text == by_hand.output_text == "2"
    assert made.source.requests[-1].token_ids == made.source.requests[-2].token_ids
    assert "tool_response" in made.model.codec.decode(made.source.requests[-1].token_ids)


def test_a_stored_response_can_be_read_and_forgotten(door: tuple[DoorUnderTest, openai.OpenAI]) -> None:
    """GET gives what was answered, input_items what was asked; after DELETE, and with store: false, there is nothing."""
    made, client = door
    answer = client.responses.create(model="tiny", input="Hi")
    assert client.responses.retrieve(answer.id) == answer
    items: list[Any] = list(client.responses.input_items.list(answer.id))
    assert items[0].content[0].text == "Hi"
    client.responses.delete(answer.id)
    for name in (answer.id, client.responses.create(model="tiny", input="Hi", store=False).id):
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.retrieve(name)
        assert missing.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input="Hi", previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found"


def test_instructions_are_not_inherited(door: tuple[DoorUnderTest, openai.OpenAI]) -> None:
    """The next response has its own instructions, as OpenAI has it; the conversation goes on."""
    made, client = door
    first = client.responses.create(model="tiny", input="Hi", instructions="Shout.")
    client.responses.create(model="tiny", input="Go on", previous_response_id=first.id)
    text = made.model.codec.decode(made.source.requests[-1].token_ids)
    assert "Shout" not in text and made.source.says in text and "Go on" in text


def test_a_background_response_is_polled_and_cancelled(door: tuple[DoorUnderTest, openai.OpenAI]) -> None:
    """It is answered at once and found when it is done; cancelled, its request ends in the engine."""
    made, client = door
    started = client.responses.create(model="tiny", input="Hi", background=True)
    assert started.status == "in_progress" and not started.output
    found = started
    while found.status == "in_progress":
        found = client.responses.retrieve(started.id)
    assert (found.status, found.output_text) == ("completed", made.source.says)
    made.source.holds_after = 0
    held = client.responses.create(model="tiny", input="Hi", background=True)
    assert client.responses.cancel(held.id).status == "cancelled"
    while not made.source.closed:
        client.models.list()
    assert made.source.closed == [f"{held.id}-0"]
    while client.responses.retrieve(held.id).status == "in_progress":
        pass
    made.source.holds_after = None
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(model="tiny", input="Hi").id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"conversation": "c"}, "conversation"),
        ({"n": 2}, "n"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "a" * 100_000}, "input"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    """In the names of this API, also where the chat behind it finds the fault."""
    response = ask(make_door(), **fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param), response.text


def test_a_stream_that_fails_says_so() -> None:
    """Before the first token it is a status, after it an event with the failed response."""
    assert ask(make_door(fails=QueueFullError(1, 1)), stream=True).status_code == 429
    text = ask(make_door(fails=EngineFailedError("no memory"), fails_after=3), stream=True).text
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert last["type"] == "response.failed" and last["response"]["error"]["message"] == "no memory"


def test_tokens_of_an_input_are_counted() -> None:
    """The count is that of the usage."""
    door = make_door()
    counted = door.post(f"{URL}/input_tokens", {"model": "tiny", "input": "Hi"}).json()["input_tokens"]
    assert counted == ask(door).json()["usage"]["input_tokens"]


def test_a_server_that_stores_nothing() -> None:
    """Asking it to store is refused; not asking is served."""
    door = make_door(DoorSettings(stored_response_bytes=0))
    answer = ask(door).json()
    assert answer["store"] is False and door.get(f"{URL}/{answer['id']}").status_code == 404
    assert error_of(ask(door, store=True))["param"] == "store"


# ---- the store


def test_the_store_is_bounded() -> None:
    """The record used longest ago goes first; one that is too large is not kept; tenants do not see each other's."""

    async def scenario() -> None:
        store = ResponseStore(100)
        for name in "abc":
            await store.put("t", name, b"x" * 30)
        await store.get("t", "a")
        await store.put("t", "d", b"x" * 30)
        assert [await store.get("t", name) is not None for name in "abcd"] == [True, False, True, True]
        assert await store.get("other", "a") is None and not await store.delete("other", "a")
        await store.put("t", "huge", b"x" * 101)
        assert store.num_bytes <= 100 and await store.get("t", "huge") is None

    asyncio.run(scenario())


def test_a_watch_hears_of_a_cancel() -> None:
    """Who makes a response is told when it is cancelled, deleted or thrown out; a name that is gone is as good as cancelled."""

    async def scenario() -> None:
        store = ResponseStore(100)
        for name, end in (("a", store.cancel), ("b", store.delete)):
            await store.put("t", name, b"x", True)
            watch = asyncio.create_task(store.watch("t", name))
            await asyncio.sleep(0)
            assert not watch.done() and await end("t", name) and await watch
        assert await store.watch("t", "gone")

    asyncio.run(scenario())


def test_a_response_whose_maker_is_gone_is_lost() -> None:
    """Nobody watches it any more: who reads it is told that nobody will finish it."""

    async def scenario() -> None:
        now = [0.0]
        store = ResponseStore(100, lambda: now[0])
        await store.put("t", "a", b"x", True)
        now[0] = LEASE_S
        assert await store.get("t", "a") == (b"x", False)
        now[0] = 4 * LEASE_S
        assert await store.get("t", "a") == (b"x", True)

    asyncio.run(scenario())


def test_forms_and_forced_calls_reach_the_engine() -> None:
    """text.format and tool_choice are the grammars that a chat would have; what is wrong with a schema is named as text.format."""
    door = make_door(model=make_model(context_length=4000))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    assert ask(door, text=form).json()["text"]["format"]["schema"] == schema
    ask(door, tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    chats: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}},
        {
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
        },
    ]
    for fields in chats:
        door.chat(**fields)
    grammars = [request.sampling.grammar for request in door.source.requests]
    assert None not in grammars and grammars[:2] == grammars[2:]


def test_thoughts_are_items_of_their_own() -> None:
    """What was thought comes as a reasoning item before the message, whole and streamed, and its tokens are counted."""
    codec = TextCodec(make_tokenizer())
    codec.tokenizer.chat_template = (codec.chat_template or "") + "{# <think> </think> #}"
    door = make_door(model=make_model(codec=codec, context_length=4000), says="<think>Hm.</think>Yes")
    answer = ask(door).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"], answer["output"]
    assert answer["output"][0]["content"][0]["text"] == "Hm." and answer["output"][1]["content"][0]["text"] == "Yes"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    streamed = ask(door, stream=True).text
    assert "event: response.reasoning_text.delta" in streamed and "event: response.output_text.delta" in streamed
    ask_ = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "a"}]}
    blocks = door.post("/v1/messages", ask_).json()["content"]
    assert [(block["type"], block.get("thinking") or block.get("text")) for block in blocks] == [
        ("thinking", "Hm."),
        ("text", "Yes"),
    ]
