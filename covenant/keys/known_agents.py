"""Find the agents and packages that this host knows: packages below given places, live runs and archived runs.

The trust root's verbs use it to name packages that a change concerns. It decides nothing. A package that cannot be
read, or a run whose record is damaged, is left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from covenant.keys import left_unsigned
from policy import errors
from policy.manifest import parse, text
from policy.signing import envelope, statement, strict_json
from sandbox.audit import run_archive
from sandbox.rundir import registry
from sandbox.storage import package_reader as reader


class KnownRun(Struct, frozen=True):
    """A live or archived run: its agent, the path of its package, and its serial if the run is live and signed."""

    agent_id: str
    package: str
    serial: int | None = None


class KnownAgents(Struct, frozen=True):
    """The serials of each known agent id: empty where none is known."""

    serials: Mapping[str, frozenset[int]]

    def doubt(self, agent_id: str, at_most: int) -> str:
        """Return why a revocation of the agent's serials may be a mistake, empty if it concerns a known one."""
        if agent_id not in self.serials:
            near = text.nearest(agent_id, tuple(sorted(self.serials)))
            return f"no package and no run of `{agent_id}` is known on this host{f'; near: `{near}`' if near else ''}"
        known = self.serials[agent_id]
        if not known or min(known) <= at_most:
            return ""
        no_such = f"no package and no run of `{agent_id}` with a serial of at most {at_most} is known on this host"
        return f"{no_such}; the lowest known is {min(known)}"


def runs(state: Path) -> tuple[KnownRun, ...]:
    """Return the live runs, and the archived ones, the latest first."""
    found = [KnownRun(one.agent_id, one.package, one.serial) for one in _live(state)]
    with contextlib.suppress(errors.StateError):
        for run_id in run_archive.ids(state):
            with contextlib.suppress(errors.StateError):
                record = run_archive.read(state, run_id)
                if record is not None:
                    found.append(KnownRun(record.agent_id, record.package))
    return tuple(found)


def packages(places: Iterable[Path], known: Iterable[KnownRun]) -> tuple[Path, ...]:
    """Return each package below the places, and each that a run names and that still exists, once."""
    ran = (Path(path) for path in dict.fromkeys(one.package for one in known) if os.path.isabs(path))
    found: dict[str, Path] = {}
    for path in (*left_unsigned.packages_below(places), *filter(_is_package, ran)):
        found.setdefault(os.path.realpath(path), path)
    return tuple(found.values())


def agents(places: Iterable[Path], known: Iterable[KnownRun]) -> KnownAgents:
    """Return the agents of the packages and of the runs."""
    known = tuple(known)
    serials: dict[str, set[int]] = {}
    for agent_id, serial in (*map(_read, packages(places, known)), *((one.agent_id, one.serial) for one in known)):
        if agent_id:
            serials.setdefault(agent_id, set()).update(() if serial is None else (serial,))
    return KnownAgents({agent_id: frozenset(found) for agent_id, found in serials.items()})


def _live(state: Path) -> Iterator[registry.Entry]:
    # A self-test has the agent's label.
    return (one for one in registry.live(state / "runs") if not one.self_test)


def _is_package(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return (path / "agent.toml").is_file()
    return False


def _read(path: Path) -> tuple[str, int | None]:
    """Return the agent id of a package, empty if it cannot be read, and the serial of its statement."""
    agent_id = ""
    with contextlib.suppress(errors.CovenantError, strict_json.MalformedJsonError):
        manifest, raw = reader.manifest_and_envelope(path)
        agent_id = parse.parse(manifest).agent.id
        if raw is not None:
            return agent_id, statement.parse(envelope.decode(raw).payload).serial
    return agent_id, None
