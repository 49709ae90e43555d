"""A runsc that works, from the distribution or its backports; elsewhere, exact words on how to get one."""

from __future__ import annotations

import pathlib

from scripts.machine import apt, console, runsc, sources
from scripts.machine.console import SetupError
from scripts.machine.where import Machine

BACKPORTS_FILE = "/etc/apt/sources.list.d/covenant-backports.sources"

GVISOR_RELEASE = (
    "gVisor's own release is a single program: https://gvisor.dev/docs/user_guide/install/ (section",
    "`Install from a release`): download `runsc` and `runsc.sha512` for `uname -m`, check with",
    "`sha512sum -c runsc.sha512`, then `install -o root -g root -m 0755 runsc /usr/local/bin/runsc`",
)


def provide(machine: Machine) -> None:
    """Step (3) of set-up: a runsc that starts a sandbox.

    Raises:
        SetupError: there is none and none can be got here; the mend says how to get one.
    """
    # Only root can try; without root its presence is all that is known.
    found = runsc.probe()
    if found.works:
        console.fine(f"{found.path} starts a sandbox")
        return
    if not machine.root:
        if found.path is None:
            raise SetupError("runsc (gVisor), and installing needs root", "sudo ./scripts/setup")
        console.note(f"{found.path} is there; whether it starts a sandbox only root can try")
        return
    if found.path is not None:
        # Set-up adds and never replaces: what the owner installed is the owner's to change.
        raise SetupError(
            f"a runsc that works ({found.problem})",
            f"remove {found.path} or replace it, then run set-up again; how to get a newer one:",
            *GVISOR_RELEASE,
        )
    _install_runsc(machine)
    found = runsc.probe()
    if not found.works:
        raise SetupError(f"a runsc that works: the one that was installed does not ({found.problem})", *GVISOR_RELEASE)
    console.fine(f"{found.path} starts a sandbox")


def _install_runsc(machine: Machine) -> None:
    if machine.codename is None:
        raise SetupError(f"runsc (gVisor) on {machine.system}", *GVISOR_RELEASE)
    if not apt.at_least(apt.candidate("runsc"), runsc.OLDEST) and machine.codename != "bookworm":
        apt.update()
    if apt.at_least(apt.candidate("runsc"), runsc.OLDEST):
        apt.install(machine.record, ["runsc"])
        return
    if machine.codename != "bookworm":
        raise SetupError(
            f"runsc {runsc.OLDEST} or later: {machine.system} offers {apt.candidate('runsc') or 'none'}",
            *GVISOR_RELEASE,
        )
    # Bookworm's own runsc is of 2022 and knows no systrap; its backports have one that works.
    release = f"{machine.codename}-backports"
    files = apt.source_files()
    if not sources.names(files, release):
        text = sources.backports(files, machine.codename)
        if text is None:
            raise SetupError(
                f"an apt source for {machine.codename}, from which the one for {release} could be derived",
                f"add {release} to the apt sources of this machine",
                *GVISOR_RELEASE,
            )
        if pathlib.Path(BACKPORTS_FILE).exists() and BACKPORTS_FILE not in machine.record.added.files:
            raise SetupError(
                f"an apt source for {release}: {BACKPORTS_FILE} is there, but not made by set-up, and does not give it",
                f"look at {BACKPORTS_FILE}; remove it or enable what it names, then run set-up again",
            )
        console.change(f"write {BACKPORTS_FILE}:\n" + "".join(f"    {line}\n" for line in text.splitlines()))
        machine.record.add("files", BACKPORTS_FILE)
        pathlib.Path(BACKPORTS_FILE).write_text(text)
        pathlib.Path(BACKPORTS_FILE).chmod(0o644)
    apt.update()
    apt.install(machine.record, ["runsc"], release=release)
