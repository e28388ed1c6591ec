"""What the dialects share that are chats in other words: a ChatBody from their fields, and chat's errors in their names.

Owns `build_chat` and `renamed`. Knows the chat dialect's body; none of the dialects that use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidRequestError
from .answer_form import FormedBody
from .chat_dialect import ChatBody

Message = dict[str, Any]


def build_chat(fields: Mapping[str, Any]) -> ChatBody:
    """A ChatBody of fields that another dialect has checked. What it still refuses is the client's fault all the same."""
    try:
        return ChatBody.model_validate(dict(fields))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        names = [str(part) for part in fault["loc"] if not str(part).startswith("(")]
        raise InvalidRequestError(f"{'.'.join(names)}: {fault['msg']}", param=names[0] if names else None) from None


def shared_fields(body: FormedBody, *, without: set[str]) -> dict[str, Any]:
    """The fields that a dialect has in common with a chat, as they were given."""
    return {
        name: getattr(body, name)
        for name in (FormedBody.model_fields.keys() - without - {"response_format"}) & body.model_fields_set
    }


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Errors of the chat dialect in the names of another one."""
    try:
        yield
    except InvalidRequestError as error:
        head = (error.param or "").replace("[", ".").partition(".")[0]
        if head not in names:
            raise
        message = error.message.replace(head, names[head])
        raise InvalidRequestError(message, param=names[head], code=error.code) from None
