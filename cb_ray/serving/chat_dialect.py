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
from ..text.answer_reader import Part, Reader, Thought, ends_in_thought, reader_for, style_of
from ..text.chat import chat_token_ids
from ..text.detokenizer import TextDelta, TextStream, TokenInfo
from ..text.grammars import ToolFunction, answer_grammar, call_form
from ..text.tools import FoundCall, MoreArguments
from .answer_form import FormedBody
from .generation import Choice, Written
from .openai import (
    MAX_LOGPROBS,
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


class ChatBody(FormedBody):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="By default the room left in the context.")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Any = Field(None, description="none, auto, required, or a function of tools.")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer.")
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
    def chosen_function(self) -> str | None:
        """The function that a named tool_choice names."""
        choice = self.tool_choice
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else None

    @property
    def forces_calls(self) -> bool:
        return self.tool_choice == "required" or self.chosen_function is not None

    @property
    def tool_functions(self) -> list[ToolFunction]:
        """The functions that may be called."""
        chosen = self.chosen_function
        functions = [tool.function for tool in self.callable_tools if chosen in (None, tool.function.name)]
        return [ToolFunction(name=f.name, schema=f.parameters or {}, strict=bool(f.strict)) for f in functions]

    @property
    def single_call(self) -> bool:
        return self.parallel_tool_calls is False or self.chosen_function is not None

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
    _ = body.wanted_grammar
    if body.reasoning_effort is not None and "reasoning_effort" not in (model.codec.chat_template or ""):
        raise InvalidRequestError("this model has no reasoning_effort; leave it out", param="reasoning_effort")
    _check_tools(body, model)


def _check_tools(body: ChatBody, model: ServedModel) -> None:
    choice, names = body.tool_choice, {tool.function.name for tool in body.tools or ()}
    if choice not in (None, "none", "auto", "required"):
        if body.chosen_function is None:
            raise InvalidRequestError(
                f"tool_choice must be 'none', 'auto', 'required' or name a function, got {_shown(choice)}", param="tool_choice"
            )
        if body.chosen_function not in names:
            raise InvalidRequestError(f"tool_choice {_shown(choice)} names no function of tools", param="tool_choice")
    if choice == "required" and not names:
        raise InvalidRequestError("tool_choice 'required' needs tools", param="tool_choice")
    if body.callable_tools and not body.forces_calls and not style_of(model.codec).can_call:
        raise InvalidRequestError(
            "this model writes tool calls in a form that this server cannot read; with tool_choice 'required' it can",
            param="tools",
        )


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
    style = style_of(model.codec)
    grammar = answer_grammar(
        model.codec,
        answer=body.wanted_grammar,
        functions=body.tool_functions,
        forced=body.forces_calls,
        single=body.single_call,
        thinking=style.thinks and ends_in_thought(model.codec.decode(ids[-8:])),
    )
    for index in range(body.n or 1):
        sampling = sampling_params(body, model, logprobs=body.num_logprobs, choice=index, grammar=grammar)
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
            skip_special_tokens=body.skip_special_tokens is not False and not style.has_marks,
            min_tokens=body.min_tokens or 0,
            stop_ids=sampling.stop_ids,
            keep_tokens=bool(body.logprobs) or style.thinks or style.template is not None,
        )
        choices.append(Choice(index=index, request=request, text=text))
    return choices


class ChatReply(Reply):
    """Answers of kind `chat.completion` and events of kind `chat.completion.chunk`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, head: ReplyHead, body: ChatBody, model: ServedModel, choices: Sequence[Choice]) -> None:
        super().__init__(head, choices, include_usage=body.include_usage, running_usage=body.running_usage)
        self._model, self._body = model, body
        self._answers: dict[int, _Answer] = {}

    def num_reasoning(self) -> int:
        return sum(answer.num_thought for answer in self._answers.values())

    def events(self, choice: Choice, delta: TextDelta) -> Iterable[dict[str, Any]]:
        if choice.index not in self._answers:
            self._answers[choice.index] = self._answer(choice)
            yield self._piece(choice, {"role": "assistant", "content": ""})
        answer = self._answers[choice.index]
        logprobs = self._logprobs(delta.tokens)
        idle: list[Part] = [""] if delta.tokens and self._body.logprobs else []
        for part in answer.feed(delta.text, delta.tokens, last=delta.finish_reason is not None) or idle:
            yield self._piece(choice, answer.delta(part), logprobs)
            logprobs = None if logprobs is None else self._logprobs(())  # each entry once
        if delta.finish_reason:
            yield self._piece(choice, {}, reason=answer.reason(delta.finish_reason))

    def whole(self, choice: Choice, written: Written) -> dict[str, Any]:
        answer = self._answers[choice.index] = self._answer(choice)
        text, thought = "", ""
        calls: list[dict[str, Any]] = []
        for part in answer.feed(written.text, written.tokens, last=True):
            if isinstance(part, Thought):
                thought += part.text
            elif isinstance(part, FoundCall):
                calls.append(_call(part))
            elif isinstance(part, MoreArguments):
                calls[-1]["function"]["arguments"] += part.text
            else:
                text += part
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls or thought else ""), "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        reason = answer.reason(written.finish_reason)
        return {"index": choice.index, "message": message, "logprobs": self._logprobs(written.tokens), "finish_reason": reason}

    def _answer(self, choice: Choice) -> _Answer:
        body, codec = self._body, self._model.codec
        functions = body.tool_functions
        form = call_form(codec, answer=body.wanted_grammar, functions=functions, forced=body.forces_calls)
        tools = [tool.model_dump(exclude_none=True) for tool in body.callable_tools]
        names = {function.name for function in functions}
        prompt = choice.request.token_ids
        return _Answer(reader_for(codec, prompt, names=names, single=body.single_call, forced=form, tools=tools))

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


class _Answer:
    """One choice, taken apart as it comes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._undecided: list[int] = []  # where the tokens begin that may have been thought
        self._num_thought: int | None = None
        self._calls = 0

    @property
    def num_thought(self) -> int:
        return len(self._undecided) if self._num_thought is None else self._num_thought

    def feed(self, text: str, tokens: Iterable[TokenInfo], *, last: bool) -> list[Part]:
        parts = self._reader.push(text) if text else []
        if last:
            parts += self._reader.finish()
        if self._num_thought is None:
            self._undecided += [token.offset for token in tokens]
            end = self._reader.thought_end
            if end is not None:
                self._num_thought = sum(offset < end for offset in self._undecided)
        return parts

    def delta(self, part: Part) -> dict[str, Any]:
        """A part as the delta of a chunk."""
        if isinstance(part, Thought):
            return {"reasoning_content": part.text}
        if isinstance(part, FoundCall):
            self._calls += 1
            return {"tool_calls": [{"index": self._calls - 1, **_call(part)}]}
        if isinstance(part, MoreArguments):
            return {"tool_calls": [{"index": self._calls - 1, "function": {"arguments": part.text}}]}
        return {"content": part}

    def reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._reader.num_calls else reason
