"""Show the effect of a change on the kernel: compare two policies, read out of their artefacts, grant by grant.

The rows are ordered by risk: a grant to run other code stands before a grant to read one more file. A
change widens exactly when the second policy is not a subset of the first; then some row has an added line
(tests/unit/policy/explain/test_diff.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct, structs

from policy.compile.artefacts import Artefacts
from policy.decompile import calls, read
from policy.decompile.read import Decompiled, Grants
from policy.explain import workspaces
from policy.grants.effective import DOMAINS, Effective
from policy.grants.executables import ExecutableSet
from policy.grants.paths import MODES, SHARED, FilesystemGrants
from policy.grants.resources import UNITS, Ceilings
from policy.grants.services import ServiceSet, TelemetrySet, WebSet

# From what is worst to have by mistake to what is mildest; the text is what people read.
RISKS = (
    "runs other code",
    "writes files of the host",
    "reaches the network",
    "reaches this host",
    "holds secrets",
    "acts with secrets",
    "asks models",
    "reads the web",
    "sends telemetry",
    "is reached from this host",
    "acts through tools",
    "starts agents",
    "asks agents",
    "reads files of the host",
    "uses the machine",
    "lives longer",
    "acts under a role",
)


class DiffRow(Struct, frozen=True):
    """One kind of grant that changed: the lines that only the second policy has, and those that only the first has."""

    risk: str
    domain: str
    noun: str
    added: tuple[str, ...]
    removed: tuple[str, ...]

    def summary(self) -> str:
        """``+3 syscalls``, ``-1 writable path``, or both."""
        sides = (("+", self.added), ("-", self.removed))
        return ", ".join(f"{sign}{len(lines)} {_plural(self.noun, len(lines))}" for sign, lines in sides if lines)

    def document(self) -> dict[str, Any]:
        """As ``policy diff --json`` prints it."""
        return {
            "risk": self.risk,
            "domain": self.domain,
            "noun": self.noun,
            "added": list(self.added),
            "removed": list(self.removed),
        }


class Diff(Struct, frozen=True):
    """All rows by risk; ``widens`` when the second policy allows anything that the first does not.

    ``differs`` names what is another one and neither wider nor narrower, such as the content of the runtime.
    """

    widens: bool
    rows: tuple[DiffRow, ...]
    differs: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As ``policy diff --json`` prints it."""
        rows = [row.document() for row in self.rows]
        return {"widens": self.widens, "summary": self.summary(), "rows": rows, "differs": list(self.differs)}

    def summary(self) -> str:
        """One line: ``+3 syscalls, +1 writable path, -2 addresses``, or ``no difference``."""
        return ", ".join(row.summary() for row in self.rows) or "no difference"


def compare_artefacts(old: Artefacts, new: Artefacts) -> Diff:
    """The difference of two policies by what their artefacts say, argument rules of system calls among it.

    Raises:
        errors.ArtefactError: one of them cannot be read back.
    """
    before, after = read.read(old.files), read.read(new.files)
    found = compare(_with_programs_of_tree(before, after), _with_programs_of_tree(after, before))
    added, removed = arguments(after, before), arguments(before, after)
    higher, lower = _by_holder(after, before, _WAS), _by_holder(before, after, _NOW)
    rows = list(found.rows)
    if added or removed:
        rows.append(DiffRow(RISKS[0], "syscalls", "argument rule", added, removed))
    if higher or lower:
        rows.append(DiffRow("uses the machine", "resources", "ceiling of one holder", higher, lower))
    shown, hidden = (
        workspaces.wider(after.seen.workspace, before.seen.workspace),
        workspaces.wider(before.seen.workspace, after.seen.workspace),
    )
    if shown or hidden:
        rows.append(DiffRow("writes files of the host", "workspace", "workspace term", shown, hidden))
    rows.sort(key=_place)
    differs = tuple(name for name, fact in _FACTS.items() if fact(before) != fact(after))
    contents = {one.name: one.digest for one in before.seen.programs}
    if any(contents.get(one.name, one.digest) != one.digest for one in after.seen.programs):
        differs = (*differs, _CONTENT)
    return Diff(found.widens or bool(added or higher or shown), tuple(rows), differs)


