"""One run's directory: the OCI bundle, runsc's state, the places where mounts are attached. Made, and removed.

Below COVENANT_STATE, which only root can enter, so that no name in it is under anyone else's control. A live run
holds a lock on its directory; a directory whose lock is free was left by a process that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from policy import errors
from policy.compile.artefacts import Artefacts
from policy.leases.book import Lease
from policy.manifest.permissions import HOST_NAME
from sandbox.kernel import small_files
from sandbox.rundir.label import LABEL
from sandbox.rundir.lock import DYING_SECONDS, free, gate, open_lock
from sandbox.rundir.marks import STOPPED, verdict, write_mark

POLICY, BUNDLE = "policy", "bundle"
_CGROUPS = "cgroups.json"
# The counters of its cgroups when it got its intent (limits.Meter.noted).
METER = "meter"
ROOT_FILE = "root.erofs"
_NETWORK = "network.json"
_PUBLISHED = "published.json"
_LEASES = "leases.json"
# What stays of a run that is over until its network is gone.
_LEFT = frozenset(("lock", _NETWORK))
# Who ends a run for a reason of the supervisor's own.
SUPERVISOR = "the supervisor"


class RunDirectory:
    """``path``/bundle, ``path``/root (runsc's state), ``path``/trace. Use as a context manager.

    ``claim`` is called behind the gate just before the label can be seen, and raises when the run may not be beside
    those that can: of two that race for the same place one is first.
    """

    def __init__(
        self,
        path: Path,
        label: Mapping[str, str],
        *,
        claim: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self._label = label
        self._claim = claim
        self.bundle = path / BUNDLE
        self.runsc_root = path / "root"
        self.trace = path / "trace"
        self.rootfs = self.bundle / "rootfs"
        self._lock = -1
        self._complete = False
        # The error of a run that was marked while it could still be seen: the marking process names it as ended.
        self.ended: errors.RunRevokedError | errors.KilledError | None = None

    def __enter__(self) -> RunDirectory:
        with contextlib.ExitStack() as undo:
            with gate(self.path.parent):
                self._claim()
                label = json.dumps(dict(self._label)).encode()
                self.path.mkdir(mode=0o700)
                undo.callback(self.__exit__)
                self._lock = open_lock(self.path)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(self._lock, str(os.getpid()).encode())
                small_files.put(self.path / LABEL, label)
            for path in (self.runsc_root, self.trace, self.bundle, self.rootfs, self.bundle / "mounts"):
                path.mkdir(mode=0o700)
            undo.pop_all()
        return self

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        # INVARIANT: nothing is mounted below in this namespace; mounts live in the child's own and end with it.
        try:
            # A failed run may still have a live process, or a part that is half made.
            whole = error is None and self._complete
            # Without the gate the directory stays, like one without a holder, for recovery. The result of the run is
            # reported all the same.
            with contextlib.suppress(errors.KeeperError), gate(self.path.parent):
                self._look()
                if whole or not self._survived():
                    _remove_meter_last(self.path)
        finally:
            if self._lock >= 0:
                os.close(self._lock)

    def vacate(self, *kept: str) -> None:
        """Empty the directory of a run that is over, but for the files that recovery needs and those in ``kept``.

        Its network (``note_network``) still exists. No process sees a run in the directory any more.
        """
        with gate(self.path.parent), os.scandir(self.path) as found:
            self._look()
            entries = [one for one in found if one.name not in _LEFT.union(kept)]
            # Files first: a reader knows by them that there is a run, and then reads the rest.
            for one in entries:
                if not one.is_dir(follow_symlinks=False):
                    os.unlink(one.path)
            self._complete = False
            for one in entries:
                if one.is_dir(follow_symlinks=False):
                    shutil.rmtree(one.path)

    def _look(self) -> None:
        # Where no file can be opened any more its keeper's own look is the last.
        with contextlib.suppress(OSError):
            self.ended = self.ended or verdict(self.path)

    def _survived(self) -> bool:
        """Whether a cgroup of the run is left that could not be removed, or a part of its network (``left``).

        Only the directory leads to such a cgroup and to the processes in it.
        """
        try:
            left = (network_of(self.path) or {}).get("left", False)
            return left or any(place.is_dir() for place in cgroups_of(self.path).values())
        except OSError:
            return True

    def note_cgroups(self, paths: Mapping[str, Path]) -> None:
        """Write down where the run's cgroups will lie, before they are made: what a later start takes away."""
        small_files.put(self.path / _CGROUPS, json.dumps({name: str(path) for name, path in paths.items()}).encode())

    def write_policy(self, policy: Artefacts) -> None:
        """Write the artefacts that the run is started from, for attestation in another process."""
        place = self.path / POLICY
        place.mkdir(mode=0o700)
        for name, content in policy.files.items():
            (place / name).write_bytes(content)
        self._complete = True

    def note_network(self, about: Mapping[str, Any]) -> None:
        """Write down what the run's gateway is, before anything of it lies where it does not end by itself.

        ``supervisor`` is the process whose descriptors ``agent`` and ``gateway`` open the two namespaces.
        """
        # INVARIANT: not emptied first. Who is killed over the second note has left the first, by which a table of the
        # host's and its forwarding are taken away; and who revokes the run meanwhile finds a link to cut.
        small_files.put(self.path / _NETWORK, json.dumps({"supervisor": os.getpid(), **about}).encode())

    def note_published(self, ports: Sequence[Mapping[str, Any]]) -> None:
        """Write down where the run's ports will be published, before the sockets are made."""
        if ports:
            small_files.put(self.path / _PUBLISHED, json.dumps(list(ports)).encode())

    def note_leases(self, leases: Sequence[Lease]) -> None:
        """Write down the leases of the run, for attestation, before one begins and after one has ended."""
        made = self.path / f".{_LEASES}.new"
        small_files.put(made, msgspec.json.encode(leases))
        made.rename(self.path / _LEASES)

    def write_config(self, config: bytes) -> None:
        """The config.json that runsc reads."""
        small_files.put(f"{self.bundle}/config.json", config)

    @property
    def root_file(self) -> Path:
        """The place to which the EROFS file of the root is mounted."""
        return self.bundle / ROOT_FILE

    def target_of_root_file(self) -> Path:
        """Make and return the empty file that ``root_file`` names."""
        os.close(os.open(self.root_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        return self.root_file

    def targets(self, kinds: Sequence[str]) -> list[Path]:
        """Make and return ``bundle/mounts/<n>`` for each kind (``file`` or ``dir``), numbered from 0.

        An empty kind leaves its number out.
        """
        out = []
        for index, kind in enumerate(kinds):
            path = self.bundle / "mounts" / str(index)
            out.append(path)
            if kind == "dir":
                path.mkdir(mode=0o700)
            elif kind == "file":
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        return out


def _remove_meter_last(path: Path) -> None:
    """Remove the directory of a run whose end is not written yet.

    INVARIANT: the meter goes last. A recovery after a kill in the middle must not read a usage of zero.
    """
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != METER:
            os.unlink(entry.path)
    shutil.rmtree(path)


@contextlib.contextmanager
def abandoned(runs: Path) -> Iterator[list[Path]]:
    """The directories below ``runs`` whose process is gone, each locked for the caller to clean up and ``remove``."""
    with contextlib.ExitStack() as stack:
        found = []
        with gate(runs):
            # The time of all of them together: no other process has the gate meanwhile.
            until = time.monotonic() + DYING_SECONDS
            for path in sorted(p for p in runs.iterdir() if p.is_dir()):
                lock = open_lock(path)
                stack.callback(os.close, lock)
                if free(lock, until - time.monotonic()):
                    found.append(path)
        yield found


def remove(path: Path) -> None:
    """Remove the directory of one run, behind the gate.

    The lock goes before the directory. Without the gate another process could make a new lock between the two, take the
    run for abandoned and leave the directory not empty.
    """
    with gate(path.parent):
        shutil.rmtree(path)


def cgroups_of(path: Path) -> dict[str, Path]:
    """Read the planned paths of a run's cgroups. They are empty when its process died before it made any."""
    try:
        noted: dict[str, str] = json.loads((path / _CGROUPS).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return {name: Path(place) for name, place in noted.items()}


def published_of(path: Path) -> list[dict[str, Any]]:
    """Read the ports of a run that were to be published, each with its place: ``port`` and ``to``."""
    try:
        noted: list[dict[str, Any]] = json.loads((path / _PUBLISHED).read_bytes())
    except (FileNotFoundError, ValueError):
        return []
    return noted


def leases_of(path: Path) -> list[Lease]:
    """Read the leases of a run."""
    try:
        return msgspec.json.decode((path / _LEASES).read_bytes(), type=list[Lease])
    except (FileNotFoundError, msgspec.DecodeError):
        return []


def services_of(path: Path) -> list[str]:
    """Read the names of a run's gateway, such as ``models.covenant``, ``host.covenant:PORT`` for each such port, and
    ``ssh-agent HOST`` for each host at which logins are signed."""
    try:
        plan: dict[str, Any] = json.loads((path / POLICY / "gates.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return []
    ports = (f"{HOST_NAME}:{port}" for port in plan.get("host", ()))
    signs = sorted({f"ssh-agent {one['host']}" for one in plan.get("ssh", {"keys": []})["keys"]})
    return [*(str(name) for name in plan.get("services", {"names": []})["names"]), *ports, *signs]


def network_of(path: Path) -> dict[str, Any] | None:
    """Read the note of a run's gateway. None: it has none, or its process died before it was made."""
    try:
        noted: dict[str, Any] = json.loads((path / _NETWORK).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return noted


def mark_superseded(path: Path, reason: str, *, like: Path | None = None) -> None:
    """As ``mark_stopped``, of a run that ends because a newer serial of its agent id was accepted."""
    write_mark(path, STOPPED, json.dumps({"by": SUPERVISOR, "reason": reason, "superseded": True}), like)
