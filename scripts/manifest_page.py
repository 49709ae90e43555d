"""docs/manifest*.md, derived from the models and the rules, so that the pages say what the parser does.

tests/golden/test_manifest_page.py holds the pages to this module and regenerates them.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from policy import package
from policy.manifest import agent, fields, parse, report, shapes, syntax

COMMAND = "python tests/golden/test_manifest_page.py"
_NUMBERS = "numbers and ranges"


# Sections of the page about grants; the other page has the rest.
_GRANTS = frozenset({"permissions", "spawn", "services", "tools", "publish"})
_WRITTEN = f"<!-- Written by `{COMMAND}` from the models in policy/manifest; do not edit. -->"

_INTRO = f"""\
# agent.toml

The manifest of an agent: what it is, how it starts, and what it may do. It begins a package:

```sh
covenant manifest new mine --runtime python3      # a package that works, to begin with
covenant manifest check mine                      # each fault with its fix, and what `run` would refuse on this host
covenant manifest schema > agent.schema.json      # JSON Schema 2020-12, for editors; also docs/schema
```

[manifest-keys.md](manifest-keys.md) lists the keys that describe the agent and its limits,
[manifest-grants.md](manifest-grants.md) those that grant it something. This page has the rules that hold for all of
them. {_WRITTEN}

An absent key grants nothing. Only limits have defaults, and these are ceilings. `covenant manifest sign` requires
`resources.network` to be written. A manifest of version 1 parses unchanged.

Each finding of `check` is `agent.toml:LINE:COLUMN` (columns count characters), the offending value and a correct
one; `--json` lists them all. For a misspelt key, section, value, profile, role or system call it names the nearest
known one. Findings of later rules name only the line.

- The file is UTF-8 without byte order mark or NUL, at most {package.MANIFEST_BYTES:,} bytes, {syntax.LINES:,} lines,
  {syntax.KEYS:,} keys, tables or items, nested at most {syntax.NESTING} deep. A key written twice is an error.
- An unknown key in a known section is an error, and so is an unknown section below `[permissions]` and a key above
  the first section. Another unknown top-level section is accepted and listed in the signature (at most
  {parse.UNKNOWN_SECTIONS}, names of `A-Z a-z 0-9 _ -`), unless its name is within two edits of a known one.
- Strings are not empty and contain no control, bidi or other hidden characters. Booleans, floats, dates and quoted
  numbers are not integers. A list has no item twice and at most {fields.LIST_ITEMS} items, a list of system calls
  {2 * fields.LIST_ITEMS}.
- Paths are absolute and normalised. Hosts are lower-case ASCII names, addresses or blocks in their canonical
  spelling."""

_KEYS = f"""\
# Keys of agent.toml: the agent and its limits

Each section of a manifest that describes the agent, its process, its files and its limits.
[manifest.md](manifest.md) has the rules of writing and [manifest-grants.md](manifest-grants.md) the keys that
grant. For example:

```toml
[resources]
memory_mb = 256
```

{_WRITTEN}"""

_GRANTING = f"""\
# Keys of agent.toml: grants

Each section of a manifest that grants the agent something. [manifest.md](manifest.md) has the rules of writing and
[manifest-keys.md](manifest-keys.md) the other keys. For example:

```toml
[permissions.filesystem]
read = ["/usr/share/dict"]
```

