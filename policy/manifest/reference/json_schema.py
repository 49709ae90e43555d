"""JSON Schema 2020-12 for ``agent.toml``, ``tools.json`` and the signed statement, derived from the models.

The models are the one table of keys; ``shapes`` and ``tool_shapes`` say of each of their checks what JSON Schema can
say. A check that stands in no table is an error here, so that the published schema cannot fall behind in silence.
docs/schema holds the files, tests/golden/test_schema.py holds them to this module and regenerates them.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator
from pydantic.fields import FieldInfo

from policy.manifest import agent, parse, shapes
from policy.manifest.tools import document as tools_document
from policy.manifest.tools import shapes as tools_shapes
from policy.signing import statement as statements

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ID = "https://covenant.invalid/schema/"


@dataclass(frozen=True)
class _Style:
    """Style of a schema: ``null`` permits null for an absent value, ``whole`` requires every key."""

    null: bool
    whole: bool


TOML, _JSON, _WIRE = _Style(null=False, whole=False), _Style(null=True, whole=False), _Style(null=True, whole=True)
_TYPES = {str: "string", int: "integer", bool: "boolean"}
# annotated-types' words and pydantic's, in JSON Schema's; the last two for arrays.
_BOUNDS = {"ge": "minimum", "le": "maximum", "pattern": "pattern", "min_length": "minItems", "max_length": "maxItems"}
_STATEMENT_LEFT = (
    "that expires_at lies after not_before",
    "that unknown_sections is sorted and without repeats, and that no two subjects have one name",
    "which paths and links a package may hold",
)


def for_agent() -> dict[str, Any]:
    """The schema of ``agent.toml`` as TOML readers give it: tables as objects.

    Raises:
        LookupError: a check of the models stands in no table of ``shapes``.
    """
    sections = {name: _field(info, style=TOML) for name, info in agent.Manifest.model_fields.items()}
    return {
        "$schema": DIALECT,
        "$id": f"{_ID}agent.schema.json",
        "title": "agent.toml",
        "description": "The manifest of an agent package. What this refuses, `covenant manifest check` refuses too; it "
        "also sees what no JSON Schema can say.",
        "$comment": _left(shapes.LEFT),
        "type": "object",
        "required": ["agent"],
        "properties": sections,
        "propertyNames": {"pattern": "^[A-Za-z0-9_-]{1,64}$", "not": {"enum": [*agent.PERMISSION_DOMAINS]}},
        "additionalProperties": {
            "description": "A section of somebody else: tolerated, and without effect.",
            "type": ["object", "array"],
            "minItems": 1,
            "items": {"type": "object"},
        },
        "maxProperties": len(sections) + parse.UNKNOWN_SECTIONS,
        "allOf": [fragment for rule in agent.RULES for fragment in shapes.RULES[rule]],
    }


def for_tools() -> dict[str, Any]:
    """The schema of ``tools.json``."""
    return {
        "$schema": DIALECT,
        "$id": f"{_ID}tools.schema.json",
        "title": "tools.json",
        **_object(tools_document.ToolManifest, style=_JSON),
        "description": "The tools of an agent, in the format of Matrix. What this refuses, `covenant tools verify` "
        "refuses too; it also sees what no JSON Schema can say.",
        "$comment": _left(tools_shapes.LEFT),
        "allOf": [fragment for rule in tools_document.RULES for fragment in tools_shapes.RULES[rule]],
    }


def for_statement() -> dict[str, Any]:
    """The schema of the payload of ``agent.dsse.json``: an in-toto Statement v1 with our predicate."""
    return {
        "$schema": DIALECT,
        "$id": f"{_ID}statement.schema.json",
        "title": "The signed statement of an agent package",
        "description": "The payload of agent.dsse.json, an in-toto Statement v1. Times are Unix milliseconds.",
        "$comment": _left(_STATEMENT_LEFT),
        **_object(statements._Wire, style=_WIRE),  # noqa: SLF001 - only this module needs the form on the wire
    }


def text(document: dict[str, Any]) -> str:
    """A schema as its file: indented ASCII JSON."""
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"


def _left(items: tuple[str, ...]) -> str:
    return f"Left to the parser: {'; '.join(items)}."


def _object(model: type[pydantic.BaseModel], *, style: _Style) -> dict[str, Any]:
    """A closed object."""
    _no_unknown_checks(model)
    about = " ".join((model.__doc__ or "").split("\n")[0].split()).replace("``", "`")
    return {
        "type": "object",
        **({"description": about} if about and not style.whole else {}),
        "required": [
            info.alias or name for name, info in model.model_fields.items() if style.whole or info.is_required()
        ],
        "additionalProperties": False,
        "properties": {info.alias or name: _field(info, style=style) for name, info in model.model_fields.items()},
    }


def _no_unknown_checks(model: type[pydantic.BaseModel]) -> None:
    for name in model.__pydantic_decorators__.field_validators:
        if (model.__name__, name) not in shapes.DECORATED:
            raise LookupError(f"`{model.__name__}.{name}` says nothing in JSON Schema")


def _field(info: FieldInfo, *, style: _Style) -> dict[str, Any]:
    out = _shape(info.annotation, info.metadata, style=style)
    if info.description:
        out = {"description": info.description, **out}
    default = None if info.is_required() else info.default
    if isinstance(default, bool | int) or (isinstance(default, str) and default):
        out["default"] = default
    return out


def _shape(annotation: Any, metadata: list[Any], *, style: _Style) -> dict[str, Any]:
    """The fragment of a type and of the checks beside it."""
    for check in metadata:
        if isinstance(check, BeforeValidator):  # it makes the value: what the field holds afterwards is no matter
            return dict(_fragment(check.func))
    out = _type(annotation, style=style)
    for fragment in _checks(metadata):
        out = _and(out, fragment)
    return out


def _type(annotation: Any, *, style: _Style) -> dict[str, Any]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _TYPES:
        return {"type": _TYPES[annotation]}
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return _object(annotation, style=style)
    if origin is Literal:
        return {"const": inner[0]} if len(inner) == 1 else {"enum": list(inner)}
    if origin is typing.Annotated:
        return _shape(inner[0], _flat(annotation.__metadata__), style=style)
    if origin is dict:
        return {"type": "object"} | ({} if inner[1] is Any else {"additionalProperties": _type(inner[1], style=style)})
    if origin is tuple:
        return {"type": "array", "items": _type(inner[0], style=style)}
    if origin in (types.UnionType, typing.Union):
        some = [_type(one, style=style) for one in inner if one is not type(None)]
        absent = [{"type": "null"}] if style.null and type(None) in inner else []
        return {"anyOf": [*some, *absent]} if len(some) + len(absent) > 1 else some[0]
    raise LookupError(f"`{annotation}` has no shape in JSON Schema")


def _flat(metadata: tuple[Any, ...]) -> list[Any]:
    return [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _checks(metadata: list[Any]) -> Iterator[dict[str, Any]]:
    for check in metadata:
        if isinstance(check, AfterValidator):
            yield _fragment(check.func)
        else:
            yield {
                word: getattr(check, name) for name, word in _BOUNDS.items() if getattr(check, name, None) is not None
            }


def _fragment(check: Callable[..., Any]) -> dict[str, Any]:
    if hasattr(check, "pattern"):
        return {"pattern": shapes.whole(check.pattern)}
    for table in (shapes.VALIDATORS, tools_shapes.VALIDATORS):
        if check in table:
            return table[check]
    raise LookupError(f"`{check}` says nothing in JSON Schema")


def _and(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both fragments: side by side, or below ``allOf`` where they use the same word."""
    if not set(one) & set(other):
        return {**one, **other}
    return {**one, "allOf": [*one.get("allOf", ()), other]}
