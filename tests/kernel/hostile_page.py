"""docs/containment*.md from the tables of probes: what each tries, what its control does, and Covenant's answer.

The pages say what the tests hold: `make contain` writes them only when every row was seen to be so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tests.kernel import hostile_combinations as combinations
from tests.kernel import hostile_table as table
from tests.kernel import hostile_verdicts as verdicts
from tests.kernel.hostile_settings import SETTINGS

DOCS = Path(__file__).resolve().parents[2] / "docs"

_MADE = "<!-- Made by `make contain`; the tables are agents/hostile/network.toml and agents/hostile/probes.toml. -->"

_HEAD = """\
# Containment: what agents tried

{made}

`agents/hostile/` contains signed agents whose code tries to get out; they start only under gVisor. This page says how
they are tried and how many tries were blocked:

```sh
make contain
```

{total} probes, {tries} tries under Covenant, no escape.

Each probe runs twice: in a control without Covenant, where it succeeds, and under Covenant with the rights of its
manifest. A probe that fails in its control too would prove nothing.
"""

_NETWORK = """\
## The network

{count} probes by {packages}. In the control a plain runsc bundle (uid 0, every capability, no filter) stands between
namespaces without a rule, in front of a world that answers at every address and every port. Under Covenant each setting
is one sandbox, and its host and world are namespaces too. A probe's own word is not enough: everything that a probe
sends carries a mark, and behind the gateway no mark and no packet may appear that nothing grants.

| setting | grants |
| --- | --- |
| `off` | no network |
| `https` | outbound-https-only for two names |
| `named` | full, for the two names and one address |
| `https-any`, `any` | the same modes without a table: every public address. Granted probes must succeed there |
| `walls` | what remains when gVisor is taken over: the plain sandbox with every right, behind a real gateway |

{summary}
The other probes succeed only in settings that grant them. [containment-network.md](containment-network.md) lists each
probe.
"""

_SANDBOX = """\
## Files, processes, memory, programs

{count} probes by `hostile/python`, `hostile/exec`, `hostile/bombs` and `hostile/binary`, without a network. The control
is a plain runsc bundle with secrets, neighbours and listeners that the probes can find.

{summary}
The other probes get an error and the run continues. [containment-sandbox.md](containment-sandbox.md) lists each probe.
"""

_TAIL = """\
## Limits of this suite

- It shows only what was tried. A probe is one way of doing a thing; the walls are meant for all of them.
- A granted wildcard is a channel: each name that is resolved below it is data. The rate bounds it, nothing ends it. The
  addresses and times of granted connections are channels too. Without a table every name and public address is one.
- The peer behind a granted name may forward anything: the gate does not read what TLS carries.
- `walls` does not try system calls by which a taken-over gVisor could attack the host's kernel. gVisor's own filter on
  itself bounds them; attestation reads that filter, and this suite does not attack it.
- CPU time is bounded, not blocked: [limits.md](limits.md).
"""

_NETWORK_HEAD = """\
# Containment: the probes of the network

{made}

Each probe of [containment.md](containment.md) that tries the network, with the result of its control in brackets:
`reached` when it was answered, `seen` when its mark arrived, an errno where gVisor lacks the thing. In the tables
`granted` means that the probe succeeds, as it must; `at most N` that it is granted and bounded; `-` not tried.
"""

_SANDBOX_HEAD = """\
# Containment: the probes of files, processes, memory and programs

{made}

