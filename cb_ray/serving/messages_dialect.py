"""`/v1/messages`: Anthropic's Messages API, as a chat with other words.

Owns its request fields, their translation into a `ChatBody`, and the shape of its answers and events. Knows the chat dialect,
which decides how tokens are chosen and read; no sockets.

    system, content blocks ─▶ messages (tool_result ─▶ tool)      text, thinking, tool_use blocks ◀─ segments of the chat's answer
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json

from ..errors import CbRayError, InvalidRequestError
from ..text.answer_reader import style_of
from ..text.detokenizer import TextDelta
from .answer_form import FormedBody
from .chat_dialect import ChatBody, ChatReply
from .envelopes import anthropic_error_object
from .generation import Choice, Written
from .openai import StrictModel, text_or_list
from .reply import ReplyHead
from .segments import Segment, Segments
from .served_model import ServedModel
from .translation import Message, build_chat, shared_fields

# What the chat dialect calls by another name.
NAMES = {"max_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config.format"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_CACHE = "Accepted; prefixes are cached without being told."


class _Block(StrictModel):
    cache_control: dict[str, Any] | None = Field(None, description=_CACHE)


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(None, description="Accepted; changes nothing.")


Texts = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[TextBlock], Tag("(list)")],
    Discriminator(text_or_list, custom_error_type="content", custom_error_message="Should be a string or a list of text blocks"),
]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


def _block_form(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"({kind})" if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[ThinkingBlock, Tag("(thinking)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")],
    Discriminator(
        _block_form,
        custom_error_type="block",
        custom_error_message="Should be a block of type text, thinking, tool_use or tool_result",
    ),
]
Blocks = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[Block], Tag("(list)")],
    Discriminator(text_or_list, custom_error_type="content", custom_error_message="Should be a string or a list of blocks"),
]


class MessageTurn(StrictModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: Blocks


class MessagesTool(_Block):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(StrictModel):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    """`thinking`: whether to think first, where the model's chat template can be told."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="Accepted; the bound is max_tokens.")
    display: Literal["summarized"] | None = Field(None, description="Accepted; the whole text is shown.")


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """`output_config`: what the answer must look like."""

    format: OutputFormat | None = None
    effort: str | None = Field(None, description="Only where the model's chat template reads reasoning_effort.")


class Metadata(StrictModel):
    user_id: str | None = None


class CountTokensBody(StrictModel):
    """The body of POST /v1/messages/count_tokens."""

    model: str = Field(description="A name that GET /v1/models lists.")
    messages: list[MessageTurn] = Field(min_length=1)
    system: Texts | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = Field(None, description=_CACHE)
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Extension: variables for the chat template.")

    @property
    def num_chars(self) -> int:
        """By this, long conversations are tokenized off the event loop."""
        return sum(len(_text(turn.content)) for turn in self.messages) + len(_text(self.system or ""))


class MessagesBody(FormedBody, CountTokensBody):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=16)
    metadata: Metadata | None = Field(None, description="Accepted; changes nothing.")
    service_tier: Literal["auto", "standard_only"] | None = None
    # Of the OpenAI dialects only.
    n: None = Field(None, description="Not supported: an answer is one message.")  # type: ignore[assignment]
    stop: None = Field(None, description="Not supported; use stop_sequences.")  # type: ignore[assignment]
    response_format: None = Field(None, description="Not supported; use output_config.")  # type: ignore[assignment]
    stream_options: None = Field(None, description="Not supported: a stream always ends with its usage.")  # type: ignore[assignment]


