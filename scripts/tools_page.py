"""docs/tools.md, derived from the models, the rules and the tables of checks.

tests/golden/test_tools_page.py holds the page to this module and regenerates it.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from policy.manifest import report
from policy.manifest.tools import advertised, checks, document, pins, server_package, tool_uri

COMMAND = "python tests/golden/test_tools_page.py"

_URI = "matrix://tool/mcp/fs/read_text_file@2026.1.14"
# Files as sha256sum prints them, and links with the digest of their text, in the order of their paths.
_DIGEST = (
    r"cd mine/tools/fs && { find . -type f -printf '%P\n' | xargs -rd '\n' sha256sum; "
    r"find . -type l -printf '%P\n' | while IFS= read -r link; do "
    r"""printf 'link:%s  %s\n' "$(readlink -n "$link" | sha256sum | cut -c-64)" "$link"; done; } """
    r"| LC_ALL=C sort -k2 | sha256sum"
)

_INTRO = f"""\
# tools.json

<!-- Written by `{COMMAND}`; do not edit. -->

`{document.FILE}` beside `agent.toml` names the tools of an agent: MCP servers, in the format of Matrix, read strictly
([schema](schema/tools.schema.json)). A running agent calls them at `http://tools.covenant/mcp`
([tool-calls.md](tool-calls.md)), or the file runs without a package. These commands work offline, without root:

```sh
covenant tools list mine          # URI, class of side effect, granted or why not
covenant tools pin mine           # writes the digests: package_digest in {document.FILE}, each tool's in {pins.LOCK}
covenant tools verify mine        # status 0, or 3 with every reason why not
covenant manifest schema --tools > tools.schema.json
```

- At most {document.MAX_BYTES:,} bytes, nested at most {document.NESTING} deep.
- Absent allows nothing. A tool may be called when its URI is in `allow` and its class in `side_effects` of
  `[permissions.skills]`, and its class in `allowed_side_effects` here.

## Tool URIs

{{uris}}

A version is one release, no tag or range.

## The package of a server

The directory `tools/fs/` of the agent's package, here `mine`, is the published package of the stdio server `fs`, as
it is mounted and run. npm makes it with all that it needs; the links of `node_modules/.bin` are part of it
([ADR 0150](adr/0150-links-of-a-package-stay-in-it.md)):

```sh
npm install --prefix mine/tools/fs @modelcontextprotocol/server-filesystem@2026.1.14
```

The whole `mine/tools.json` of an agent with the id `mine`, at first without the tools:

```json
{{"schema_version": 1, "agent": "matrix://agent/mine", "allowed_side_effects": ["read"], "servers": [
  {{"alias": "fs", "transport": "stdio", "version": "2026.1.14", "command": "node",
   "args": ["node_modules/@modelcontextprotocol/server-filesystem/dist/index.js", "/tmp"],
   "tools": []}}]}}
```

`covenant tools advertised mine fs` prints the list `tools`. Write it into the file, fill in each `side_effect_class`,
and run `covenant tools pin mine`. It adds `package_digest`, the SHA-256 of the listing:

```sh
{_DIGEST}
```

Its `command` is `node` or `python3` with a script of that directory, or a program of it by a path (`./server`).
Commands that fetch what they run ({{fetchers}}) do not verify. `covenant tools pin` also replaces a placeholder
of the digest. `{pins.LOCK}` keeps the SHA-256 of each tool's name, description and input schema.

## A server in its sandbox

A stdio server runs as `AGENT.ALIAS` in a sandbox of its own: {server_package.MEMORY_MB} MiB of memory,
{server_package.DISK_MB} MiB of `/tmp`, no network, no file of the host. A server of the transport http is asked by a
relay that reaches its host alone. As root, without secrets:

```sh
covenant tools advertised mine fs       # what the server says, as the list `tools`, without the classes
covenant tools verify mine --live       # starts each server; status 3 where it says anything else
covenant tools call {_URI} --package mine --args '{{"path": "/tmp/notes"}}'
covenant tools serve mine fs            # its stdin and stdout: what an MCP client is told to start
```

A server of the transport daemon is the daemon that started the run
([tool-calls.md](tool-calls.md#tools-of-the-daemon)).

Each call is checked in this order: the package verifies; tool and class are granted; size and rules of the arguments;
`input_schema`; the rate; the server advertises what is declared. Requests of a server to its client are refused
([ADR 0086](adr/0086-a-call-is-held-to-its-manifest.md))."""


def page() -> str:
    """The whole page, as Markdown."""
    fetchers = ", ".join(f"`{name}`" for name in ("npx", "uvx", "docker") if name in checks.FETCHERS)
    intro = _INTRO.replace("{uris}", "\n".join(_uris())).replace("{fetchers}", fetchers)
    return "\n".join([intro, *_objects(), *_codes()]) + "\n"


def _uris() -> Iterator[str]:
    yield "| form | |"
    yield "|---|---|"
    for prefix, what in tool_uri.FORMS.values():
        yield f"| `{prefix}<{what}>/<name>@<version>` | {what}: {tool_uri.PARTS['space'][1]} |"
    yield ""
    yield f"A name is {tool_uri.PARTS['name'][1]}, a version {tool_uri.PARTS['version'][1]}."


def _objects() -> Iterator[str]:
    for heading, model in (
        ("The document", document.ToolManifest),
        ("servers[]", document.Server),
        ("servers[].tools[]", document.Tool),
        ("native_tools[]", document.NativeTool),
    ):
        about = (model.__doc__ or "").split("\n")[0].split(": ", 1)[-1].replace("``", "`")
        yield from ("", f"## {heading}", "", f"{about[:1].upper()}{about[1:]}", "")
        yield from ("| key | value | meaning |", "|---|---|---|")
        for key, info in model.model_fields.items():
            yield f"| `{key}` | {_value(info)}{_default(info)} | {info.description or ''} |"


def _value(info: FieldInfo) -> str:
    """The type of a key in JSON's words."""
    shape: Any = info.annotation
    if typing.get_origin(shape) in (types.UnionType, typing.Union):
        shape = next(a for a in typing.get_args(shape) if a is not type(None))
    values: list[Any] = list(report.literals(shape))
    choices = ", ".join(f"`{json.dumps(value)}`" for value in values)
    if typing.get_origin(shape) is tuple:
        inner = next(iter(report.models(shape)), None)
        return "array of objects" if inner else f"array of {choices or 'strings'}"
    if typing.get_origin(shape) is dict:
        return "object" if typing.get_args(shape)[1] is Any else "object of strings"
    if shape is int:
        low, high = report.bounds(info.metadata)
        return f"integer, {low} to {high}"
    return choices or "string"


def _default(info: FieldInfo) -> str:
    """The value where the key is absent, or that it must not be."""
    if info.is_required():
        return ", required"
    return f"; `{info.default}`" if isinstance(info.default, int) else ""


def _codes() -> Iterator[str]:
    yield from ("", "## What does not verify", "", "| code | meaning |", "|---|---|")
    for code, meaning in {**checks.CODES, **advertised.CODES}.items():
        yield f"| `{code}` | {meaning} |"