Each probe of [containment.md](containment.md) without a network: its package below `agents/hostile/`, what it tries,
and the result under Covenant. In its control each one succeeds, or gets the error that the line names.
"""


def pages() -> dict[str, str]:
    """Return the pages below docs by their names."""
    network, (sandbox, _) = combinations.PROBES, table.load()
    groups: dict[str, list[table.NetworkProbe]] = {}
    for probe in network:
        groups.setdefault(probe.group, []).append(probe)
    domains = {name: list(rows) for name, rows in groupby(sorted(sandbox, key=_domain_of), key=_domain_of)}
    return {
        "containment.md": _page(groups, domains),
        "containment-network.md": "\n".join(
            [_NETWORK_HEAD.format(made=_MADE), *(_group(name, rows) for name, rows in groups.items())]
        ),
        "containment-sandbox.md": "\n".join(
            [_SANDBOX_HEAD.format(made=_MADE), *(_domain(name, rows) for name, rows in domains.items())]
        ),
    }


def _page(groups: Mapping[str, list[table.NetworkProbe]], domains: Mapping[str, list[table.Probe]]) -> str:
    network = [probe for rows in groups.values() for probe in rows]
    count = sum(map(len, domains.values()))
    tries = sum(len(one.probes) for one in combinations.COMBINATIONS) + len(combinations.BEHIND_THE_WALLS) + count
    by_group = [[*_counted(name, rows), str(sum(map(_is_blocked, rows)))] for name, rows in groups.items()]
    by_domain = [[*_counted(name, rows), str(sum(bool(p.limit) for p in rows))] for name, rows in domains.items()]
    return "\n".join(
        [
            _HEAD.format(made=_MADE, total=len(network) + count, tries=tries),
            _NETWORK.format(
                count=len(network),
                packages=_packages(network),
                summary=_table(["group", "probes", "for example", "blocked in every setting"], by_group),
            ),
            _SANDBOX.format(count=count, summary=_table(["group", "probes", "for example", "end the run"], by_domain)),
            _TAIL,
        ]
    )


def _packages(probes: Iterable[table.NetworkProbe]) -> str:
    return " and ".join(sorted({f"`hostile/{probe.package}`" for probe in probes}))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _counted(name: str, probes: Sequence[table.Probe | table.NetworkProbe]) -> tuple[str, str, str]:
    return name, str(len(probes)), probes[0].title


def _group(name: str, probes: list[table.NetworkProbe]) -> str:
    columns = [one for one in combinations.COMBINATIONS if one.package == probes[0].package]
    blocked = "".join(f"- `{one.id}`: {one.title} ({_control(one)})\n" for one in probes if _is_blocked(one))
    rows = [
        [f"`{one.id}`", f"{one.title} ({_control(one)})", *(_cell(one, column) for column in columns), _walls(one)]
        for one in probes
        if not _is_blocked(one)
    ]
    parts = [f"## {name.capitalize()}\n"]
    if blocked:
        parts.append(f"Blocked in every setting:\n\n{blocked}")
    if rows:
        parts.append(_table(["probe", "tries", *(one.setting for one in columns), "walls"], rows))
    return "\n".join(parts)


def _is_blocked(probe: table.NetworkProbe) -> bool:
    """Whether every setting that the probe was tried in blocks it."""
    columns = (one for one in combinations.COMBINATIONS if one.package == probe.package)
    return {*(_cell(probe, column) for column in columns), _walls(probe)} <= {"blocked", "-"}


def _control(probe: table.NetworkProbe) -> str:
    if probe.control == "b":
        return " or ".join(probe.plain)
    return "reached" if probe.shows == "answer" else "seen"


def _cell(probe: table.NetworkProbe, combination: combinations.Combination) -> str:
    if probe not in combination.probes:
        return "-"
    return _word(probe) if verdicts.granted(probe, SETTINGS[combination.setting]) else "blocked"


def _word(probe: table.NetworkProbe) -> str:
    return "granted" if probe.bound is None else f"at most {probe.bound}"


def _walls(probe: table.NetworkProbe) -> str:
    if probe not in combinations.BEHIND_THE_WALLS:
        return "-"
    return _word(probe) if verdicts.granted(probe, SETTINGS["named"]) else "blocked"


def _domain_of(probe: table.Probe) -> str:
    return probe.domain


def _domain(name: str, probes: list[table.Probe]) -> str:
    rows = "".join(f"- `{one.id}` ({one.package}): {one.title}. {_result(one)}.\n" for one in probes)
    return f"## {name.capitalize()}\n\n{rows}"


def _result(probe: table.Probe) -> str:
    result = f"Ends the run: `{probe.limit}`" if probe.limit else f"Blocked: {' or '.join(probe.expect)}"
    return f"{result}; control: {' or '.join(probe.plain)}" if probe.control == "b" else result