{_WRITTEN}"""


def pages() -> dict[str, str]:
    """Return the pages below docs, as Markdown."""
    texts = {
        "manifest.md": (_INTRO, *_rules()),
        "manifest-keys.md": (_KEYS, *_sections(granting=False)),
        "manifest-grants.md": (_GRANTING, *_sections(granting=True)),
    }
    return {name: "\n".join(lines) + "\n" for name, lines in texts.items()}


def _sections(*, granting: bool) -> Iterator[str]:
    for name, info in agent.Manifest.model_fields.items():
        if (name in _GRANTS) != granting:
            continue
        model = _model(info)
        if name not in ("permissions", "services", "tools"):
            many = typing.get_origin(info.annotation) is tuple
            yield from _section(f"[[{name}]]" if many else f"[{name}]", model)
            continue
        for domain, inner in model.model_fields.items():
            many = typing.get_origin(inner.annotation) is tuple
            heading = f"[[{name}.{domain}]]" if many else f"[{name}.{domain}]"
            yield from _section(heading, _model(inner))
            for key, nested in _tables(_model(inner)):
                yield from _section(f"[[{name}.{domain}.{key}]]", _model(nested))


def _tables(model: type[fields.Section]) -> list[tuple[str, FieldInfo]]:
    """The keys of a section that are arrays of tables: each has a heading of its own."""
    return [(key, info) for key, info in fields.keys(model).items() if _is_tables(info)]


def _is_tables(info: FieldInfo) -> bool:
    items = typing.get_args(info.annotation)[:1] if typing.get_origin(info.annotation) is tuple else ()
    models = (one for one in items if isinstance(one, type) and issubclass(one, fields.Section))
    # An item that is written as text is no table.
    return any((one.__doc__ or "").startswith("``[[") for one in models)


def _model(info: FieldInfo) -> type[fields.Section]:
    return next(m for m in report.models(info.annotation) if issubclass(m, fields.Section))


def _section(heading: str, model: type[fields.Section]) -> Iterator[str]:
    yield ""
    yield f"## {heading}"
    yield ""
    about = (model.__doc__ or "").split("\n")[0].split(": ", 1)[-1]
    yield f"{about[:1].upper()}{about[1:]}".replace("``", "`")
    yield ""
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for key, info in fields.keys(model).items():
        if _is_tables(info):
            continue
        cells = (f"`{key}`", _value(info), _default(info), info.description or "")
        yield f"| {' | '.join(cells)} |"


def _value(info: FieldInfo) -> str:
    """The type of a key in TOML's words."""
    shape: Any = info.annotation
    if typing.get_origin(shape) in (types.UnionType, typing.Union):
        shape = next(a for a in typing.get_args(shape) if a is not type(None))
    choices = list(report.literals(shape))
    if typing.get_origin(shape) is tuple:
        items = next(iter(typing.get_args(shape)))
        if choices:
            return f"array of {_choices(choices)}"
        return _array(items)
    if choices:
        return _choices(choices)
    if shape is bool:
        return "`true`, `false`"
    if shape is int:
        low, high = report.bounds(info.metadata)
        return f"integer, {low} to {high}"
    return "string"


def _array(items: Any) -> str:
    """The type of a list, by that of its items. Pairs of strings are written as a table."""
    if typing.get_args(items) == (str, str):
        return "table of strings"
    if typing.get_origin(items) is tuple:
        return f"array of {_NUMBERS}"
    # An item that is written as text has a validator around its model.
    is_table = isinstance(items, type) and issubclass(items, fields.Section)
    return "array of tables" if is_table else "array of strings"


def _choices(values: list[str]) -> str:
    return ", ".join(f'`"{v}"`' for v in values)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.default
    if value is None or value == "":
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


_PLACES = (
    ("/workspace", "the package, read-only"),
    ("/tmp", "the scratch of `disk_mb`; empty and read-only with `read-only-package`"),
    (
        "/run/covenant",
        "`policy.json`, the agent's limits, and `denials.jsonl`, its denials ([denials](denials.md))",
    ),
    ("/dev/shm", "shared memory of `dev_shm_mb`; empty and read-only without"),
    (
        "/etc/ssl/certs/ca-certificates.crt, /usr/lib/ssl/cert.pem",
        'with a network and `base = "closure"`: the trust anchors of the host',
    ),
    ("/proc, /dev", "gVisor's own"),
    ("/etc/hosts, /etc/nsswitch.conf, /etc/passwd, /etc/group", "`localhost`, and names for its uid and gid"),
)


def _rules() -> Iterator[str]:
    yield ""
    yield "## Rules across sections"
    yield ""
    for rule in agent.RULES:
        yield f"- {' '.join((rule.__doc__ or '').split())}".replace("``", "`")
    yield ""
    yield "## Places of every root"
    yield ""
    yield "Every agent under linux-gvisor finds these, without a grant. No grant may name one of them."
    yield ""
    yield "| place | contents |"
    yield "|---|---|"
    yield from (f"| `{place}` | {contents} |" for place, contents in _PLACES)
    yield ""
    yield "## The schema"
    yield ""
    yield "[agent.schema.json](schema/agent.schema.json) and, for the payload of `agent.dsse.json`,"
    yield "[statement.schema.json](schema/statement.schema.json) are written by"
    yield "`python tests/golden/test_schema.py` from the same models. The schema accepts everything that the parser"
    yield "accepts. Only the parser checks:"
    yield ""
    yield from (f"- {left}" for left in shapes.LEFT)
