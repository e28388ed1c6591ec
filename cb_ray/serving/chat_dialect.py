"""`/v1/chat/completions`: the OpenAI chat dialect.

Owns its request fields and the shape of its answers and stream events. Knows the shared dialect, generation and text; no sockets.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ..errors import InvalidRequestError
from ..messages import GenerateRequest
from ..text.chat import can_call_tools, chat_token_ids
from ..text.detokenizer import TextDelta, TextStream, TokenInfo
from ..text.tools import FoundCall, ToolCallFinder
from .generation import Choice, Written
from .openai import (
    MAX_LOGPROBS,
    GenerationBody,
    StrictModel,
    check_stream_options,
    plain_logprob,
    sampling_params,
    text_or_list,
)
from .reply import Reply, ReplyHead
from .served_model import ServedModel

Content = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[dict[str, Any]], Tag("(list)")],
    Discriminator(
        text_or_list, custom_error_type="content", custom_error_message="Should be a string or a list of content parts"
    ),
]


class FunctionCall(StrictModel):
    """What a tool call calls; `arguments` is JSON as text."""

    name: str
    arguments: str


class ToolCall(StrictModel):
    """A call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(StrictModel):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="Text, or parts of type text.")
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="Extension: shown to templates that know it.")
    annotations: list[Any] | None = Field(None, description="Accepted; changes nothing.")
    audio: None = Field(None, description="Not supported.")
    function_call: None = Field(None, description="Not supported; use tool_calls.")


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of the arguments.")
    strict: bool | None = None


class Tool(StrictModel):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class ResponseFormat(StrictModel):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="By default the room left in the context.")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Any = Field(None, description="none or auto.")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer.")
    response_format: ResponseFormat | None = Field(None, description="Only text.")
    metadata: dict[str, str] | None = Field(None, description="Accepted; changes nothing.")
    store: bool | None = Field(None, description="Accepted; nothing is stored.")
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = Field(None, description="Only where the model's chat template reads it.")
    verbosity: Literal["medium"] | None = None
    safety_identifier: str | None = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: str | None = Field(None, description="Share cached prefixes only within one key.")
    prompt_cache_retention: str | None = Field(None, description="Accepted; pages stay while there is room.")
    # Extensions.
    add_generation_prompt: bool | None = Field(None, description="Extension: false ends the prompt after the messages.")
    continue_final_message: bool | None = Field(None, description="Extension: go on with the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Extension: variables for the chat template.")
    # OpenAI's, which this server does not have.
    audio: None = Field(None, description="Not supported.")
    function_call: None = Field(None, description="Not supported; use tool_choice.")
    functions: None = Field(None, description="Not supported; use tools.")
    moderation: None = Field(None, description="Not supported.")
    prediction: None = Field(None, description="Not supported.")
    prompt_cache_options: None = Field(None, description="Not supported.")
    web_search_options: None = Field(None, description="Not supported.")

    @property
    def limit(self) -> int | None:
        """The most tokens of one answer. With both names given the smaller holds."""
        return min((value for value in (self.max_tokens, self.max_completion_tokens) if value is not None), default=None)

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model is shown."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_chars(self) -> int:
        """By this, long conversations are tokenized off the event loop."""
        return num_chars(self.messages)


def num_chars(messages: Iterable[ChatMessage]) -> int:
    """Characters of text in messages."""
    total = 0
    for content in (message.content for message in messages):
        parts = [content] if isinstance(content, str) else [str(part.get("text", "")) for part in content or ()]
        total += sum(map(len, parts))
    return total


def check_chat(body: ChatBody, model: ServedModel) -> None:
    """Raises InvalidRequestError for fields that do not go together and for what this server cannot honour."""
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequestError(
            f"response_format {body.response_format.type!r} is not supported by this server; use 'text'", param="response_format"
        )
    if body.reasoning_effort is not None and "reasoning_effort" not in (model.codec.chat_template or ""):
        raise InvalidRequestError("this model has no reasoning_effort; leave it out", param="reasoning_effort")
    _check_tools(body, model)


def _check_tools(body: ChatBody, model: ServedModel) -> None:
    choice = body.tool_choice
    names = {tool.function.name for tool in body.tools or ()}
    if choice not in (None, "none", "auto"):
        known = choice == "required" or (isinstance(choice, dict) and (choice.get("function") or {}).get("name") in names)
        why = "forced calls are not supported by this server" if known and names else "names no function of tools"
        raise InvalidRequestError(f"tool_choice {_shown(choice)}: {why}; use 'auto' or 'none'", param="tool_choice")
    if body.callable_tools and not can_call_tools(model.codec):
        raise InvalidRequestError("this model writes tool calls in a form that this server cannot read", param="tools")


