"""Chat messages to token ids, by the model's own chat template.

Owns the conversion from the OpenAI shape of messages (plain dictionaries) to what templates expect, and the rendering. Knows
a codec and the ground; no HTTP. Every fault of a conversation is an InvalidRequestError that names the place in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequestError
from .codec import TextCodec
from .tools import spell_out

ROLES = ("system", "developer", "user", "assistant", "tool")

# Names that the rendering function takes for itself; a request may set variables of the template, not these.
_RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "self",
    }
)

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


def chat_token_ids(codec: TextCodec, messages: Sequence[Message], **options: Any) -> list[int]:
    """Token ids of a conversation; `options` are those of `render_chat`.

    The template writes the special tokens itself, so the tokenizer adds none: there is never a second beginning-of-sequence.
    """
    return codec.encode(render_chat(codec, messages, **options), add_special_tokens=False)


def render_chat(
    codec: TextCodec,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation. `tools` are in OpenAI's shape ({"type": "function", "function": {...}}); a template that
    knows nothing of tools gets them, and calls made earlier, as text in its turns.

    Raises InvalidRequestError when the model has no chat template, when the template refuses the messages, and for content
    that is not text.
    """
    template = codec.chat_template
    if template is None:
        raise InvalidRequestError("this model has no chat template; use the completions endpoint with a prompt", param="messages")
    turns = [_turn(message, f"messages[{index}]", template) for index, message in enumerate(messages)]
    if not turns:
        raise InvalidRequestError("messages must hold at least one message, got an empty list", param="messages")
    if not knows_tools(codec):
        turns, tools = spell_out(turns, tools), ()
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message goes on with the last message, so add_generation_prompt must be false",
            param="continue_final_message",
        )
    variables = dict(template_kwargs or {})
    for name in variables.keys() & _RESERVED:
        raise InvalidRequestError(f"{name!r} is no variable of the chat template", param="chat_template_kwargs")
    try:
        text = codec.tokenizer.apply_chat_template(
            turns,
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
    except Exception as error:  # templates are programs of the model's author: whatever they raise is about these messages
        raise InvalidRequestError(
            f"the model's chat template refused the messages: {_reason(error)}", param="messages"
        ) from error
    return str(text)


def knows_tools(codec: TextCodec) -> bool:
    """Whether the model's chat template shows tools to the model."""
    return "tools" in (codec.chat_template or "")


def _turn(message: Message, where: str, template: str) -> dict[str, Any]:
    """One message as templates read it: text content, `developer` as `system`, tool arguments as objects."""
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", param=f"{where}.role")
    turn = {name: value for name, value in message.items() if value is not None}
    if role == "developer" and "developer" not in template:
        turn["role"] = "system"
    turn["content"] = _text(message.get("content"), f"{where}.content", may_lack="tool_calls" in turn or "refusal" in turn)
    if message.get("tool_calls"):
        turn["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return turn


def _text(content: Any, where: str, *, may_lack: bool) -> str:
    """The text of a message's content: a string, or a list of text parts, which follow each other as they stand."""
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{where} must be text or a list of content parts, got {content!r}", param=where)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"]
    if kind in ("text", "refusal"):
        raise InvalidRequestError(f"{where}.{kind} must be a string, got {part.get(kind)!r}", param=f"{where}.{kind}")
    raise InvalidRequestError(
        f"content parts of type {kind!r} are not supported here, only parts of type 'text'", param=f"{where}.type"
    )


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates write them, where the client's JSON text is one."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function}


def _reason(error: Exception) -> str:
    """What a template said, if it said something meant for people; never a traceback."""
    if type(error).__module__.startswith("jinja2"):
        return str(error) or type(error).__name__
    return f"it could not be filled in ({type(error).__name__})"
