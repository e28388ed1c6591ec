"""The OpenAPI description: bodies are read from raw bytes, strictly, so their schemas are told to FastAPI here.

Owns what the description says beyond the routes themselves: request bodies, answers, errors, keys. Knows pydantic models and
FastAPI; no handlers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .answers import ANSWERS, AnthropicErrorAnswer, ErrorAnswer
from .envelopes import speaks_anthropic
from .routes import Route

_TEMPLATE = "#/components/schemas/{model}"


def describe(app: FastAPI, routes: Iterable[Route], model: str) -> None:
    """Make `app.openapi()` show the JSON body and answer of each route, the errors of its API, and the one model's name."""
    routes = tuple(routes)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, routes, model)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(app: FastAPI, routes: tuple[Route, ...], model_name: str) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies: list[type[BaseModel]] = list(dict.fromkeys(route.body for route in routes if route.body is not None))
    answers: list[type[BaseModel]] = list(dict.fromkeys([*ANSWERS.values(), ErrorAnswer, AnthropicErrorAnswer]))
    modes = [*((model, "validation") for model in bodies), *((model, "serialization") for model in answers)]
    places, shared = models_json_schema(modes, ref_template=_TEMPLATE)  # type: ignore[arg-type]
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(shared.get("$defs", {}))
    for body in bodies:
        if "model" in (properties := components["schemas"][body.__name__]["properties"]):
            properties["model"]["enum"] = [model_name]
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    schema["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which no route of ours gives
        components["schemas"].pop(name, None)
    for route in routes:
        operation = schema["paths"][route.path.replace(":path", "")][route.method.lower()]
        if route.body is not None:
            content = {"application/json": {"schema": places[route.body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        operation["responses"] = _responses(route, places)
        operation["parameters"] = [
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _in_path(route.path)),
            {"name": "X-Request-Id", "in": "header", "schema": {"type": "string"}, "description": "Comes back on the response."},
        ]
    return schema


def _in_path(path: str) -> list[str]:
    return re.findall(r"\{(\w+)", path)


def _responses(route: Route, places: Any) -> dict[str, Any]:
    content: dict[str, Any] = {}
    answer = ANSWERS.get((route.method, route.path))
    if answer is not None:
        content["application/json"] = {"schema": places[answer, "serialization"]}
    elif route.answers is None:
        content["application/json"] = {"schema": {"type": "object"}}
    if route.answers is not None:
        # OpenAPI 3.1 has no words for the events of a stream
        content[route.answers] = {} if route.answers == "text/event-stream" else {"schema": {"type": "string"}}
    error = AnthropicErrorAnswer if speaks_anthropic(route.path) else ErrorAnswer
    failure = {"description": "An error", "content": {"application/json": {"schema": places[error, "serialization"]}}}
    return {"200": {"description": "The answer", "content": content}, "4XX": failure, "5XX": failure}
