"""``covenant denials``: list an agent's denials in a run, and the line of agent.toml that would allow each.

It reads the supervisor's audit log, or the daemon's copies of its rows, and no data of the agent. ``audit verify``
checks that log.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli import common
from covenant.cli.policy import artefact_view
from policy import errors

if TYPE_CHECKING:
    from policy.denials import Denial, Row
    from policy.why.ask import Sight

_PATH = click.Path(path_type=Path)
# The most denials that a run prints; `covenant denials` lists all.
_SHOWN = 5


# A run without a network has no firewall that could tell. Its filter refuses socket(2), which is told, unless the
# manifest grants that call. gVisor tells of no missing file by itself.
_UNTOLD: Final = (
    "not told: files that the agent does not find, unless `tell_files = true` stands in config.toml, and connections "
    "of an agent without a network that is granted socket and connect; covenant policy why says whether the package may"
)
_OPTIONS: Final = (
    "note: a session gets more by an option of covenant exec: --net HOST, --read PATH, --write VOLUME, --layer NAME"
)


@dataclass(frozen=True)
class DenialSummary:
    """One run in the log: its agent, and the count of each denial, in order of first occurrence.

    ``used`` is False for a standby instance that got no intent. The log does not have its package.
    """

    run_id: str
    agent_id: str
    counts: Mapping[Denial, int]
    package: str = ""
    used: bool = True


@click.command(
    epilog=common.examples(
        "covenant denials 6f1f64c0", "covenant denials agents/librarian --parent agents/hello --json"
    )
)
@click.argument("subject", metavar="PACKAGE|RUN")
@click.option("--package", type=_PATH, metavar="PACKAGE", help="With RUN: its package, when it lies elsewhere now.")
@click.option("--parent", type=_PATH, metavar="PACKAGE", help="Say whether this parent would allow it.")
@artefact_view.HOST
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def denials(subject: str, package: Path | None, parent: Path | None, host: str | None, as_json: bool) -> None:
    """Explain what was refused to an agent: in the latest run of PACKAGE, or in RUN (its id, or how that begins).

    Each refusal has an id, the same in every run and wherever it is shown. Not listed is what gVisor does not tell: a
    path that is not there, a granted program that fails, a full scratch, a process too many, and with trusted-local
    every refusal by the kernel. `covenant policy why` answers for those.
    """
    other = artefact_view.OtherHost.of(host)
    told, looked = _subject(subject, package, other)
    sight = None if looked is None else _sight(looked, parent)
    explained = [_explained(denial, count, sight) for denial, count in told.counts.items()]
    listed = explained if other else [_on_this_host(one) for one in explained]
    if as_json:
        head = {"run_id": told.run_id, "agent_id": told.agent_id, "package": told.package or None, "used": told.used}
        common.emit({"kind": "denials", **head, "denials": listed, "hints": list(looked.hints) if looked else []})
        return
    total = "nothing was refused" if not listed else f"{len(listed)} denial{'s' if len(listed) > 1 else ''}"
    kind = "run" if told.used else "standby instance, which has not been used,"
    common.say(common.visible(f"{kind} {told.run_id} of {told.agent_id}: {total}"))
    for one in listed:
        _say(one)
    for hint in looked.hints if looked else ():
        common.say(f"not told: {common.visible(hint)}")
    if not listed:
        common.say(_UNTOLD)
    if listed and sight is None:
        common.say(
            "note: the package is not where it was; --package PACKAGE says what to write"
            if _has_place(told)
            else _OPTIONS,
            err=True,
        )


def _has_place(told: DenialSummary) -> bool:
    """Whether the run was one of a package: the name of a session is its command."""
    return not told.package or told.package.startswith("/")


def explained(one: Mapping[str, Any], place: Path | None) -> list[str]:
    """Return the lines that explain a denial of the log; with what to write, where ``place`` has the package.

    Raises:
        errors.CovenantError: the package cannot be read or compiled.
    """
    from policy.denials import Denial

    denial = Denial(*(str(one.get(name, "")) for name in ("layer", "target", "code")))
    is_there = place is not None and (place / "agent.toml").exists()
    sight = _sight(artefact_view.package(place), None) if place is not None and is_there else None
    lines = _lines(_on_this_host(_explained(denial, int(one.get("count", 1)), sight)))
    return lines if is_there else [*lines, "note: its package is not below agents/ of this home: see covenant denials"]


def remark(rows: Sequence[Row], run_id: str) -> None:
    """Print the first denials of a run on stderr, and the command that explains all.

    Granted calls with other arguments are left out: a libc tries some and continues without.
    """
    from policy.denials import ARGUMENTS

    rows = [row for row in rows if row.denial.code != ARGUMENTS]
    for row in rows[:_SHOWN]:
        one = row.denial
        common.say(common.visible(f"denied {one.id}: {_words(one.layer, one.target, one.code, row.count)}"), err=True)
    if len(rows) > _SHOWN:
        common.say(f"denied: {len(rows) - _SHOWN} more", err=True)
    if rows:
        common.say(f"  explained by: covenant denials {run_id}", err=True)


def _subject(
    subject: str, package: Path | None, other: artefact_view.OtherHost | None
) -> tuple[DenialSummary, artefact_view.LookedPackage | None]:

    if (Path(subject) / "agent.toml").exists():
        looked = artefact_view.package(Path(subject), other=other)
        return _latest(looked.manifest.agent.id), looked
    told = _named(subject)
    place = package or Path(told.package)
    # The log has the package's former path; like every verb here, this reads its present files.
    is_there = bool(told.package or package) and (place / "agent.toml").exists()
    return told, artefact_view.package(place, other=other) if is_there else None


def _sight(looked: artefact_view.LookedPackage, parent: Path | None) -> Sight:
    from covenant.cli.policy import questions

    return questions.sight(looked, parent)


def _explained(denial: Denial, count: int, sight: Sight | None) -> dict[str, Any]:
    from policy.why import denied

    if sight is None:
        return {**denied.words(denial), "count": count, "meaning": denied.meaning(denial)}
    return {**denied.explain(denial, sight).document(), "count": count}


def _on_this_host(one: dict[str, Any]) -> dict[str, Any]:
    """Say what this host adds: its paths, without which lines are of no use, and whether it asks operators."""
    if one["code"] == "not_approved" and one["layer"] in ("dns", "sni", "tool", "inject"):
        return _with_asking(one)
    if one["layer"] == "path" and one["code"] == "not_granted" and one.get("add"):
        try:
            os.lstat(one["target"])
        except (FileNotFoundError, NotADirectoryError):
            return {**one, "add": [], "note": "this host has no such path either: make it there, and grant it"}
        except OSError:
            return one  # the caller may not look there
    return one


def _with_asking(one: dict[str, Any]) -> dict[str, Any]:
    """Say that this host asks no operator, where that is so."""
    from sandbox import config as configuration

    try:
        config = configuration.load(common.readable_state())
    except (errors.CovenantError, OSError):
        return one
    if config.ask_operators:
        return one
    off = f"`ask_operators` is off, so no operator is asked: set it to true in {configuration.file_of(config.state)}"
    unasked = str(one.get("note", "")).removeprefix("covenant approvals list shows what waits; ")
    if one["layer"] in ("dns", "sni"):
        unasked = "or leave `on_deny` out of the entry, which grants the host"
    return {**one, "note": "; ".join(filter(None, (off, unasked)))}


def _say(one: dict[str, Any]) -> None:
    for line in _lines(one):
        common.say(common.visible(line))


def _lines(one: Mapping[str, Any]) -> list[str]:
    words = _words(one["layer"], one["target"], one["code"], one["count"])
    lines = [f"{one['denial']}: {words}", f"  {one['meaning']}"]
    why = one.get("why")
    if why and why["never"]:
        lines.append(f"  never grantable: {why['never']}")
    if one.get("add"):
        lines.append("  to grant it, write in agent.toml and sign again:")
        lines += [f"    {line}" for line in one["add"]]
        lines += [f"  {line}" for line in why["there"]] if why else []
    elif "add" not in one and one["grant"]:
        lines.append(f"  granted by: {one['grant']}")
    for name, allows in (why or {}).get("bounds", {}).items():
        # A role's ceiling does not list what no manifest is granted.
        if not (allows and why and why["never"]):
            lines.append(f"  {name} {'allows' if allows else 'does not allow'} it")
    if one.get("note"):
        lines.append(f"  note: {one['note']}")
    return lines


def _words(layer: str, target: str, code: str, count: int) -> str:
    times = f" ({count} times)" if count > 1 else ""
    return f"{layer} {target}: {code}{times}" if target else f"{layer}: {code}{times}"


# --- the log ---------------------------------------------------------------------------------------------------


def _latest(agent_id: str) -> DenialSummary:
    """Return the latest run of an agent.

    Raises:
        errors.UsageError: the log has none.
    """
    runs = [told for told in _logged() if told.used and told.agent_id == agent_id]
    if not runs:
        raise errors.UsageError(f"no run of `{agent_id}` is in the log", hint="`covenant audit recent` shows what is")
    return runs[-1]


def _named(text: str) -> DenialSummary:
    """Return the run whose id begins with ``text``, else the standby instance.

    Raises:
        errors.UsageError: none does, or several do.
    """
    named = [told for told in _logged() if told.run_id.startswith(text)]
    found = [told for told in named if told.used] or named
    if len(found) != 1 or not text:
        what = "no run has" if not found or not text else f"{len(found)} runs have"
        hint = "name a package's directory, or a run as the log has it (`covenant audit recent`)"
        raise errors.UsageError(f"`{text}` is no package, and {what} an id that begins so", hint=hint)
    return found[0]


def _logged() -> list[DenialSummary]:
    """Return the runs and standby instances of the log in one reading, in the order of their starts."""
    from covenant.cli.audit import read_logs
    from policy import standby
    from policy.denials import Denial

    runs = dict[str, DenialSummary]()
    counts = defaultdict[str, Counter[Denial]](Counter)
    for event in read_logs.supervisor_events(b"run_started", standby.MADE_AHEAD.encode(), b"denied"):
        run_id, agent_id = str(event.get("run_id", "")), str(event.get("agent_id", ""))
        if event.get("type") == "run_started":
            runs.pop(run_id, None)  # an instance is ordered by its use, not by its making
            runs[run_id] = DenialSummary(run_id, agent_id, counts[run_id], package=str(event.get("package") or ""))
        elif event.get("reason") == standby.MADE_AHEAD:
            runs[run_id] = DenialSummary(run_id, agent_id, counts[run_id], used=False)
        elif event.get("type") == "denied":
            denial = Denial(*(str(event.get(name, "")) for name in ("layer", "target", "code")))
            count = event.get("count")
            counts[run_id][denial] += count if isinstance(count, int) else 1
    return list(runs.values())