def as_chat(body: CountTokensBody, model: ServedModel) -> ChatBody:
    """The same request as a chat. Raises InvalidRequestError."""
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(body)}
    variables = {**_thinking(body.thinking, model), **(body.chat_template_kwargs or {})}
    if variables:
        fields["chat_template_kwargs"] = variables
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            schema = {"name": "answer", "schema": body.output_config.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if not isinstance(body, MessagesBody):
        return build_chat(fields)
    shared = shared_fields(body, without={"n", "stop", "stream_options", "model"})
    chat = build_chat({**shared, **fields, "max_completion_tokens": body.max_tokens})
    # more stop strings than OpenAI's dialect takes are none of its business
    return chat.model_copy(update={"stop": body.stop_sequences}) if body.stop_sequences else chat


def chat_messages(body: CountTokensBody) -> list[Message]:
    """Chat messages of turns. Results of tools become turns of their own, before what the user says beside them."""
    messages: list[Message] = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for number, turn in enumerate(body.messages):
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages.append(_assistant(turn.content, f"messages[{number}]"))
        else:
            messages += _user(turn.content, f"messages[{number}]")
    return messages


def _assistant(blocks: Sequence[Any], where: str) -> Message:
    message: Message = {"role": "assistant"}
    for index, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            message.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            raise _misplaced("tool_result", "user", f"{where}.content[{index}]")
        elif isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        else:
            message["content"] = message.get("content", "") + block.text
    return message if len(message) > 1 else {**message, "content": ""}


def _user(blocks: Sequence[Any], where: str) -> list[Message]:
    results: list[Message] = []
    said: list[str] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")})
        elif isinstance(block, TextBlock):
            said.append(block.text)
        else:
            raise _misplaced(block.type, "assistant", f"{where}.content[{index}]")
    return results + ([{"role": "user", "content": "".join(said)}] if said or not results else [])


def _misplaced(kind: str, role: str, where: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: a {kind} block belongs into a turn of the {role}", param=where)


def _text(content: str | Iterable[Any] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(getattr(block, "text", "") or _text(getattr(block, "content", None)) for block in content)


def _tool(tool: MessagesTool) -> dict[str, Any]:
    named = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in named.items() if value is not None}}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequestError("tool_choice of type tool needs a name", param="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": {"auto": "auto", "none": "none", "any": "required", "tool": named}[choice.type]}
    return {**fields, "parallel_tool_calls": False} if choice.disable_parallel_tool_use else fields


def _thinking(thinking: Thinking | None, model: ServedModel) -> dict[str, Any]:
    """Variables of the chat template that switch thinking on or off. A model that never thinks may be told not to."""
    template = model.codec.chat_template or ""
    if thinking is None or thinking.type == "adaptive":
        return {}
    if "enable_thinking" in template:
        return {"enable_thinking": thinking.type == "enabled"}
    if thinking.type == "enabled" and not style_of(model.codec).thinks:
        raise InvalidRequestError("this model does not think before it answers; leave thinking out", param="thinking")
    return {}


class MessagesReply:
    """One message, whole or as events."""

    def __init__(self, head: ReplyHead, chat: ChatReply) -> None:
        self.head, self.choices = head, chat.choices
        self.extras: Callable[[], dict[str, Any]] | None = None
        self._chat, self._segments = chat, Segments()
        self._begun = False
        self._finish: str | None = None
        self._stop: str | None = None

    async def settle(self, written: Sequence[Written] | None = None) -> None:
        """Nothing is kept."""

    def answer(self, written: Sequence[Written]) -> dict[str, Any]:
        """The whole message."""
        choice = self._chat.whole(self.choices[0], written[0])
        for _ in (*self._segments.feed(choice["message"]), *self._segments.end()):
            pass
        self._finish = choice["finish_reason"]
        self._stop = written[0].stop if isinstance(written[0].stop, str) else None
        blocks = [_block(segment) for segment in self._segments.all]
        return self._message(blocks) | {**self._reasons(), "usage": self._usage()} | self._more()

    def stream_events(self, choice: Choice, delta: TextDelta) -> bytes:
        """The events that a delta adds, with the one that opens the stream before the first."""
        events: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            usage = {**self._usage(), "output_tokens": 0}
            events.append({"type": "message_start", "message": {**self._message([]), "stop_reason": None, "usage": usage}})
        self._stop = delta.stop if isinstance(delta.stop, str) else self._stop
        for piece in self._chat.events(choice, delta):
            self._finish = piece["finish_reason"] or self._finish
            for step, segment, text in self._segments.feed(piece["delta"]):
                events += _events(step, segment, text)
        return b"".join(map(_written, events))

    def stream_end(self) -> bytes:
        """What is open is closed, then why it ended and the usage."""
        events = [event for step, segment, text in self._segments.end() for event in _events(step, segment, text)]
        ending = {"type": "message_delta", "delta": self._reasons(), "usage": self._usage(), **self._more()}
        return b"".join(map(_written, [*events, ending, {"type": "message_stop"}]))

    def stream_error(self, error: CbRayError) -> bytes:
        """The last event of a stream that failed on its way."""
        return _written(anthropic_error_object(error))

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model}
        return {**head, "content": blocks, "stop_sequence": None}

    def _reasons(self) -> dict[str, Any]:
        reason = "stop_sequence" if self._stop is not None else _STOP_REASONS.get(self._finish or "stop", "end_turn")
        return {"stop_reason": reason, "stop_sequence": self._stop}

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,  # as Anthropic counts: without those read from the cache
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _more(self) -> dict[str, Any]:
        return {} if self.extras is None else {"cb_ray": self.extras()}


def _block(segment: Segment) -> dict[str, Any]:
    if segment.kind == "text":
        return {"type": "text", "text": segment.text}
    if segment.kind == "reasoning":
        return {"type": "thinking", "thinking": segment.text, "signature": ""}
    try:
        given = json.loads(segment.text or "{}")
    except ValueError:  # cut off by max_tokens: there is no better object to give
        given = {}
    return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": given}


def _events(step: str, segment: Segment, text: str) -> Iterable[dict[str, Any]]:
    if step == "open":
        empty = _block(segment)
        yield {"type": "content_block_start", "index": segment.index, "content_block": empty}
    elif step == "close":
        yield {"type": "content_block_stop", "index": segment.index}
    else:
        delta = {
            "text": {"type": "text_delta", "text": text},
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[segment.kind]
        yield {"type": "content_block_delta", "index": segment.index, "delta": delta}


def _written(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + to_json(event) + b"\n\n"
