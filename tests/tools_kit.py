"""A tool manifest with every key, and packages around it."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from policy import package as packages
from policy.manifest.agent import Manifest
from policy.manifest.parse import parse as parse_manifest
from policy.manifest.tools import document as tools_document
from policy.manifest.tools import pins
from tests import signing_kit

SEED = (pathlib.Path(__file__).resolve().parent / "golden" / "tools" / "seed.json").read_bytes()
FILLER = f"sha256:{'0' * 64}"
DIGEST = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
FULL: dict[str, Any] = {
    "schema_version": 1,
    "agent": "matrix://agent/hello",
    "description": "Reads files,\nand the weather.",
    "allowed_side_effects": ["read", "write", "network", "chain"],
    "servers": [
        {
            "alias": "fs",
            "transport": "stdio",
            "command": "node",
            "args": ["dist/index.js", "/workspace"],
            "env": ["LOG_LEVEL=info", "$env:FS_KEY", "API_KEY=$credential:fs-key"],
            "package_digest": FILLER,
            "version": "2026.1.14",
            "tools": [
                {
                    "name": "read_text_file",
                    "description": "Read a file",
                    "side_effect_class": "read",
                    "timeout_ms": 5000,
                    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
                },
                {"name": "write_file", "description": "Write a file", "side_effect_class": "write"},
            ],
        },
        {
            "alias": "weather",
            "transport": "http",
            "endpoint": "https://weather.example.com:8443/mcp",
            "headers": {"Accept": "application/json", "Authorization": "$credential:weather"},
            "version": "3",
            "tools": [{"name": "today", "description": "The weather", "side_effect_class": "network"}],
        },
    ],
    "native_tools": [
        {"namespace": "chain", "name": "balance", "version": "1.0", "digest": DIGEST, "description": "Credits left"}
    ],
}
READ, WRITE = "matrix://tool/mcp/fs/read_text_file@2026.1.14", "matrix://tool/mcp/fs/write_file@2026.1.14"
TODAY, BALANCE = "matrix://tool/mcp/weather/today@3", "matrix://tool/chain/balance@1.0"
SERVER_FILES = {"tools/fs/dist/index.js": b"// a server\n", "tools/fs/package.json": b"{}\n"}
GRANTS = f"""
[permissions.credentials]
grants = ["FS_KEY", "fs-key", "weather"]

[permissions.skills]
allow = ["{READ}", "{TODAY}"]
side_effects = ["read", "network"]
"""


def full(*path: str | int, value: Any = None, drop: bool = False) -> dict[str, Any]:
    """The full document, with the value at a path put there or dropped."""
    document = copy.deepcopy(FULL)
    if path:
        around: Any = document
        for part in path[:-1]:
            around = around[part]
        if drop:
            del around[path[-1]]
        else:
            around[path[-1]] = value
    return document


def text(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode()


def package(
    document: dict[str, Any] | bytes,
    *,
    grants: str = GRANTS,
    pin: bool = True,
    files: Mapping[str, bytes] | None = None,
) -> packages.Package:
    """A package of the agent ``hello`` with these tools, pinned unless told otherwise.

    With a server of the transport http it has the network that this needs.
    """
    raw = document if isinstance(document, bytes) else text(document)
    network = b'network = "full"' if b'"transport": "http"' in raw else b'network = "off"'
    contents = {
        "agent.toml": signing_kit.MANIFEST.replace(b'network = "off"', network) + grants.encode(),
        "main.py": b"print('hi')\n",
        tools_document.FILE: raw,
        **SERVER_FILES,
        **(files or {}),
    }
    read = packages.Package(contents)
    if pin:
        pinned, lock = pins.pin(read, tools_document.parse(raw))
        read = packages.Package({**contents, tools_document.FILE: pinned, pins.LOCK: lock})
    return read


def changed(read: packages.Package, files: Mapping[str, bytes | None]) -> packages.Package:
    """The package with files replaced, added or, where None, taken away."""
    merged = {**read.files, **files}
    return packages.Package({path: data for path, data in merged.items() if data is not None})


def manifest(read: packages.Package) -> Manifest:
    return parse_manifest(read.manifest)


def written(folder: pathlib.Path, read: packages.Package) -> pathlib.Path:
    """Write the files of a package, and return the folder."""
    for name, data in read.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
