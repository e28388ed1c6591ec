"""`/v1/responses`: the request side of OpenAI's Responses API, as a chat with other words.

Owns its request fields and their translation into a `ChatBody`: items become messages, and everything that decides how tokens are
chosen is the chat dialect's. Knows the chat dialect; nothing of streams, sockets or what is stored.

    instructions, input items ─▶ messages        text.format ─▶ response_format        tools, tool_choice ─▶ the same, nested
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ..errors import InvalidRequestError
from .answer_form import FormedBody
from .chat_dialect import ChatBody
from .openai import MAX_LOGPROBS, StrictModel, text_or_list
from .translation import Message, build_chat, shared_fields

MAX_ITEMS = 20_000

# What the chat dialect calls by another name. An error about the name on the left is the client's about that on the right.
NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}


class TextPart(StrictModel):
    """A piece of text in a message."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Text = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[TextPart], Tag("(list)")],
    Discriminator(text_or_list, custom_error_type="content", custom_error_message="Should be a string or a list of text parts"),
]


class _Item(StrictModel):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    phase: str | None = Field(None, description="Accepted; changes nothing.")


class FunctionCallItem(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningItem(_Item):
    """What the model thought before it spoke."""

    type: Literal["reasoning"]
    summary: list[TextPart] | None = None
    content: list[TextPart] | None = None
    encrypted_content: None = Field(None, description="Not supported.")


def _item_form(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"({kind})" if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[FunctionCallItem, Tag("(function_call)")]
    | Annotated[FunctionCallOutputItem, Tag("(function_call_output)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")],
    Discriminator(
        _item_form,
        custom_error_type="item",
        custom_error_message="Should be a message, function_call, function_call_output or reasoning item",
    ),
]
Input = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[Item], Field(max_length=MAX_ITEMS), Tag("(list)")],
    Discriminator(text_or_list, custom_error_type="input", custom_error_message="Should be a string or a list of items"),
]


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(StrictModel):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(StrictModel):
    """`text`: the form of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(StrictModel):
    """`reasoning`: how long to think, where the model's chat template reads it."""

    effort: str | None = None
    summary: Literal["auto", "detailed", "concise"] | None = Field(None, description="Accepted; the whole text is shown.")


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = Field(None, description="Accepted; this server pads nothing.")


class ResponsesBody(FormedBody):
    """The body of POST /v1/responses."""

    input: Input = Field(description="Text, or a list of items.")
    instructions: str | None = Field(None, description="A system turn before the conversation; not kept for the next response.")
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31, description="By default the room left in the context.")
    previous_response_id: str | None = Field(None, description="Go on from a stored response.")
    store: bool | None = Field(None, description="Keep the response for GET and previous_response_id; true by default.")
    background: bool | None = Field(None, description="Answer at once with a response in progress; needs store.")
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Any = Field(None, description="none, auto, required or {type: function, name}.")
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs"]] | None = None
    metadata: dict[str, str] | None = Field(None, description="Comes back with the response.")
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: str | None = Field(None, description="Share cached prefixes only within one key.")
    prompt_cache_retention: str | None = Field(None, description="Accepted; pages stay while there is room.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Extension: variables for the chat template.")
    # OpenAI's, which this server does not have.
    n: None = Field(None, description="Not supported: a response is one answer.")  # type: ignore[assignment]
    response_format: None = Field(None, description="Not supported; use text.format.")  # type: ignore[assignment]
    conversation: None = Field(None, description="Not supported; use previous_response_id.")
    prompt: None = Field(None, description="Not supported.")
    max_tool_calls: None = Field(None, description="Not supported: there are no built-in tools.")
    moderation: None = Field(None, description="Not supported.")
    context_management: None = Field(None, description="Not supported.")

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or bool(self.include)

    @property
    def stores(self) -> bool:
        return self.store is not False

    @property
    def num_chars(self) -> int:
        """By this, long conversations are tokenized off the event loop."""
        if isinstance(self.input, str):
            return len(self.input)
        return sum(len(text) for item in self.input for text in _texts(item))


def check_responses(body: ResponsesBody, *, can_store: bool) -> None:
    """Raises InvalidRequestError for fields that do not go together."""
    if body.background and body.stream:
        raise InvalidRequestError("a background response cannot be streamed here; poll it", param="background")
    if body.background and not (body.stores and can_store):
        raise InvalidRequestError("a background response needs store: true, and a server that stores", param="background")
    if body.store and not can_store:
        raise InvalidRequestError("this server stores no responses; leave store out or set it to false", param="store")
    text_format = body.text.format if body.text else None
    if text_format is not None and text_format.type == "json_schema" and text_format.schema_ is None:
        raise InvalidRequestError("text.format of type json_schema needs a schema", param="text.format.schema")


def as_chat(body: ResponsesBody, history: Sequence[Message]) -> ChatBody:
    """The same request as a chat, after the messages of `history`. Raises InvalidRequestError in this dialect's names."""
    fields = shared_fields(body, without={"stream_options", "n"})
    same = ("parallel_tool_calls", "metadata", "prompt_cache_key", "chat_template_kwargs")
    fields |= {name: getattr(body, name) for name in same if getattr(body, name) is not None}
    fields["messages"] = [*_instructions(body), *history, *messages_of(body.input)]
    fields["max_completion_tokens"] = body.max_output_tokens
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    return build_chat(fields)


def messages_of(given: str | Sequence[Any]) -> list[Message]:
    """Chat messages of items. What the assistant thought, said and called without a turn of others between is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []

    def assistant() -> Message:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        return messages[-1]

    for item in given:
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or item.summary or ())
            turn = assistant()
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            assistant().setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, FunctionCallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _plain(item.output)})
        elif item.role == "assistant":
            turn = assistant()
            if "content" in turn or "tool_calls" in turn:
                messages.append(turn := {"role": "assistant"})
            turn["content"] = _plain(item.content)
        else:
            messages.append({"role": item.role, "content": _plain(item.content)})
    return messages


def _instructions(body: ResponsesBody) -> list[Message]:
    return [{"role": "system", "content": body.instructions}] if body.instructions else []


def _plain(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.refusal or part.text for part in content)


def _texts(item: Any) -> list[str]:
    if isinstance(item, MessageItem):
        return [_plain(item.content)]
    if isinstance(item, FunctionCallOutputItem):
        return [_plain(item.output)]
    return [item.arguments] if isinstance(item, FunctionCallItem) else []


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    named = {"name": wanted.name, "description": wanted.description, "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in named.items() if value is not None}}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(choice: Any) -> Any:
    """`{type: function, name}` with the name where chat has it; everything else as it stands."""
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
