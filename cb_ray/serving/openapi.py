"""The OpenAPI description: bodies are read from raw bytes, strictly, so their schemas are told to FastAPI here.

Owns that one addition. Knows pydantic models and FastAPI; no handlers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Make `app.openapi()` show the JSON body of each POST route in `bodies`, and the error envelope of every route."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, bodies)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    template = "#/components/schemas/{model}"
    places, shared = models_json_schema([(body, "validation") for body in bodies.values()], ref_template=template)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    components.update(shared.get("$defs", {}), Error=_ERROR)
    for path, body in bodies.items():
        content = {"application/json": {"schema": places[body, "validation"]}}
        schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    failure = {"description": "An error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"] |= {"4XX": failure, "5XX": failure}
    return schema
