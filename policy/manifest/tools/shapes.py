"""JSON Schema of each check of a tool manifest: as ``shapes`` for ``agent.toml``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policy.manifest import digests
from policy.manifest.shapes import HIDDEN, Fragment, unpinned, whole
from policy.manifest.tools import document, tool_uri

_WORD: Fragment = {"pattern": whole(f"[^{HIDDEN}]*")}
# Neither a reference nor part of one. What looks like a secret is left to the parser.
_NO_REFERENCE: Fragment = {"not": {"pattern": r"\$\{?(?:[eE][nN][vV]|[cC][rR][eE][dD][eE][nN][tT][iI][aA][lL])"}}
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]{0,127}"
_ENV = r"\$env:[A-Za-z][A-Za-z0-9_]{0,127}"
_REFERENCE = rf"{_ENV}|\$credential:[A-Za-z0-9][A-Za-z0-9_.-]{{0,127}}"
_CONTENT: Fragment = {"anyOf": [{"pattern": whole(_REFERENCE)}, {**_WORD, **_NO_REFERENCE}]}

VALIDATORS: dict[Callable[..., Any], Fragment] = {
    document._prose: {  # noqa: SLF001 - the checks of the same room, by themselves
        "maxLength": document.DESCRIPTION_CHARACTERS,
        # Lines and tabs are the two controls that text of several lines has.
        "pattern": whole(rf"(?:[^{HIDDEN}]|[\t\n])*"),
    },
    document._word: {**_WORD, **_NO_REFERENCE},  # noqa: SLF001
    document._words: {},  # noqa: SLF001 - whether it holds a secret is left to the parser
    document._schema: {},  # noqa: SLF001 - as is any text at any depth
    document._variable: {  # noqa: SLF001
        "anyOf": [
            {"pattern": whole(f"{_ENV}|{_VARIABLE}=(?:{_REFERENCE})")},
            {"pattern": whole(f"{_VARIABLE}(?:=[^{HIDDEN}]*)?"), **_NO_REFERENCE},
        ]
    },
    document._headers: {  # noqa: SLF001
        "propertyNames": {"pattern": r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}$"},
        "additionalProperties": {"type": "string", **_CONTENT},
    },
    document._endpoint: {"pattern": r"^https://[^/?#@\\ ]+(?:/[^?#@\\ ]*)?$"},  # noqa: SLF001
    tool_uri.pinned: {"pattern": whole(tool_uri.PARTS["version"][0]), "not": {"pattern": f"^{unpinned()}"}},
    digests.well_formed: {"pattern": r"^sha256:(?:[0-9a-f]{64}|[0-9a-f]{0,63}(?:\u2026|\.\.\.))$"},
}
"""The JSON Schema of each validator of a value."""


def _empty(key: str) -> Fragment:
    return {"maxProperties": 0} if key == "headers" else {"maxItems": 0} if key in ("args", "env") else {"type": "null"}


def _server() -> tuple[Fragment, ...]:
    """Require the keys of each transport, and none of the others."""
    out = []
    for transport, (needed, _) in document.TRANSPORTS.items():
        theirs = [
            key for other, keys in document.TRANSPORTS.items() if other != transport for part in keys for key in part
        ]
        then: Fragment = {
            "required": [*needed],
            "properties": {
                **{key: {"not": {"type": "null"}} for key in needed},
                **{key: _empty(key) for key in theirs},
            },
        }
        is_it: Fragment = {"properties": {"transport": {"const": transport}}, "required": ["transport"]}
        out.append({"if": is_it, "then": then})
    return tuple(out)


RULES: dict[Callable[..., Any], tuple[Fragment, ...]] = {
    document._transport: (  # noqa: SLF001
        {
            "properties": {
                "servers": {
                    "items": {"allOf": [*_server()]},
                    "contains": {"properties": {"transport": {"const": "daemon"}}, "required": ["transport"]},
                    "minContains": 0,
                    "maxContains": 1,
                }
            }
        },
    ),
    document._no_tool_of_a_server: (  # noqa: SLF001
        {"properties": {"servers": {"items": {"properties": {"tools": {"minItems": 1}}}}}},
    ),
    document._aliases: (  # noqa: SLF001 - and what stands twice by its name alone: LEFT
        {
            "properties": {
                "native_tools": {"items": {"properties": {"namespace": {"not": {"const": tool_uri.RESERVED}}}}}
            }
        },
    ),
}
"""The JSON Schema of each rule between keys."""

LEFT = (
    "the size of the document, its depth, a key that stands twice in one object",
    "a number written with a fraction of zero, and fractions inside an input schema, which are refused",
    "hidden characters inside an input schema",
    "whether a literal looks like a secret, or stands under the name of one",
    "which host and port an endpoint may name, and which variables choose the code that runs",
    "an alias, a tool, a variable or a native tool that is listed twice",
)
"""The checks of the parser that a schema cannot express."""