def _with_programs_of_tree(mine: Decompiled, other: Decompiled) -> Grants:
    """Return the grants of ``mine`` with the programs that ``other`` names and that are in a tree of ``mine``.

    Two roots of the same layers have the same files, so a tree of one contains what the other names of its layers.
    """
    image = mine.seen.image
    if "root" not in image.trees or image.layers != other.seen.image.layers:
        return mine.grants
    inside = set(other.seen.image.programs)
    own, named = mine.grants.executables, other.grants.executables
    files = {*own.files, *(one for one in named.files if one.path in inside)}
    return structs.replace(mine.grants, executables=ExecutableSet(tuple(files), own.any, own.trees))


def _by_holder(mine: Decompiled, other: Decompiled, word: str) -> tuple[str, ...]:
    """The ceilings that only one of their holders has higher: compiled policies have them alike, others may not."""
    theirs = dict(other.limits)
    usual = set(_higher(mine.grants.resources, other.grants.resources, word))
    return tuple(
        f"{holder}: {line}"
        for holder, limits in mine.limits
        if holder in theirs
        for line in _higher(limits, theirs[holder], word)
        if line not in usual
    )


def arguments(mine: Decompiled, other: Decompiled) -> tuple[str, ...]:
    """The calls that both allow, and that may have arguments in ``mine`` which ``other`` refuses."""
    found = calls.excess(mine.calls, other.calls)
    return tuple(f"call {one.name} with more arguments" for one in found if one.name in other.calls.allowed)


_CONTENT = "the content of a granted program"
# What says nothing about grants and still makes another sandbox.
_FACTS: dict[str, Callable[[Decompiled], object]] = {
    "the machine's architecture": lambda d: d.arch,
    "the runtime": lambda d: d.seen.runtime.name,
    "the content of the runtime": lambda d: d.seen.runtime.digest,
    "what is started": lambda d: d.args,
    "how it is started": lambda d: (d.process.env, d.process.cwd),
    "how it speaks": lambda d: (d.process.contract, d.process.intent),
    "the layers of its root": lambda d: d.seen.image.layers,
    "the size of /dev/shm": lambda d: d.seen.shared_mb,
    "the terms of its workspace": lambda d: d.seen.workspace,
    "runsc": lambda d: d.runsc,
}


def compare(old: Grants | Effective, new: Grants | Effective) -> Diff:
    """Return the grants of ``new`` beyond ``old``, and those that it lacks."""
    added, removed = _lines(new, old, _WAS), _lines(old, new, _NOW)
    rows = [
        DiffRow(risk, domain, noun, added.get((risk, domain, noun), ()), removed.get((risk, domain, noun), ()))
        for risk, domain, noun in dict.fromkeys((*added, *removed))
    ]
    widens = any(not mine.is_subset(getattr(old, name)) for name, mine in new.domains())
    return Diff(widens, tuple(sorted(rows, key=_place)))


def _place(row: DiffRow) -> tuple[int, str, str]:
    return RISKS.index(row.risk), row.domain, row.noun


Key = tuple[str, str, str]


# What a ceiling is on the other side: the first policy of an added line, the second of a removed one.
_WAS, _NOW = "was", "now"


def _lines(mine: Grants | Effective, other: Grants | Effective, word: str) -> dict[Key, tuple[str, ...]]:
    """The lines of ``mine`` that ``other`` does not cover, by risk, domain and noun."""
    found: dict[Key, tuple[str, ...]] = {}
    for domain, own in mine.domains():
        if own.is_subset(getattr(other, domain)):
            continue
        left = own.difference(getattr(other, domain))
        parts = _PARTS[domain](left, getattr(other, domain))
        for risk, noun, lines in _resources(left, other.resources, word) if domain == "resources" else parts:
            if lines:
                found[risk, domain, noun] = lines
    return found


Part = tuple[str, str, tuple[str, ...]]
Parts = Iterator[Part]


def _one(risk: str, noun: str) -> Callable[[Any, Any], Parts]:
    """A domain that is one kind of grant."""
    return lambda left, other: iter([(risk, noun, left.describe())])


def _resources(left: Any, other: Ceilings, word: str = _WAS) -> Parts:
    yield "uses the machine", "ceiling", _amounts(left, other, word)


def _higher(mine: Ceilings, other: Ceilings, word: str) -> tuple[str, ...]:
    return _amounts(mine.difference(other), other, word)


