"""Check the arguments of a tool against its full schema (JSON Schema 2020-12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jsonschema_rs
from jsonschema_rs import Draft202012Validator

from policy import errors, wire_json

_SHOWN: Final = 120
# Keywords whose error contains the errors of several schemas.
_CHOICES: Final = frozenset({"anyOf", "oneOf"})


def compiled(schema: dict[str, Any]) -> Draft202012Validator:
    """Compile a schema.

    Raises:
        jsonschema_rs.ValidationError: it is invalid, refers to another document, or has a pattern that the linear
            engine lacks.
        errors.MalformedRequestError: it is nested too deeply.
    """
    # INVARIANT: a `$ref` fetches nothing, and patterns run in Rust's linear engine: the default one backtracks on
    # `^(a+)+$` to each `a` (the tests of tools show both).
    wire_json.check_depth(schema)
    return Draft202012Validator(schema, retriever=_refuse, pattern_options=jsonschema_rs.RegexOptions())


def check(name: str, schema: dict[str, Any], validator: Draft202012Validator, arguments: Any) -> None:
    """Check the arguments of the tool ``name`` against its compiled schema.

    Raises:
        errors.ToolArgumentsError: they do not fit; ``where`` is the JSON pointer of the misfit. The error does not
            contain the arguments.
    """
    try:
        # The validator recurses on the C stack without a limit of its own: 20,000 levels end a thread with SIGSEGV.
        wire_json.check_depth(arguments)
        wrong = _best(list(validator.iter_errors(arguments)))
    except errors.MalformedRequestError:
        raise errors.ToolArgumentsError("the arguments are nested too deeply") from None
    except UnicodeEncodeError:
        raise errors.ToolArgumentsError("the arguments contain a lone surrogate") from None
    if wrong is not None:
        pointer = "".join(f"/{_escaped(step)}" for step in wrong.instance_path)
        # The validator names `required` for `dependentRequired` too.
        keyword = wrong.schema_path[-1] if wrong.kind.name == "required" else wrong.kind.name
        wanted = str(_wanted(schema, wrong.schema_path))
        raise errors.ToolArgumentsError(
            f"arguments{pointer}: not as `{keyword}` of the schema of `{name}` says",
            hint=f"{keyword}: {wanted[:_SHOWN]}{'...' if len(wanted) > _SHOWN else ''}",
            where=pointer or "/",
        )


def _refuse(uri: str) -> Any:
    raise LookupError(f"`{uri[:_SHOWN]}` is another document, and none is fetched")


def _best(found: list[jsonschema_rs.ValidationError]) -> jsonschema_rs.ValidationError | None:
    """Return the error nearest to the root; of a choice between schemas, the one error that got furthest, if any."""
    if not found:
        return None
    best = min(found, key=lambda error: (len(error.instance_path), error.kind.name in _CHOICES))
    while best.kind.name in _CHOICES:
        inside = [error for branch in getattr(best.kind, "context", []) for error in branch]
        furthest = max((len(error.instance_path) for error in inside), default=0)
        nearest = [error for error in inside if len(error.instance_path) == furthest]
        if len(nearest) != 1:
            break
        best = nearest[0]
    return best


def _wanted(schema: Any, path: Sequence[str | int]) -> Any:
    """Return what the schema says at a path, which holds no `$ref`: the validator has resolved them."""
    for step in path:
        schema = schema[step]
    return schema


def _escaped(step: str | int) -> str:
    return str(step)[:_SHOWN].replace("~", "~0").replace("/", "~1")
