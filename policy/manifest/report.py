"""From the schema's findings to one ManifestError: file, line and column, the offending value, what would be right.

All findings are collected; the first in the order of the file is the message, all of them stand in the details.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct
from pydantic import BaseModel, ValidationError

from policy import errors
from policy.manifest import agent, fields, lines, text

MOST = 100


class Problem(Struct, frozen=True):
    """One finding: where in the document, what is wrong, what would be right."""

    path: lines.Path
    message: str
    hint: str
    at_key: bool = False  # the key is to blame, not its value


def error(
    problems: Sequence[Problem], source: lines.ManifestFile, kind: type[errors.ManifestError] = errors.ManifestError
) -> errors.ManifestError:
    """The refusal for a non-empty list of findings; ``details["errors"]`` holds them all, in file order."""
    placed = sorted(problems, key=lambda p: source.place(p.path, key=p.at_key) or lines.Place(0, 0))
    documents = [
        {"message": p.message, "hint": p.hint or None, "where": source.point(p.path, key=p.at_key)}
        for p in placed[:MOST]
    ]
    first = placed[0]
    more = len(placed) - 1
    hint = first.hint if not more else f"{first.hint} (and {more} more: --json lists them)".strip()
    return kind(
        first.message,
        hint=hint,
        where=source.point(first.path, key=first.at_key),
        errors=documents,
        key=lines.dotted(first.path),
    )


def translate(found: ValidationError, document: Mapping[str, Any]) -> Iterator[Problem]:
    """pydantic's findings in the words of this project, which names no Python type."""
    for item in found.errors(include_url=False):
        context = item.get("ctx") or {}
        path: lines.Path = item["loc"]
        kind = item["type"]
        if kind == "structure":
            for where, message, hint in context["problems"]:
                yield Problem(lines.parse_dotted(where), message, hint)
        elif kind == "manifest":
            below = (context["at"],) if "at" in context else ()
            yield Problem((*path, *below), context["message"], context["hint"])
        else:
            yield _plain(kind, path, item["input"], context)


def _plain(kind: str, path: lines.Path, value: object, context: Mapping[str, Any]) -> Problem:
    name = lines.dotted(path)
    if kind == "missing":
        what = f"section `[{name}]`" if len(path) == 1 else f"`{name}`"
        return Problem(path, f"{what} is missing", "write it: it has no default")
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "literal_error":
        return _not_one_of(path, value)
    if kind in ("greater_than_equal", "less_than_equal"):
        low, high = _range(path)
        return Problem(path, f"{name} {text.quote(value)} is out of range", f"write a number from {low} to {high}")
    if kind == "too_long":
        return Problem(
            path,
            f"{name} has {context['actual_length']} items" if context.get("actual_length") else f"{name} is too long",
            f"at most {context['max_length']}",
        )
    wanted, hint = _WANTED.get(kind, ("another value", "see docs/manifest.md"))
    if kind == "tuple_type" and isinstance(value, dict):
        hint = f"write [[{name}]], with two brackets on each side"
    if kind == "model_type":
        hint = f"write [{name}] and its keys below it"
    shown = text.quote(value)
    is_what = f"is {shown}" if shown == text.kind_of(value) else f"{shown} is {text.kind_of(value)}"
    return Problem(path, f"{name} {is_what}, not {wanted}", hint)


_WANTED = {
    "string_type": ("a string", "put the value in quotes"),
    "int_type": ("an integer", "write a whole number without quotes or a decimal point"),
    "bool_type": ("a boolean", "write true or false without quotes"),
    "tuple_type": ("an array", "write the items in [ ], also a single one"),
    "model_type": ("a table", ""),
}


# Tables whose grants cannot wait for an operator, with the reason and the fix.
_NEVER_ASKED: Final[Mapping[tuple[str, ...], tuple[str, str]]] = {
    ("permissions", "filesystem"): (
        "files cannot be asked about: gVisor answers an open file call by itself, so none can be held",
        "take it out, and grant the path or not; `covenant denials RUN` names the line of a denied file",
    ),
}


def _unknown(path: lines.Path) -> Problem:
    *around, key = path
    if key in ("on_deny", "ask", "ask_seconds") and (never := _NEVER_ASKED.get(tuple(map(str, around)))):
        message, hint = never
        return Problem(path, message, hint, at_key=True)
    known = keys(tuple(around))
    where = f"[{lines.dotted(tuple(p for p in around if isinstance(p, str)))}]"
    begins = (k for k in known if k.startswith(str(key)) and len(str(key)) >= 3)
    near = next(begins, "") or text.nearest(str(key), known) or elsewhere(str(key))
    hint = f"did you mean `{near}`? " if near else ""
    what = "section" if where == "[permissions]" else "key"
    message = f"unknown {what} {text.quote(key)} in `{where}`"
    return Problem(path, message, f"{hint}known here: {', '.join(known)}", at_key=True)


def _not_one_of(path: lines.Path, value: object) -> Problem:
    name = lines.dotted(path)
    choices = _choices(path)
    if not isinstance(value, str):
        return Problem(path, f"{name} {text.quote(value)} is not a string", f"one of {', '.join(choices)}, in quotes")
    near = text.nearest(value, choices)
    hint = f"did you mean `{near}`? " if near else ""
    return Problem(path, f"{name} {text.quote(value)} is not known", f"{hint}one of {', '.join(choices)}")


def keys(path: lines.Path) -> tuple[str, ...]:
    """The keys of the table at a path of the schema, in the order of the schema."""
    model: type[BaseModel] = agent.Manifest
    for part in path:
        if isinstance(part, str):
            model = next(models(fields.keys(model)[part].annotation))
    return tuple(fields.keys(model))


def elsewhere(key: str) -> str:
    """Where a key belongs that stands in the wrong place: a section, or ``section.key``; else empty."""
    if key in agent.Manifest.model_fields:
        return f"[{key}]"
    return next((f"{s}.{key}" for s in agent.Manifest.model_fields if key in keys((s,))), "")


def _field(path: lines.Path) -> Any:
    *around, last = (part for part in path if isinstance(part, str))
    model: type[BaseModel] = agent.Manifest
    for part in around:
        model = next(models(fields.keys(model)[part].annotation))
    return fields.keys(model)[last]


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section models in an annotation such as ``tuple[NetworkEntry, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, fields.Section):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models(inner)


def _choices(path: lines.Path) -> tuple[str, ...]:
    return tuple(literals(_field(path).annotation))


def literals(annotation: Any) -> Iterator[str]:
    """The values of every Literal in an annotation."""
    if typing.get_origin(annotation) is Literal:
        yield from typing.get_args(annotation)
    else:
        for inner in typing.get_args(annotation):
            yield from literals(inner)


def _range(path: lines.Path) -> tuple[int, int]:
    return bounds(_field(path).metadata)


def bounds(metadata: Sequence[Any]) -> tuple[int, int]:
    """The lowest and the highest accepted integer of a field's metadata."""
    low = next(m.ge for m in metadata if hasattr(m, "ge"))
    high = next(m.le for m in metadata if hasattr(m, "le"))
    return low, high
