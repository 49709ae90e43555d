"""Step `packages` of provision.sh: Debian packages and a runsc, from the mirrors that the machine is set to.

What set-up does on a developer's machine, for a machine that is Covenant's alone: no clone holds its record, and
whether runsc works is asked when the machine has booted, not in the chroot where its image is made.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

sys.dont_write_bytecode = True
CLONE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CLONE))

from scripts.machine import apt, console, gvisor, runsc, where  # noqa: E402
from scripts.machine.record import Record  # noqa: E402

RECORD = pathlib.Path("/var/lib/covenant-provision")
PACKAGES = ("erofs-utils", "iproute2", "libseccomp2", "nftables", "procps", "python3", "python3-venv")


def main() -> int:
    """Install what is missing; a runsc that is already there stays, in any version."""
    machine = where.look(CLONE)
    RECORD.mkdir(mode=0o755, parents=True, exist_ok=True)
    machine = dataclasses.replace(machine, record=Record(RECORD))
    try:
        missing = [name for name in PACKAGES if name not in apt.installed()]
        if missing:
            apt.update()
            apt.install(machine.record, missing)
        if not any(pathlib.Path(place).exists() for place in runsc.PLACES):
            gvisor.install(machine)
    except console.SetupError as e:
        console.report(e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
