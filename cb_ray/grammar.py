"""`Grammar`: what an answer must look like, as a value. Owns its kinds and the ways to write one; compiles nothing.

    Grammar.json_schema({"type": "object", …})     JSON that a schema describes
    Grammar.json_object()                          any JSON object
    Grammar.regex(r"[A-Z]{2}-\\d{3}")               text that a regular expression matches whole
    Grammar.choice(["yes", "no"])                  one of these texts
    Grammar.lark('start: "a"+ "b"')                a context-free grammar, in Lark's notation or llama.cpp's GBNF

It crosses processes as text. The engine that receives it compiles it, once for all requests that have an equal one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from .errors import InvalidRequestError, nearest

GrammarKind = Literal["json_schema", "regex", "lark", "llguidance"]  # the last: several, as JSON that names them

# Between two tokens of JSON: nothing, a space, or a line break with its indentation. JSON allows any amount, in which a small model
# can lose itself until its budget is gone. A schema says otherwise with {"x-guidance": {"whitespace_pattern": …}}.
JSON_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One grammar. Two of the same kind and text are equal, whoever asks; `param` is what the request calls it, for errors."""

    kind: GrammarKind
    text: str  # the schema as JSON, the expression, or the rules
    lenient: bool = False  # of a schema: keywords that cannot be enforced are left out instead of refused
    param: str = field(default="grammar", compare=False)
    compiled: Any = field(default=None, compare=False, repr=False)  # the engine's own; stays in its process

    def __post_init__(self) -> None:
        """Raises InvalidRequestError naming `param` for what is no text or no kind of grammar."""
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise InvalidRequestError(f"a grammar is one of {kinds}, got {self.kind!r}", param=self.param)
        if not isinstance(cast(Any, self.text), str) or not self.text:
            raise InvalidRequestError(f"a grammar needs its text, got {self.text!r}", param=self.param)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, ({f.name: getattr(self, f.name) for f in fields(self) if f.name != "compiled"},)

    @classmethod
    def json_schema(cls, schema: Any, *, lenient: bool = False, param: str = "grammar") -> Grammar:
        """JSON that `schema` describes: a dictionary, JSON text, or a class with `model_json_schema` such as a pydantic model."""
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        return cls(kind="json_schema", text=_json_text(schema, param), lenient=lenient, param=param)

    @classmethod
    def json_object(cls, *, param: str = "grammar") -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, param=param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "grammar") -> Grammar:
        """Text that `pattern` matches whole; in the syntax of Rust's regex crate: no look-around, no back-references."""
        return cls(kind="regex", text=pattern, param=param)

    @classmethod
    def lark(cls, text: str, *, param: str = "grammar") -> Grammar:
        """Rules that begin with `start` (Lark's notation) or `root` (GBNF)."""
        return cls(kind="lark", text=text, param=param)

    @classmethod
    def choice(cls, choices: Iterable[str], *, param: str = "grammar") -> Grammar:
        """One of some texts."""
        texts = [choices] if isinstance(choices, str) else list(choices)
        if not texts or not all(isinstance(text, str) and text for text in cast("list[Any]", texts)):
            raise InvalidRequestError(f"a choice is among one or more texts that are not empty, got {texts!r}", param=param)
        return cls(kind="lark", text="start: " + " | ".join(map(literal, texts)), param=param)

    @classmethod
    def of(cls, value: Any, *, param: str = "grammar") -> Grammar:
        """A grammar as it is, its fields, or one named way to write it: `{"json_schema": …}`, `{"regex": …}`, `{"choice": […]}`,
        `{"lark": …}` or `{"json_object": True}`.

        Raises InvalidRequestError naming `param`.
        """
        if isinstance(value, Grammar):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"a grammar is a Grammar or a dictionary, got {value!r}", param=param)
        given = cast("Mapping[str, Any]", value)
        if "kind" in given:
            known = {f.name for f in fields(cls)} - {"compiled"}
            for name in given.keys() - known:
                raise InvalidRequestError(f"{name!r} is no field of a grammar; {nearest(name, known)}", param=param)
            state: dict[str, Any] = {"param": param, **given}
            return cls(**state)
        if len(given) != 1:
            raise InvalidRequestError(f"a grammar is written in one way, got {sorted(given)}", param=param)
        ((way, what),) = given.items()
        if way == "json_object":
            return cls.json_object(param=param)
        ways = {"json_schema": cls.json_schema, "regex": cls.regex, "choice": cls.choice, "lark": cls.lark}
        if way not in ways:
            raise InvalidRequestError(
                f"{way!r} is no way to write a grammar; {nearest(way, [*ways, 'json_object'])}", param=param
            )
        return ways[way](what, param=param)


def literal(text: str) -> str:
    """`text` as a string of Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def _json_text(schema: Any, param: str) -> str:
    """A schema as JSON text, the same for equal schemas however they were spaced; the order of its properties is kept."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, (Mapping, bool)):
            raise ValueError(f"a JSON schema is an object, got {type(value).__name__}")
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"the schema cannot be read: {error}", param=param) from error


def _restored(state: dict[str, Any]) -> Grammar:
    return Grammar(**state)
