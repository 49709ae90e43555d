"""Which packages instances are kept ready of: a record for each agent id, written by the first run of it that succeeds.

A record says nothing of whether it may be run: each instance is made under the full procedure. It names the
supervisor's own copy of the package, and has the envelope that is not in the copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from msgspec import Struct, structs

from policy.package import Package
from sandbox.storage import json_cache
from sandbox.storage import package_reader as packages

_NAME = "standby"


class Wanted(Struct, frozen=True):
    """``count`` instances of one package. ``key`` changes with every byte of it, its envelope included."""

    agent_id: str
    count: int
    package: str
    envelope: bytes
    package_name: str

    @property
    def key(self) -> str:
        """Return a digest that two instances share exactly when one can replace the other."""
        about = (self.agent_id.encode(), self.package.encode(), self.package_name.encode("utf-8", "surrogatepass"))
        return hashlib.sha256(b"\0".join((*about, self.envelope))).hexdigest()

    def read(self, state: Path) -> Package:
        """The package, out of the supervisor's copy.

        Raises:
            errors.PackageError: the copy is not there any more, or is no package.
        """
        store = state / "packages"
        copy = next((store / name for name in (self.package, f"{self.package}-x") if (store / name).exists()), None)
        return packages.read(copy or store / self.package).with_envelope(self.envelope)


def want(state: Path, package: Package, *, agent_id: str, count: int, package_name: str) -> None:
    """Keep so many instances of this package from now on, in place of the record of the same agent id."""
    record = Wanted(agent_id, count, package.digest, package.envelope or b"", package_name)
    place = _place(state, agent_id)
    found = _read(place)
    # The client chooses the package's place, and an instance is told it with its intent. So a user's own copy in
    # another place ends no instance.
    if found is None or structs.replace(found, package_name=package_name) != record:
        json_cache.write(
            place,
            {
                "agent_id": record.agent_id,
                "count": record.count,
                "package": record.package,
                "envelope": record.envelope.decode("latin-1"),
                "package_name": record.package_name,
            },
        )


def drop(state: Path, agent_id: str) -> None:
    """Keep none of it any more, until a run of it succeeds again."""
    _place(state, agent_id).unlink(missing_ok=True)


def wanted(state: Path) -> list[Wanted]:
    """Everything that is asked for."""
    found: list[Wanted | None] = []
    with contextlib.suppress(FileNotFoundError):
        found = [_read(state / _NAME / name) for name in sorted(os.listdir(state / _NAME)) if not name.startswith(".")]
    return [one for one in found if one is not None]


def version(state: Path) -> int:
    """Changes whenever a record was written or dropped."""
    try:
        return (state / _NAME).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _read(path: Path) -> Wanted | None:
    found = json_cache.read(path)
    try:
        return None if found is None else Wanted(**{**found, "envelope": found["envelope"].encode("latin-1")})
    except (TypeError, KeyError, AttributeError, UnicodeEncodeError):
        return None


def _place(state: Path, agent_id: str) -> Path:
    return state / _NAME / f"{hashlib.sha256(agent_id.encode()).hexdigest()}.json"
