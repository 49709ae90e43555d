"""Where set-up works: the clone, its record, the distribution, and whether this process is root."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from scripts.machine.record import Record

PYTHON = "/usr/bin/python3"
# ID and VERSION_ID of /etc/os-release, and the codename: where set-up installs packages itself.
KNOWN = {("debian", "12"): "bookworm", ("debian", "13"): "trixie", ("ubuntu", "24.04"): "noble"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where set-up works: the clone, its record, and the distribution (None: one that is not known)."""

    clone: pathlib.Path
    record: Record
    system: str
    codename: str | None
    root: bool


def look(clone: pathlib.Path) -> Machine:
    """Read the machine's /etc/os-release; changes nothing."""
    fields = {}
    for line in pathlib.Path("/etc/os-release").read_text(errors="replace").splitlines():
        key, _, value = line.partition("=")
        fields[key] = value.strip("\"'")
    codename = KNOWN.get((fields.get("ID", ""), fields.get("VERSION_ID", "")))
    name = fields.get("PRETTY_NAME", "an unknown system")
    return Machine(clone, Record(clone), name, codename, os.geteuid() == 0)
