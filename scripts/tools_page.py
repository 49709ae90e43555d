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
from policy.manifest.tools import advertised, checks, document, pins, server_package, shapes, tool_uri
from sandbox.network.tools import desk, server

COMMAND = "python tests/golden/test_tools_page.py"

_URI = "matrix://tool/mcp/fs/read_text_file@2026.1.14"
_INTRO = f"""\
# tools.json

Written by `{COMMAND}` from the models in `policy/manifest`; do not edit.

An agent's tools stand in `{document.FILE}` beside `agent.toml`, in the format of Matrix, read strictly. It is a file of
the package, so it is signed with the rest. A running agent calls its tools at `http://tools.covenant/mcp`. The commands
of the first block work offline, without root, and start no server.

```sh
covenant tools list mine          # URI, class of side effect, granted or why not
covenant tools pin mine           # writes the digests: package_digest in {document.FILE}, each tool's in {pins.LOCK}
covenant tools verify mine        # status 0, or 3 with every reason why not
covenant tools describe mine {_URI}
covenant manifest schema --tools > tools.schema.json
```

- The file is one JSON object in UTF-8, at most {document.MAX_BYTES:,} bytes, nested at most {document.NESTING} deep.
  A repeated key, an unknown key and a number with a fraction are errors, each at `{document.FILE}:LINE:COLUMN`.
- Absent allows nothing. A tool may be called when its URI stands in `allow` and its class in `side_effects` of
  `[permissions.skills]`, and its class in `allowed_side_effects` here.
- What a grant names must be here: `covenant manifest check` says what is not, and `covenant tools verify` refuses it.
- The agent's DID is `{document.DID}` and the id of `agent.toml`, letter by letter.

## Tool URIs

{{uris}}

A version is one release: a tag (`latest`), a word without a digit and a range (`1.x`, `^1.0`) pin nothing and are
refused, here and in `agent.toml`.

## The package of a server

The package of the stdio server `fs` is the directory `tools/fs/` of the agent's package: the published package as it is
unpacked, which is what will be mounted and run. `package_digest` is the SHA-256 of its listing, so that anybody can
compute it:

```sh
cd tools/fs && find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum
```

Its `command` is `node` or `python3` with a script of that directory as first argument, or a program of that directory
by a path with a slash (`./server`), since a bare name is looked up in the machine's PATH.
A command that fetches what it runs ({{fetchers}} and the like) parses and does not verify: no digest covers
what it fetches. The digest may be a placeholder (zeros, a repeated pattern, an abbreviation) until `covenant tools pin`
replaces it, which changes nothing else in the file. `{pins.LOCK}` keeps the SHA-256 of each tool's name,
description and input schema: what reaches a model cannot change without somebody running `pin` again and signing.

## A server in its sandbox

A stdio server runs in a sandbox of its own: {server_package.MEMORY_MB} MiB of memory,
{server_package.DISK_MB} MiB of `/tmp`, no network and no file of the host. By these commands it has of its variables
those that are literals, and no secret. It runs as `AGENT.ALIAS`, signed with a local key as by
`covenant dev`. As root:

```sh
covenant tools advertised mine fs       # what the server says, as items of `tools`; each lacks side_effect_class
covenant tools verify mine --live       # starts each stdio server; status 3 where it says anything else
covenant tools call {_URI} --package mine --args '{{"path": "/tmp/notes"}}'
covenant tools serve mine fs            # its stdin and stdout: what an MCP client is told to start
```

`tools call` and `tools serve` check in this order: the package verifies; the tool and its class are granted; size and
rules of the arguments; `input_schema`; the rate; the server advertises what is declared. Only then the tool is called.
A server whose list changes while it runs is listed again: a tool that is not declared is never shown, and there is no
call while the list differs. What a server asks of its client (sampling, roots, elicitation) is refused
([ADR 0086](adr/0086-a-call-is-held-to-its-manifest.md)).

## The agent's endpoint

An agent with a tool in `[permissions.skills]` has the name `tools.covenant` in its /etc/hosts, also with
`network = "off"`. It is an MCP server over streamable HTTP, without sessions: one POST, one JSON reply.

| path | |
|---|---|
| `http://tools.covenant/mcp` | the granted tools of all stdio servers, each as `ALIAS{desk.SEPARATOR}NAME` |
| `http://tools.covenant/mcp/ALIAS` | the granted tools of one server, by their own names |

```python
import http.client, json, sys

text = json.loads(sys.stdin.readline())["text"]
call = {{"name": "read_text_file", "arguments": {{"path": text}}}}
message = {{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}}
line = http.client.HTTPConnection("tools.covenant")
line.request("POST", "/mcp/fs", json.dumps(message), {{"Content-Type": "application/json"}})
print(json.dumps({{"text": json.load(line.getresponse())["result"]["content"][0]["text"]}}))
```

The first call of a tool that the manifest allows starts its server, in a sandbox of its own beside the agent's; it ends
with the agent. A server that ended is started again by the next call, {desk.STARTS} times at once and then every
{desk.START_SECONDS:.0f} seconds. Each call passes the checks of `tools call`. `covenant run` refuses a package whose
tools do not verify. After {server.IDLE_SECONDS:.0f} seconds without a call
it is suspended, and resumed by the next one. A server's memory is beside its agent's, and counts for the same caller
([ADR 0096](adr/0096-tools-are-called-at-a-gate.md)).

## Rules and limits of calls

They stand in `agent.toml`. Rules of one tool and argument are alternatives; every argument that has a rule must be
given, and fit. A list fits when each item does. Rules compare text: `..` in a path is not resolved.

```toml
[permissions.skills]
allow = ["{_URI}"]
side_effects = ["read"]
calls_per_minute = 60
call_ms = 5000
argument_bytes = 4096
answer_bytes = 100000

[[permissions.skills.rule]]
tool = "{_URI}"
argument = "path"
matches = "/tmp/[a-z]+"
```

```sh
covenant policy why mine --tool {_URI} --args '{{"path": "/tmp/notes"}}'
```

A refused call names the lines that end the denial. Each call is two events of the supervisor's log, `tool_called`
before it is sent and `tool_answered`; a refused one is `tool_refused`. They hold digests of arguments and answer.

## Credentials

A secret is named and never written. `$env:NAME` is the credential `NAME`, for the variable of that name;
`$credential:NAME` is the credential `NAME`. Each is the whole value, and each name is granted in
`[permissions.credentials]`. Part of a value, a reference in `command` or `args`, a literal that looks like a secret,
and any literal under the name of one (`Authorization`, `API_KEY`) are errors. A server inherits no environment.

A server that runs for its agent is given the secrets of the agent id that its `env` names, when it starts; the agent
itself is then refused them. They are files of its sandbox in memory, which a program of ours reads before the script of
the server: so its `command` is `node` or `python3` ([ADR 0125](adr/0125-secrets-and-idleness-of-tool-servers.md)).
`covenant dev` refuses such a package."""


