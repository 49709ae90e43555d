"""docs/manifest.md, derived from the models and the rules, so that the page cannot say anything else than the parser.

tests/golden/test_manifest_page.py holds the page to this module and regenerates it.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from policy.manifest import agent, fields, parse, report, shapes, syntax

COMMAND = "python tests/golden/test_manifest_page.py"
_NUMBERS = "numbers and ranges"


_INTRO = f"""\
# agent.toml

Written by `{COMMAND}` from the models in `policy/manifest`; do not edit.

An existing Covenant manifest parses unchanged. Absent means nothing; only limits have defaults, which are ceilings, and
only `resources.network` must be written before `covenant manifest sign` takes the package. `agents/hello/agent.toml`
is the page to copy.

```sh
covenant manifest new mine --runtime python3      # a package that works, to begin with
covenant manifest check mine                      # what is wrong and what would be right, and what run refuses here
covenant manifest schema > agent.schema.json      # JSON Schema 2020-12, for editors; also docs/schema
```

Every finding is `agent.toml:LINE:COLUMN`, the offending value and what would be right; `--json` lists them all. A
column counts characters. A name that is nearly one that is known (a key, a section, a value, a profile, a role, a
system call) is answered with that one. What a rule or an artefact says of a grant afterwards names its line alone.

- The file is UTF-8 without byte order mark or NUL, at most {syntax.MANIFEST_BYTES:,} bytes, {syntax.LINES:,} lines,
  {syntax.KEYS:,} keys, tables or items, nested at most {syntax.NESTING} deep. A key written twice is an error.
- An unknown key in a known section is an error, and so is any unknown section below `[permissions]`. Another unknown
  top-level section is tolerated and listed in the signature (at most {parse.UNKNOWN_SECTIONS}, names of
  `A-Z a-z 0-9 _ -`), unless its name is within two edits of a known one. A key above the first section is an error.
- Strings are not empty and hold no control, bidi or other hidden characters. Booleans, floats, dates and numbers in
  quotes are no integers. A list has no item twice and at most {fields.LIST_ITEMS} items, a list of system calls
  {2 * fields.LIST_ITEMS}.
- Paths are absolute and normalised, hosts are lower-case ASCII names, addresses or blocks in their usual spelling: any
  other spelling is refused and the right one named."""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_INTRO, *_sections(), *_rules()]) + "\n"


def _sections() -> Iterator[str]:
    for name, info in agent.Manifest.model_fields.items():
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
        return "array of " + (_NUMBERS if typing.get_origin(items) is tuple else "strings")
    if choices:
        return _choices(choices)
    if shape is bool:
        return "`true`, `false`"
    if shape is int:
        low, high = report.bounds(info.metadata)
        return f"integer, {low} to {high}"
    return "string"


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
    yield "Every agent under linux-gvisor finds these, whatever its manifest grants. No grant may lie on one of them."
    yield ""
    yield "| place | contents |"
    yield "|---|---|"
    yield from (f"| `{place}` | {contents} |" for place, contents in _PLACES)
    yield ""
    yield "## The schema"
    yield ""
    yield "[agent.schema.json](schema/agent.schema.json) and, for the payload of `agent.dsse.json`,"
    yield "[statement.schema.json](schema/statement.schema.json) are written by"
    yield "`python tests/golden/test_schema.py` from the same models. What the parser accepts, the schema accepts; what"
    yield "it cannot say is left to the parser:"
    yield ""
    yield from (f"- {left}" for left in shapes.LEFT)
