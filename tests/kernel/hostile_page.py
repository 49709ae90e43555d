"""docs/containment.md from the tables of probes: what each tries, what its control does, what Covenant makes of it.

The page says what the tests hold: `make contain` writes it only when every row was seen to be so.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from tests.kernel import hostile_combinations as combinations
from tests.kernel import hostile_table as table
from tests.kernel import hostile_verdicts as verdicts
from tests.kernel.hostile_settings import SETTINGS

PATH = Path(__file__).resolve().parents[2] / "docs" / "containment.md"

_HEAD = """\
# Containment: what agents tried, and what came of it

<!-- Made by `make contain`; the tables are agents/hostile/network.toml and agents/hostile/probes.toml. -->

`agents/hostile/` holds signed agents whose code tries to get out. They refuse to start anywhere but under gVisor. Each
probe is run twice: in a control, where nothing of Covenant stands in its way and it does what it is named for, and
under Covenant, with the rights of its manifest. A probe that fails in its control as well would prove nothing.

```sh
make contain
```

{total} probes, {tries} tries under Covenant, no escape.
"""

_NETWORK = """\
## The network

{count} probes by {packages}. The control is a plain runsc bundle (uid 0, every capability, no filter) between
namespaces without a rule, in front of a world that answers at every address and every port. Under Covenant each column
is one sandbox, whose host and world are namespaces as well. The probe's own word is not enough: all that a probe sends
carries a mark, and no mark and no packet that nothing grants may be seen behind the gateway.

- `off`: no network. `https`: outbound-https-only for two names. `named`: full, for the two names and one address.
  `https-any` and `any`: the same modes without a table, where every public address is granted; what a column grants
  has to succeed there, and is the second control of the rows beside it.
- `walls`: the plain sandbox again, with every right and able to send any frame, in the agent's namespace of a real
  gateway: what is left when gVisor itself has been taken over.
- `control`: `reached` when the probe was answered, `seen` when its mark arrived, an errno where gVisor has no such
  thing.
- `blocked`: nothing of it got out. `granted`: it succeeds, as it must. `at most N`: it is granted, and bounded.
"""

_SANDBOX = """\
## Files, processes, memory, programs

{count} probes by `hostile/python`, `hostile/exec`, `hostile/bombs` and `hostile/binary`, without a network. The control
is a plain runsc bundle with secrets, neighbours and listeners planted for the probes to find.
"""

_TAIL = """\
## What this does not show

- Only what was tried. A probe is one way of doing a thing; the walls are meant for all of them.
- A granted wildcard is a channel: each name that is resolved below it is data. The rate bounds it, nothing ends it. So
  are the addresses and the times of granted connections. Without a table every name and every public address is one.
- Behind a granted name the other end may pass anything on: what lies in TLS is not looked into.
- `walls` does not try what a taken-over gVisor could do to the host's kernel by system calls: that is held by gVisor's
  own filter on itself, which is read back and not attacked here.
- CPU time is bounded, not blocked: `docs/limits.md`.
"""


def page() -> str:
    """The whole page."""
    network, (sandbox, _) = combinations.PROBES, table.load()
    tries = (
        sum(len(one.probes) for one in combinations.COMBINATIONS) + len(combinations.BEHIND_THE_WALLS) + len(sandbox)
    )
    total = len(network) + len(sandbox)
    parts = [
        _HEAD.format(total=total, tries=tries),
        _NETWORK.format(count=len(network), packages=_packages(network)),
        *(_group(name, list(rows)) for name, rows in groupby(network, key=lambda probe: probe.group)),
        _SANDBOX.format(count=len(sandbox)),
        *(_domain(name, list(rows)) for name, rows in groupby(sorted(sandbox, key=_domain_of), key=_domain_of)),
        _TAIL,
    ]
    return "\n".join(parts)


def _packages(probes: Iterable[table.NetworkProbe]) -> str:
    return " and ".join(sorted({f"`hostile/{probe.package}`" for probe in probes}))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _group(name: str, probes: list[table.NetworkProbe]) -> str:
    columns = [one for one in combinations.COMBINATIONS if one.package == probes[0].package]
    head = ["probe", "tries", "control", *(one.setting for one in columns), "walls"]
    rows = [
        [f"`{one.id}`", one.title, _control(one), *(_cell(one, column) for column in columns), _walls(one)]
        for one in probes
    ]
    return f"### {name.capitalize()}\n\n{_table(head, rows)}"


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
    head = ["probe", "tries to", "package", "control", "under Covenant"]
    rows = [
        [
            f"`{one.id}`",
            one.title,
            one.package,
            " or ".join(one.plain) if one.control == "b" else "succeeds",
            f"ends the run: `{one.limit}`" if one.limit else f"blocked: {' or '.join(one.expect)}",
        ]
        for one in probes
    ]
    return f"### {name.capitalize()}\n\n{_table(head, rows)}"
