"""A runsc that works, from the distribution or its backports; elsewhere, exact words on how to get one."""

from __future__ import annotations

import dataclasses
import pathlib

from scripts.machine import apt, console, runsc, sources
from scripts.machine.console import SetupError
from scripts.machine.where import Machine

SOURCE_FILE = "/etc/apt/sources.list.d/covenant-runsc.sources"
PIN_FILE = "/etc/apt/preferences.d/covenant-runsc"


@dataclasses.dataclass(frozen=True)
class Newer:
    """Where a distribution whose own runsc is too old has a newer one, on its own mirrors under its own key.

    `pinned`: the suite is another release, so a preferences file keeps everything but runsc out. Backports need
    none: apt takes nothing from there unasked.
    """

    suite: str
    component: str
    pinned: bool


# Ubuntu's runsc package is a static program without dependencies, so that of a later release runs on this one. 25.10's
# is built with Go 1.23 and works; that of 26.04 is the same version built with Go 1.25, and panics (runsc.py).
NEWER = {
    "bookworm": Newer("bookworm-backports", "main", pinned=False),
    "noble": Newer("questing", "universe", pinned=True),
}

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
        console.ok(f"{found.path} starts a sandbox")
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
    install(machine)
    found = runsc.probe()
    if not found.works:
        raise SetupError(f"a runsc that works: the one that was installed does not ({found.problem})", *GVISOR_RELEASE)
    console.ok(f"{found.path} starts a sandbox")


def install(machine: Machine) -> None:
    """Get runsc from where this distribution has one that is new enough; whether it works is not asked here.

    Raises:
        SetupError: no source of the machine leads to one.
    """
    if machine.codename is None:
        raise SetupError(f"runsc (gVisor) on {machine.system}", *GVISOR_RELEASE)
    newer = NEWER.get(machine.codename)
    if newer is None and not _offered():
        apt.update()
    if _offered():
        apt.install(machine.record, ["runsc"])
        return
    if newer is None:
        raise SetupError(
            f"runsc {runsc.OLDEST} or later: {machine.system} offers {apt.candidate('runsc') or 'none'}",
            *GVISOR_RELEASE,
        )
    files = apt.source_files()
    if not sources.names(files, newer.suite):
        text = sources.derive(files, machine.codename, newer.suite, newer.component)
        if text is None:
            raise SetupError(
                f"an apt source for {machine.codename}, from which the one for {newer.suite} could be derived",
                f"add {newer.suite} to the apt sources of this machine",
                *GVISOR_RELEASE,
            )
        if newer.pinned:
            # The pin first: no moment at which apt would take anything else from there.
            _write(machine, PIN_FILE, sources.pin("runsc", newer.suite))
        _write(machine, SOURCE_FILE, text)
    try:
        apt.update()
        apt.install(machine.record, ["runsc"], release="" if newer.pinned else newer.suite)
    except SetupError as e:
        # A mirror that no longer has the suite would break every later `apt-get update` of this machine.
        _take_back(machine)
        raise SetupError(f"runsc from {newer.suite}: {e}", *GVISOR_RELEASE) from e


def _take_back(machine: Machine) -> None:
    for name in (SOURCE_FILE, PIN_FILE):
        if name in machine.record.added.files:
            console.change(f"remove {name} again")
            pathlib.Path(name).unlink(missing_ok=True)
            machine.record.forget("files", name)


def _offered() -> bool:
    return apt.at_least(apt.candidate("runsc"), runsc.OLDEST)


def _write(machine: Machine, name: str, text: str) -> None:
    """Write a file of apt's configuration.

    Announce and record it first; refuse to replace a file that set-up did not make.
    """
    path = pathlib.Path(name)
    if path.exists() and name not in machine.record.added.files:
        raise SetupError(
            f"a source for runsc: {name} is there, was not made by set-up, and does not give it",
            f"look at {name}; remove it or enable what it names, then run set-up again",
        )
    console.change(f"write {name}:\n" + "".join(f"    {line}\n" for line in text.splitlines()))
    machine.record.add("files", name)
    path.write_text(text)
    path.chmod(0o644)
