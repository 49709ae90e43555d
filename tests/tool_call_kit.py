"""A package of one tool server with rules and limits, and its calls that must be refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from policy import data
from policy.grants.skills import SkillSet
from policy.manifest import parse
from policy.manifest.tools import document
from policy.manifest.tools.document import ToolManifest
from policy.rules import nine
from sandbox.network.tools.guard import ToolGuard
from tests import signing_kit

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "paths": {"type": "array", "items": {"type": "string"}},
        "mode": {"enum": ["r", "w", "rw", 1, True]},
        "depth": {"type": "integer", "minimum": 0},
        "tail": {"type": "integer"},
    },
    "additionalProperties": False,
}
CLASSES = ("read", "write", "network", "shell", "chain")


def uri(name: str) -> str:
    return f"matrix://tool/mcp/fs/{name}@1.0"


def tool(name: str, side_effect: str = "read", **more: Any) -> dict[str, Any]:
    return {
        "name": name, "description": f"Do {name}", "side_effect_class": side_effect, "input_schema": SCHEMA, **more,
    }  # fmt: skip


TOOLS = [
    tool("open"), tool("ruled"), tool("listed"), tool("moded"), tool("stat", timeout_ms=5000), tool("hidden"),
    *(tool(f"do_{effect}", effect) for effect in CLASSES),
]  # fmt: skip
DOCUMENT: dict[str, Any] = {
    "schema_version": 1,
    "agent": "matrix://agent/hello",
    "allowed_side_effects": ["read", "write", "network"],
    "servers": [
        {
            "alias": "fs", "transport": "stdio", "command": "python3", "args": ["server.py"], "version": "1.0",
            "package_digest": "sha256:" + "0" * 64, "tools": TOOLS,
        }
    ],
}  # fmt: skip


def rule(name: str, argument: str, **condition: Any) -> str:
    ((kind, value),) = condition.items()
    return (
        f'\n[[permissions.skills.rule]]\ntool = "{uri(name)}"\nargument = "{argument}"\n{kind} = {json.dumps(value)}\n'
    )


GRANTED = ["open", "ruled", "listed", "moded", "stat", *(f"do_{effect}" for effect in CLASSES)]
SKILLS = f"""
[permissions.skills]
allow = {json.dumps([uri(name) for name in GRANTED])}
side_effects = ["read"]
calls_per_minute = 5
call_ms = 2000
argument_bytes = 400
answer_bytes = 1000
"""
RULES = (
    rule("ruled", "path", matches="/data/[a-z]+")
    + rule("ruled", "path", equals="/etc/hostname")
    + rule("listed", "paths", matches="/data/[a-z]+")
    + rule("moded", "mode", one_of=["r", 1])
    + rule("moded", "depth", equals=0)
)
MANIFEST = signing_kit.MANIFEST.decode() + SKILLS + RULES


@functools.cache
def skills(manifest: str = MANIFEST) -> SkillSet:
    return nine.requested(parse.parse(manifest.encode()), roles=data.roles()).skills


def tools(whole: Mapping[str, Any] = DOCUMENT) -> ToolManifest:
    return _parsed(json.dumps(whole))


@functools.cache
def _parsed(text: str) -> ToolManifest:
    return document.parse(text.encode())


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Guarded:
    """A guard with its log and its clock."""

    def __init__(self, manifest: str = MANIFEST, whole: Mapping[str, Any] = DOCUMENT) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []
        self.clock = Clock()
        self.tools = tools(whole)
        self.guard = ToolGuard(
            skills(manifest), self.tools, lambda kind, row: self.rows.append((kind, dict(row))), clock=self.clock
        )


class Case(Struct, frozen=True):
    """A call that is refused by ``code``. ``fixed`` says that a line of agent.toml ends it."""

    name: str
    tool: str
    arguments: dict[str, Any]
    code: str
    fixed: bool = True


PATHS = (
    "", "/", "/data", "/data/", "/data/A", "/data/a/b", "/data/../etc", "/data/a\n", "\n/data/a", "/DATA/a", "data/a",
    "/data/a ", " /data/a", "//data/a", "/data//a", "/etc/hostname2", "/etc/hostnam", "/etc/Hostname", "/etc/hostname/",
    "/data/a\x00", "/data/\u0430", "/data/é", "file:///data/a", "/data/a;rm", "$(x)", "`x`", "/data/*", "/data/[a-z]+",
    "C:\\data", "..", ".", "~", "/data/a\u202e", "/data/\ud800",
)  # fmt: skip
NO_TEXT: tuple[Any, ...] = (None, 0, 1, -1, True, False, 1.5, [], {}, [1], ["/data/a", 1], {"path": "/data/a"})


def _is_plain(value: str) -> bool:
    return value.isprintable() or value in ("/data/é", "/data/\u0430")


def refused() -> Iterator[Case]:
    """Every call that must be refused."""
    yield from _of_tools()
    yield from _of_rules()
    yield from _of_schemas()
    for size in (401, 500, 1000, 5000, 100_000):
        yield Case(f"size {size}", "open", {"path": "x" * (size - len('{"path":""}'))}, "argument_bytes")
    yield Case("size not ASCII", "open", {"path": "é" * 70}, "argument_bytes")
    yield Case("size of all", "open", {"path": "x" * 5_000_000}, "argument_bytes", fixed=False)


def _of_tools() -> Iterator[Case]:
    for name in ("", "Open", "open ", "OPEN", "opens", "ope", "../open", "open@1.0", "delete_file", "open\n", "*"):
        yield Case(f"undeclared {name!r}", name, {}, "unknown_tool", fixed=False)
    for number in range(20):
        yield Case(f"undeclared {number}", f"tool_{number}", {"path": "/data/a"}, "unknown_tool", fixed=False)
    yield Case("not listed", "hidden", {"path": "/data/a"}, "not_granted")
    for effect in ("write", "network", "shell", "chain"):
        yield Case(f"class {effect}", f"do_{effect}", {}, "not_granted", fixed=effect in ("write", "network"))


def _of_rules() -> Iterator[Case]:
    for path in PATHS:
        yield Case(f"path {path!r}", "ruled", {"path": path}, "arguments", fixed=_is_plain(path))
        yield Case(f"paths {path!r}", "listed", {"paths": ["/data/a", path]}, "arguments", fixed=_is_plain(path))
    for value in NO_TEXT:
        yield Case(f"path {value!r}", "ruled", {"path": value}, "arguments", fixed=False)
        yield Case(f"paths {value!r}", "listed", {"paths": [value]}, "arguments", fixed=False)
    yield Case("path absent", "ruled", {}, "arguments", fixed=False)
    yield Case("paths absent", "listed", {}, "arguments", fixed=False)
    yield Case("paths empty", "listed", {"paths": []}, "arguments", fixed=False)
    yield Case("other argument", "ruled", {"paths": ["/data/a"]}, "arguments", fixed=False)
    for mode in ("w", "rw", True, "R", "", "r ", 0, 2, False, "1", "true", None, 1.0, ["r", "w"], ["r", True]):
        yield Case(
            f"mode {mode!r}",
            "moded",
            {"mode": mode, "depth": 0},
            "arguments",
            fixed=mode in ("w", "rw") or mode is True,
        )
    for depth in (1, -1, "0", False, None, 0.0, [0, 1]):
        fixed = depth == 1 and depth is not True
        yield Case(f"depth {depth!r}", "moded", {"mode": "r", "depth": depth}, "arguments", fixed=fixed)
    yield Case("both", "moded", {"mode": "w", "depth": 7}, "arguments")


def _of_schemas() -> Iterator[Case]:
    for extra in ("x", "Path", "path ", "__proto__", "$schema", "constructor", "", "depth2", "cmd", "\u202e"):
        yield Case(f"extra {extra!r}", "open", {extra: "v"}, "schema", fixed=False)
        yield Case(f"extra of ruled {extra!r}", "ruled", {"path": "/data/a", extra: 1}, "schema", fixed=False)
    for name, value in (
        ("path", 1), ("path", None), ("path", ["a"]), ("path", {}), ("path", True), ("paths", "a"), ("paths", [1]),
        ("paths", {}), ("paths", None), ("mode", "x"), ("mode", 2), ("mode", False), ("depth", -1), ("depth", "1"),
        ("depth", 1.5), ("depth", None), ("depth", True), ("tail", "1"), ("tail", 2.5), ("tail", []),
    ):  # fmt: skip
        yield Case(f"type {name} {value!r}", "open", {name: value}, "schema", fixed=False)


ALLOWED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("open", {}), ("open", {"path": "../../etc"}), ("open", {"path": "x" * 389}), ("ruled", {"path": "/data/a"}),
    ("ruled", {"path": "/etc/hostname"}), ("ruled", {"path": "/data/a", "tail": 3}), ("listed", {"paths": ["/data/a"]}),
    ("listed", {"paths": ["/data/a", "/data/b"]}), ("moded", {"mode": "r", "depth": 0}),
    ("moded", {"mode": 1, "depth": 0}), ("stat", {"depth": 5}), ("do_read", {"mode": True}),
)  # fmt: skip