def page() -> str:
    """The whole page, as Markdown."""
    fetchers = ", ".join(f"`{name}`" for name in ("npx", "uvx", "docker") if name in checks.FETCHERS)
    intro = _INTRO.replace("{uris}", "\n".join(_uris())).replace("{fetchers}", fetchers)
    return "\n".join([intro, *_objects(), *_rules(), *_codes(), *_schema()]) + "\n"


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
        yield from ("| key | value | default | meaning |", "|---|---|---|---|")
        for key, info in model.model_fields.items():
            yield f"| `{key}` | {_value(info)} | {_default(info)} | {info.description or ''} |"


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
    if info.is_required():
        return "required"
    value = info.default
    if isinstance(value, int):
        return f"`{value}`"
    return "`[]`" if value == () else "absent"


def _rules() -> Iterator[str]:
    yield from ("", "## Rules between keys", "")
    for rule in document.RULES:
        yield f"- {' '.join((rule.__doc__ or '').split())}"


def _codes() -> Iterator[str]:
    yield from ("", "## What does not verify", "", "| code | meaning |", "|---|---|")
    for code, meaning in {**checks.CODES, **advertised.CODES}.items():
        yield f"| `{code}` | {meaning} |"


def _schema() -> Iterator[str]:
    yield from ("", "## The schema", "")
    yield "[tools.schema.json](schema/tools.schema.json) accepts what the parser accepts; left to the parser is:"
    yield ""
    yield from (f"- {left}" for left in shapes.LEFT)
