"""Find a place for our cgroups on a unified hierarchy: a unit that systemd delegated to us, or below our own name.

systemd owns the tree (systemd, "Control Group APIs and Delegation"): a stock machine does not even switch the cpu
controller on for children of the root. So a process outside a delegated unit requests its own scope from systemd, with
Delegate=yes, and moves there. The scope ends with its last process, so nothing of it remains.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import time
from pathlib import Path

from policy import errors

NEEDED = ("memory", "pids", "cpu")
# Switched on if it is available: only a limit in a manifest needs it.
OPTIONAL = ("io",)
BASE = "covenant"
SYSTEMD = Path("/run/systemd/system")
_BUSCTL = "/usr/bin/busctl"
DEADLINE_SECONDS = 15.0
_XATTRS = ("trusted.delegate", "user.delegate")


@functools.cache
def base(root: Path) -> Path:
    """Return the directory for this process's leaves, with the controllers switched on for them.

    ``root`` is where the unified hierarchy is mounted. The result is cached for the process.

    Raises:
        errors.NotEnforceableError: Raised when nothing is delegated and systemd gives no scope.
    """
    unit = _delegated(root)
    if unit is None and SYSTEMD.is_dir():
        _ask_for_scope()
        unit = _await_delegation(root)
    if unit is None:
        return _own_name(root)
    there = set((unit / "cgroup.controllers").read_text().split())
    if missing := set(NEEDED) - there:
        raise errors.NotEnforceableError(
            f"cgroup controllers {sorted(missing)} are not delegated to `{unit}`",
            hint="run it in a unit with Delegate=yes",
        )
    _step_aside(unit)
    (unit / "cgroup.subtree_control").write_text(_switched_on(there))
    return unit


def _switched_on(there: set[str]) -> str:
    """Return the text for subtree_control, for those of our controllers that are in ``there``."""
    return " ".join(f"+{name}" for name in (*NEEDED, *OPTIONAL) if name in there)


def _own(root: Path) -> Path | None:
    """Return the cgroup of this process below ``root``. Returns None if it is outside the mounted tree."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            path = line.removeprefix("0::/")
            return None if path.startswith("..") else root / path
    return None


def _delegated(root: Path) -> Path | None:
    """Return the nearest cgroup, from our own upwards, that systemd marked as delegated."""
    own = _own(root)
    for path in [own, *own.parents] if own is not None else []:
        if not path.is_relative_to(root) or path == root:
            break
        for name in _XATTRS:
            with contextlib.suppress(OSError):
                if os.getxattr(path, name) == b"1":
                    return path
    return None


def _ask_for_scope() -> None:
    unit = f"covenant-{os.getpid()}-{secrets.token_hex(4)}.scope"
    properties = [
        *("Description", "s", "runs of Covenant"),
        *("PIDs", "au", "1", str(os.getpid())),
        *("Delegate", "b", "true"),
        *("Slice", "s", "covenant.slice"),
        *("CollectMode", "s", "inactive-or-failed"),
    ]
    command = [
        _BUSCTL,
        "call",
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        unit,
        "fail",
        "5",
        *properties,
        "0",
    ]
    try:
        done = subprocess.run(
            command,
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DEADLINE_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C must reach only this process
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise errors.NotEnforceableError(f"systemd cannot be asked for a cgroup: {e}", hint=_HINT) from e
    if done.returncode != 0:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise errors.NotEnforceableError(f"systemd gives no cgroup: {said}", hint=_HINT)


_HINT = "run it in a unit with Delegate=yes, or start the system bus"


def _await_delegation(root: Path) -> Path:
    """Wait for the delegated unit: systemd answers before it moves this process."""
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        if unit := _delegated(root):
            return unit
        time.sleep(0.002)
    raise errors.NotEnforceableError("systemd made a scope and did not move this process into it", hint=_HINT)


def _step_aside(unit: Path) -> None:
    """Move this process and its children from the unit's own cgroup into a child cgroup.

    A cgroup that has processes itself cannot have children with controllers (the rule of no internal processes).
    """
    aside = unit / "supervisor"
    aside.mkdir(mode=0o755, exist_ok=True)
    until = time.monotonic() + DEADLINE_SECONDS
    while pids := (unit / "cgroup.procs").read_text().split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (aside / "cgroup.procs").write_text(pid)
        if time.monotonic() > until:
            raise errors.NotEnforceableError(f"processes keep appearing in cgroup `{unit}`")


def _own_name(root: Path) -> Path:
    """Return the directory of our own name, without systemd. The machine must have switched the controllers on."""
    enabled = set((root / "cgroup.subtree_control").read_text().split())
    if not set(NEEDED) <= enabled:
        # INVARIANT: the root's subtree_control belongs to the machine; we write only to our own files.
        raise errors.NotEnforceableError(
            f"cgroup controllers {sorted(set(NEEDED) - enabled)} are not enabled for children of `{root}`",
            hint=f"echo '{_switched_on(set(NEEDED))}' > {root}/cgroup.subtree_control, or use systemd",
        )
    path = root / BASE
    path.mkdir(mode=0o755, exist_ok=True)
    (path / "cgroup.subtree_control").write_text(_switched_on(enabled))
    return path