def _shown(choice: Any) -> str:
    return repr(choice)[:80]


def tokenize_chat(body: ChatBody, model: ServedModel) -> list[int]:
    """Token ids of the conversation. Slow for long text. Raises InvalidRequestError."""
    model.check_length(model.codec.at_least(body.num_chars), None, "messages")
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    extra = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort is not None else {}
    ids = chat_token_ids(
        model.codec,
        messages,
        tools=[tool.model_dump(exclude_none=True) for tool in body.callable_tools],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs={**extra, **(body.chat_template_kwargs or {})},
    )
    model.check_length(len(ids), body.limit, "messages")
    return ids


def chat_choices(body: ChatBody, model: ServedModel, head: ReplyHead, ids: Sequence[int]) -> list[Choice]:
    """One Choice for each of n answers; those after the first may take over the pages of the first."""
    choices: list[Choice] = []
    for index in range(body.n or 1):
        sampling = sampling_params(body, model, logprobs=body.num_logprobs, choice=index)
        request = GenerateRequest(
            request_id=f"{head.id}-{index}",
            token_ids=tuple(ids),
            max_new_tokens=body.limit,
            sampling=sampling,
            stream=bool(body.stream or body.stops),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or body.prompt_cache_key or "",
            fork_of=f"{head.id}-0" if index else None,
        )
        text = TextStream(
            codec=model.codec,
            stop=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
            stop_ids=sampling.stop_ids,
            keep_tokens=bool(body.logprobs),
        )
        choices.append(Choice(index=index, request=request, text=text))
    return choices


class ChatReply(Reply):
    """Answers of kind `chat.completion` and events of kind `chat.completion.chunk`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, head: ReplyHead, body: ChatBody, model: ServedModel, choices: Sequence[Choice]) -> None:
        super().__init__(head, choices, include_usage=body.include_usage, running_usage=body.running_usage)
        self._model, self._body = model, body
        self._finders: dict[int, ToolCallFinder] = {}

    def events(self, choice: Choice, delta: TextDelta) -> Iterable[dict[str, Any]]:
        if choice.index not in self._finders:
            self._finders[choice.index] = self._finder()
            yield self._piece(choice, {"role": "assistant", "content": ""})
        finder = self._finders[choice.index]
        before = finder.num_calls
        pieces = finder.push(delta.text) + (finder.finish() if delta.finish_reason else [])
        logprobs = self._logprobs(delta.tokens)
        for piece in pieces or ([""] if delta.tokens else []):
            if isinstance(piece, FoundCall):
                yield self._piece(choice, {"tool_calls": [{"index": before, **_call(piece)}]}, logprobs)
                before += 1
            else:
                yield self._piece(choice, {"content": piece}, logprobs)
            logprobs = None if logprobs is None else self._logprobs(())  # each entry once
        if delta.finish_reason:
            yield self._piece(choice, {}, reason=_reason(delta.finish_reason, finder))

    def whole(self, choice: Choice, written: Written) -> dict[str, Any]:
        finder = self._finder()
        pieces = finder.push(written.text) + finder.finish()
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [_call(piece) for piece in pieces if isinstance(piece, FoundCall)]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        reason = _reason(written.finish_reason, finder)
        return {"index": choice.index, "message": message, "logprobs": self._logprobs(written.tokens), "finish_reason": reason}

    def _finder(self) -> ToolCallFinder:
        names = [tool.function.name for tool in self._body.callable_tools]
        return ToolCallFinder(names, single=self._body.parallel_tool_calls is False)

    @staticmethod
    def _piece(choice: Choice, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Iterable[TokenInfo]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: TokenInfo) -> dict[str, Any]:
        top = [self._entry(other, value) for other, value in token.top[: self._body.top_logprobs or 0]]
        return self._entry(token.token_id, token.logprob or 0.0) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        codec = self._model.codec
        value = plain_logprob(logprob)
        return {"token": codec.token_text(token_id), "logprob": value, "bytes": list(codec.token_bytes(token_id))}


def _call(found: FoundCall) -> dict[str, Any]:
    function = {"name": found.name, "arguments": found.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _reason(reason: str | None, finder: ToolCallFinder) -> str | None:
    return "tool_calls" if reason == "stop" and finder.num_calls else reason
