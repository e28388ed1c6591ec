"""`/v1/capabilities`: what this model, build and configuration can do, so that a client need not find out by trying.

Owns that answer. All of it is derived: routes and parameters from the door's own tables, features by asking the checks that
requests go through. Nothing is listed by hand, so nothing can be promised that is refused.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel

from .. import __version__
from ..errors import CbRayError
from .chat_dialect import ChatBody, check_chat
from .routes import Route
from .served_model import ServedModel
from .settings import DoorSettings

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SCHEMA = {"name": "s", "schema": {"type": "object"}}
# A smallest request that uses each feature.
_TRIED: dict[str, dict[str, Any]] = {
    "tools": {"tools": [_TOOL]},
    "tool_choice_required": {"tools": [_TOOL], "tool_choice": "required"},
    "tool_choice_named": {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
}


def capabilities(model: ServedModel, settings: DoorSettings, routes: Iterable[Route], *, can_store: bool) -> dict[str, Any]:
    """The answer, as JSON."""
    routes = tuple(routes)
    return {
        "object": "capabilities",
        "model": {**model.card(), "vocab_size": model.vocab_size, "chat": model.codec.chat_template is not None},
        "features": {**{name: _accepts(model, fields) for name, fields in _TRIED.items()}, "stored_responses": can_store},
        "endpoints": {f"{route.method} {route.path.replace(':path', '')}": _parameters(route.body) for route in routes},
        "limits": {
            "max_body_bytes": settings.max_body_bytes,
            "max_prompt_tokens": model.max_prompt_tokens,
            "max_output_tokens": settings.max_output_tokens,
            "max_choices": settings.max_choices,
            "max_logprobs": settings.max_logprobs,
            "request_timeout_s": settings.request_timeout_s,
        },
        "build": {"cb_ray": __version__, **_versions("transformers", "torch", "ray")},
    }


def _accepts(model: ServedModel, fields: dict[str, Any]) -> bool:
    """Whether a chat with these fields passes the checks."""
    chat = ChatBody.model_validate({"model": model.name, "messages": [{"role": "user", "content": "a"}], **fields})
    return _passes(lambda: check_chat(chat, model))


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except CbRayError:
        return False
    return True


def _parameters(body: type[BaseModel] | None) -> list[str]:
    """The fields of a body that can be anything but null."""
    if body is None:
        return []
    return sorted(name for name, field in body.model_fields.items() if field.annotation is not type(None))


def _versions(*names: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
