"""What an answer must look like, as OpenAI's dialects ask for it. Owns `response_format` and the extension `structured_outputs`.

Knows grammars as values; compiles none. What an engine finds wrong with one is a 400 that names the field.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ..errors import InvalidRequestError
from ..grammar import Grammar
from .openai import GenerationBody, StrictModel


class JsonSchemaFormat(StrictModel):
    """The schema of `response_format` of type json_schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON Schema.")
    strict: bool | None = Field(None, description="true: a keyword that cannot be enforced is refused instead of left out.")


class ResponseFormat(StrictModel):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(StrictModel):
    """Extension, as vLLM has it: exactly one of these."""

    json_: dict[str, Any] | None = Field(None, alias="json", description="JSON Schema.")
    json_object: Literal[True] | None = Field(None, description="true: any JSON object.")
    regex: str | None = Field(None, min_length=1, description="The whole answer matches it (syntax of Rust's regex).")
    choice: list[str] | None = Field(None, min_length=1, description="The answer is one of these texts.")
    grammar: str | None = Field(None, min_length=1, description="A context-free grammar: Lark's notation, or GBNF.")


class FormedBody(GenerationBody):
    """A request whose answer may have to look like something."""

    response_format: ResponseFormat | None = Field(None, description="text, json_object, or a json_schema.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Extension: json, regex, choice or grammar.")

    @property
    def wanted_grammar(self) -> Grammar | None:
        """The grammar of what is said. Raises InvalidRequestError."""
        given = self.response_format
        asked = given is not None and given.type != "text"
        if asked and self.structured_outputs is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs both say what the answer must look like; give one",
                param="structured_outputs",
            )
        if self.structured_outputs is not None:
            return grammar_of(self.structured_outputs)
        return _of_format(given) if given is not None and asked else None


def _of_format(given: ResponseFormat) -> Grammar:
    if given.type == "json_object":
        return Grammar.json_object(param="response_format")
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise InvalidRequestError("response_format of type json_schema needs json_schema.schema", param="response_format")
    schema = given.json_schema
    return Grammar.json_schema(schema.schema_, lenient=not schema.strict, param="response_format")


def grammar_of(given: StructuredOutputs) -> Grammar:
    """Raises InvalidRequestError."""
    ways = [name for name in type(given).model_fields if getattr(given, name) is not None]
    if len(ways) != 1:
        raise InvalidRequestError(
            "structured_outputs has exactly one of json, json_object, regex, choice and grammar, "
            f"got {', '.join(way.rstrip('_') for way in ways) or 'none'}",
            param="structured_outputs",
        )
    value, param = getattr(given, ways[0]), "structured_outputs"
    make = {"json_": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choice, "grammar": Grammar.lark}
    return Grammar.json_object(param=param) if ways[0] == "json_object" else make[ways[0]](value, param=param)
