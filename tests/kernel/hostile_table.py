"""agents/hostile/probes.toml as types, and the verdict on a row that a probe answered.

Both halves of the proof read this: the controls in a plain sandbox, and the runs under Covenant.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HOSTILE = Path(__file__).resolve().parents[2] / "agents" / "hostile"
NO_ERRNO = "NONE"


@dataclass(frozen=True)
class Probe:
    """One row of the table; its comment says what each field means."""

    id: str
    title: str
    domain: str
    package: str
    control: Literal["a", "b", "c"]
    plain: tuple[str, ...] = ()
    expect: tuple[str, ...] = ()
    limit: str | None = None
    alone: bool = False


@dataclass(frozen=True)
class NetworkProbe:
    """One row of network.toml; its comment says what each field means."""

    id: str
    group: str
    title: str
    control: Literal["a", "b"] = "a"
    plain: tuple[str, ...] = ()
    shows: Literal["answer", "mark", "frame", "heard"] = "answer"
    grants: Literal["name", "service", "https", "public", ""] = ""
    bound: int | None = None
    package: str = "network"


@dataclass(frozen=True)
class Granted:
    """An act that has to succeed in both halves."""

    id: str
    title: str
    package: str


@dataclass(frozen=True)
class Row:
    """The answer of one probe (agents/hostile/common/harness.py)."""

    probe: str
    outcome: str
    errno: str | None
    detail: str

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Row:
        """From the probe's JSON, closed: a missing or an extra key is an error."""
        return cls(**document)


def built() -> None:
    """The compiled agents, where they are older than their sources or not there yet."""
    subprocess.run([str(HOSTILE.parents[1] / "scripts" / "build_agents")], check=True, timeout=300, capture_output=True)


def load() -> tuple[tuple[Probe, ...], tuple[Granted, ...]]:
    """The probes and the granted acts, in the order of the file."""
    with open(HOSTILE / "probes.toml", "rb") as file:
        table = tomllib.load(file)
    probes = tuple(Probe(**{key: _frozen(value) for key, value in row.items()}) for row in table["probe"])
    return probes, tuple(Granted(**row) for row in table["granted"])


def load_network() -> tuple[NetworkProbe, ...]:
    """The network probes, in the order in which they run."""
    with open(HOSTILE / "network.toml", "rb") as file:
        table = tomllib.load(file)
    return tuple(NetworkProbe(**{key: _frozen(value) for key, value in row.items()}) for row in table["probe"])


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def rows(answer_text: str) -> dict[str, Row]:
    """The rows of an answer's `text`, of one probe or of a batch, by probe id."""
    document = json.loads(answer_text)
    found = [Row.of(row) for row in (document if isinstance(document, list) else [document])]
    return {row.probe: row for row in found}


def batch(ids: Iterable[str]) -> str:
    """The intent text that runs several probes in one sandbox."""
    return "batch:" + ",".join(ids)


def wrong_under_covenant(probe: Probe, row: Row) -> str | None:
    """Why this answer is not the wall that the table promises, or None.

    For a run that ended with `probe.limit` there is no row; the caller compares the run's error code.
    """
    if row.outcome != "blocked":
        return f"{probe.id}: {row.outcome}: {row.detail}"
    if (row.errno or NO_ERRNO) not in probe.expect:
        return f"{probe.id}: blocked by {row.errno or NO_ERRNO} ({row.detail}), expected {' or '.join(probe.expect)}"
    return None


def wrong_in_plain(probe: Probe, row: Row) -> str | None:
    """Why this answer is not what the control promises, or None."""
    if probe.control == "a":
        return None if row.outcome == "succeeded" else f"{probe.id}: {row.outcome} {row.errno}: {row.detail}"
    if row.outcome != "blocked" or row.errno not in probe.plain:
        return f"{probe.id}: {row.outcome} {row.errno}: {row.detail}; expected {' or '.join(probe.plain)}"
    return None
