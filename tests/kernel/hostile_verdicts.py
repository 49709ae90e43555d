"""Verdicts on rows of the containment suite: a difference from the table is a finding."""

from __future__ import annotations

import re

from tests.kernel.hostile_runs import Outcome
from tests.kernel.hostile_settings import Setting
from tests.kernel.hostile_table import NetworkProbe

# What takes more than one process, or only shows what gVisor's own kernel refuses, is not repeated in every setting.
_ONCE = frozenset({"packets", "own network", "frames", "doors", "floods"})
_SLOW = frozenset({"hello_slow", "host_scan", "plain_silence"})


def everywhere(probe: NetworkProbe) -> bool:
    """Whether the probe runs in every combination, and not only in one of each kind."""
    return probe.group not in _ONCE and probe.id not in _SLOW


def on_the_wire(probe: NetworkProbe) -> bool:
    """Whether the gateway alone has to stop it: not what a sandbox with every right does to itself, and not what would
    use up the network for the probes behind it."""
    inside = probe.group in ("doors", "own network", "floods", "node") or probe.id in ("frame_socket", "frame_listen")
    return not inside


def granted(probe: NetworkProbe, setting: Setting) -> bool:
    """Whether this setting grants what the probe tries."""
    return probe.grants in setting.grants


def wrong_in_control(probe: NetworkProbe, outcome: Outcome) -> str | None:
    """Why the control does not show what the probe is named for, or None."""
    row = outcome.rows[probe.id]
    if probe.control == "b":
        refused = row.outcome == "blocked" and row.errno in probe.plain
        return None if refused else f"{row.outcome} {row.errno}: {row.detail}; expected {' or '.join(probe.plain)}"
    return None if outcome.shows(probe) else f"{row.outcome} {row.errno}: {row.detail}; shown by {probe.shows}: nothing"


def escaped(probe: NetworkProbe, outcome: Outcome, *, unprivileged: bool = True) -> str | None:
    """Return what got out, or None.

    ``unprivileged`` is false for a sandbox that may send any frames. A packet on the link alone is then no finding,
    except for the frames that the agent's own end has to refuse.
    """
    row = outcome.rows[probe.id]
    if unprivileged and row.outcome != "blocked":
        return f"{row.outcome}: {row.detail}"
    if outcome.shows(probe) and (unprivileged or probe.shows != "frame" or probe.group == "frames"):
        return f"shown by {probe.shows}: {row.detail}"
    for place, seen in (("the world", outcome.world), ("the gateway", outcome.heard)):
        if number := seen.count(probe.id):
            return f"its mark was seen {number} times in {place}"
    return None


def broken_grant(probe: NetworkProbe, outcome: Outcome) -> str | None:
    """Why a probe that is granted did not succeed within its bound, or None."""
    row = outcome.rows[probe.id]
    if not outcome.shows(probe):
        return f"granted, but {row.outcome} {row.errno}: {row.detail}"
    if probe.bound is None:
        return None
    told = re.search(r"\d+", row.detail)
    number = max(int(told.group()) if told else 0, outcome.world.count(probe.id) if probe.group == "names" else 0)
    return None if number <= probe.bound else f"{row.detail}, more than {probe.bound}"


def wrong(probe: NetworkProbe, outcome: Outcome, setting: Setting) -> str | None:
    """Why a row of a run under Covenant is not what its setting promises, or None."""
    return broken_grant(probe, outcome) if granted(probe, setting) else escaped(probe, outcome)
