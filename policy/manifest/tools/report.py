"""JSON documents of a package: read strictly, and their findings as one refusal, each at its line and column."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from policy import errors
from policy.manifest import lines, report, text
from policy.manifest.tools import json_places
from policy.signing import strict_json

_PLACE = re.compile(r"not JSON at line (\d+) column (\d+)")
_NO_DEFAULT = "write it: it has no default"
_WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "bool_type": "true or false",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),
    (int, "a number"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
)


def load(raw: bytes, file: str, *, max_bytes: int, nesting: int) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        errors.ToolsError: too large, too deep, not UTF-8, not JSON, a key twice, no object, or a boolean for a version.
    """
    try:
        document = strict_json.loads(raw, max_bytes=max_bytes)
    except strict_json.MalformedJsonError as e:
        raise errors.ToolsError(f"`{file}` is {e}", hint=_mend(str(e)), where=_malformed(raw, str(e), file)) from None
    if not isinstance(document, dict):
        raise errors.ToolsError(f"`{file}` is {_shown(document)}, not an object", where=f"{file}:1:1")
    _bound(document, file, nesting)
    if document.get("schema_version") is True:  # which is 1 to Python, and to the models, and to no other reader
        where = point(json_places.scan(raw.decode()), ("schema_version",), key=False, file=file)
        raise errors.ToolsError("schema_version is a boolean, not 1", hint="write the number", where=where)
    return document


def _mend(reason: str) -> str:
    return "numbers are whole" if "not an integer" in reason else "the document is one JSON object in UTF-8"


def _malformed(raw: bytes, reason: str, file: str) -> str:
    if found := _PLACE.search(reason):
        return f"{file}:{found[1]}:{found[2]}"
    if "stands twice" in reason:
        twice = json_places.scan(raw.decode("utf-8", "replace")).duplicates
        if twice:
            place = lines.place_at(raw.decode("utf-8", "replace"), twice[0][1])
            return f"{file}:{place.line}:{place.column}"
    return file


def _bound(document: object, file: str, nesting: int) -> None:
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > nesting:
            raise errors.ToolsError(f"`{file}` is nested more than {nesting} deep", hint="shorten it", where=file)
        level = [inner for value in level for inner in _inner(value) if isinstance(inner, dict | list)]


def _inner(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def point(places: json_places.JsonScan, path: lines.Path, *, key: bool, file: str) -> str:
    """``FILE:LINE:COLUMN`` of a value or its key."""
    place = places.place(path, key=key)
    return f"{file}:{place.line}:{place.column}"


def refusal(found: ValidationError, document: str, file: str, root: type[BaseModel]) -> errors.ToolsError:
    """One error for all findings of the models and the rules, in the order of the file."""
    places = json_places.scan(document)
    placed = sorted(_problems(found, root), key=lambda p: places.place(p.path, key=p.at_key))
    documents = [
        {"message": p.message, "hint": p.hint or None, "where": point(places, p.path, key=p.at_key, file=file)}
        for p in placed[: report.MOST]
    ]
    first, more = placed[0], len(placed) - 1
    hint = first.hint if not more else f"{first.hint} (and {more} more: --json lists them)".strip()
    return errors.ToolsError(first.message, hint=hint, where=documents[0]["where"] or "", errors=documents)


def _problems(found: ValidationError, root: type[BaseModel]) -> Iterator[report.Problem]:
    for item in found.errors(include_url=False):
        context: Mapping[str, Any] = item.get("ctx") or {}
        path: lines.Path = item["loc"]
        if item["type"] == "rules":
            yield from context["problems"]
        elif item["type"] == "manifest":
            below = (context["at"],) if "at" in context else ()
            yield report.Problem((*path, *below), context["message"], context["hint"])
        else:
            yield _plain(item["type"], path, item["input"], context, root)


def _plain(
    kind: str, path: lines.Path, value: object, context: Mapping[str, Any], root: type[BaseModel]
) -> report.Problem:
    name = text.visible(lines.dotted(path))
    if kind == "missing":
        choices = ", ".join(_choices(path, root))
        return report.Problem(path, f"`{name}` is missing", f"write one of {choices}" if choices else _NO_DEFAULT)
    if kind == "extra_forbidden":
        return _unknown(path, root)
    if kind == "literal_error":
        return _choice(path, value, str(context["expected"]))
    if kind in ("greater_than_equal", "less_than_equal"):
        word = "least" if kind == "greater_than_equal" else "most"
        return report.Problem(
            path, f"{name} {text.quote(value)} is out of range", f"at {word} {next(iter(context.values()))}"
        )
    if kind == "too_long":
        return report.Problem(path, f"{name} has too many items", f"at most {context['max_length']}")
    return report.Problem(path, f"{name} is {_shown(value)}, not {_WANTED.get(kind, 'what it should be')}", "")


def _model(around: Iterable[str | int], root: type[BaseModel]) -> type[BaseModel]:
    """Return the model of the object at a path below the document."""
    model = root
    for part in around:
        # A key that is no field names an item, such as a server in the pins.
        if part in model.model_fields:
            model = next(report.models(model.model_fields[part].annotation), model)
    return model


def _choices(path: lines.Path, root: type[BaseModel]) -> tuple[str, ...]:
    """Return the texts that the key at a path may have, where they are a closed set."""
    *around, key = path
    field = _model(around, root).model_fields.get(str(key))
    return tuple(map(str, get_args(field.annotation))) if field and get_origin(field.annotation) is Literal else ()


def _unknown(path: lines.Path, root: type[BaseModel]) -> report.Problem:
    *around, key = path
    known = tuple(_model(around, root).model_fields)
    near = text.nearest(str(key), known)
    hint = f"did you mean `{near}`? " if near else ""
    where = f"`{text.visible(lines.dotted(tuple(around)))}`" if around else "the document"
    return report.Problem(
        path, f"unknown key {text.quote(key)} in {where}", f"{hint}known here: {', '.join(known)}", at_key=True
    )


def _choice(path: lines.Path, value: object, expected: str) -> report.Problem:
    known = tuple(re.findall(r"'([^']*)'", expected)) or (expected,)
    near = text.nearest(value, known) if isinstance(value, str) else ""
    hint = f"did you mean `{near}`? " if near else ""
    name = text.visible(lines.dotted(path))
    return report.Problem(path, f"{name} {text.quote(value)} is not known", f"{hint}one of {', '.join(known)}")


def _shown(value: object) -> str:
    return next((word for types, word in _KINDS if isinstance(value, types)), "null")