def _amounts(left: Ceilings, other: Ceilings, word: str) -> tuple[str, ...]:
    """The ceilings that are higher, each with what it is on the other side: a number alone says little."""
    values = ((name, value, getattr(other, name)) for name, value in zip(UNITS, left.values(), strict=True))
    return tuple(
        f"{name} {_amount(name, value)}, {word} {_amount(name, one)}" for name, value, one in values if value != 0
    )


def _amount(name: str, value: int | None) -> str:
    """Return a ceiling with its unit, unless its name ends with that."""
    if value is None:
        return "unlimited"
    return f"{value}" if name.endswith(UNITS[name]) else f"{value} {UNITS[name]}"


def _filesystem(left: FilesystemGrants, other: FilesystemGrants) -> Parts:
    yield "writes files of the host", "writable path", tuple(f"write {path}" for path in left.write)
    yield "writes files of the host", "volume", left.volume_lines()
    yield "writes files of the host", "shared write", (SHARED,) if left.shared else ()
    yield "reads files of the host", "readable path", tuple(f"read {path}" for path in left.read)
    mode = () if left.mode == MODES[0] else (f"mode {left.mode}",)
    yield "uses the machine", "filesystem mode", mode


def _network(left: Any, other: Any) -> Parts:
    entries = left.entries
    names = tuple(f"connect {e}" for e in entries if not _is_block(e.host))
    yield "reaches the network", "name", names
    yield "reaches the network", "address", tuple(f"connect {e}" for e in entries if _is_block(e.host))
    asked = tuple(f"connect {e} once an operator grants it" for e in left.asked_entries)
    yield "reaches the network", "name that is asked about", asked


def _inject(left: Any, other: Any) -> Parts:
    granted, asked = structs.replace(left, asked=()), structs.replace(left, rules=())
    yield "acts with secrets", "injected secret", granted.describe()
    yield "acts with secrets", "request that is asked about", asked.describe()


def _is_block(host: str) -> bool:
    return "/" in host


def _skills(left: Any, other: Any) -> Parts:
    yield "acts through tools", "tool", left.describe_tools()
    yield "acts through tools", "limit of calls", left.describe_limits()
    classes = tuple(f"side effect {name}" for name in left.side_effects.listing())
    yield "acts through tools", "side effect class", classes


def _services(left: ServiceSet, other: ServiceSet) -> Parts:
    risk, lines = "asks models", left.describe()
    yield risk, "model", lines[: len(left.models)]
    yield risk, "model limit", lines[len(left.models) :]


def _web(left: WebSet, other: WebSet) -> Parts:
    risk, lines = "reads the web", left.describe()
    searched, fetched = len(left.search), len(left.search) + len(left.fetch)
    yield risk, "search provider", lines[:searched]
    yield risk, "host of pages", lines[searched:fetched]
    yield risk, "web limit", lines[fetched:]


def _telemetry(left: TelemetrySet, other: TelemetrySet) -> Parts:
    risk, lines = "sends telemetry", left.describe()
    yield risk, "signal", lines[: len(left.signals)]
    yield risk, "telemetry limit", lines[len(left.signals) :]


_PARTS: dict[str, Callable[[Any, Any], Parts]] = {
    "identity": _one("acts under a role", "role"),
    "filesystem": _filesystem,
    "network": _network,
    "syscalls": _one("runs other code", "syscall"),
    "executables": _one("runs other code", "program"),
    "resources": _resources,
    "credentials": _one("holds secrets", "credential"),
    "skills": _skills,
    "spawning": _one("starts agents", "spawn limit"),
    "lifetime": _one("lives longer", "lifetime limit"),
    "services": _services,
    "publish": _one("is reached from this host", "published port"),
    "inject": _inject,
    "web": _web,
    "host_ports": _one("reaches this host", "port of this host"),
    "ssh": _one("acts with secrets", "login that is signed"),
    "may_grant": _one("starts agents", "right for children"),
    "agents": _one("asks agents", "agent that is asked"),
    "telemetry": _telemetry,
}
assert tuple(_PARTS) == tuple(DOMAINS)

_PLURALS = {
    "address": "addresses",
    "name that is asked about": "names that are asked about",
    "request that is asked about": "requests that are asked about",
    "host of pages": "hosts of pages",
    "port of this host": "ports of this host",
    "right for children": "rights for children",
    "limit of calls": "limits of calls",
    "side effect class": "side effect classes",
}


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else _PLURALS.get(noun, f"{noun}s")
