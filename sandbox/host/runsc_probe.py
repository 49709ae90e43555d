"""Probe runsc live: it must start a sandbox here, and a manifest's filter must be alive in it.

The probe starts a program three times, from a root that it makes. The first reads ``Seccomp: 2`` in its status. The
second makes a directory and gets EPERM. The third repeats the second without ``--oci-seccomp`` and must succeed,
otherwise the denial proved nothing. Each start has a deadline and its own cgroup, which is killed and removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from policy import errors
from policy.compile import bundle as compiled_bundle
from policy.compile import oci, plan
from sandbox.config import Config
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import pipes, spawn
from sandbox.kernel.runsc import command
from sandbox.rootfs import closure, erofs_image, skeleton
from sandbox.rundir import directory as bundles
from sandbox.rundir import label

_PROGRAMS = {"cat": Path("/usr/bin/cat"), "mkdir": Path("/usr/bin/mkdir")}
_SCRATCH = "/tmp"  # noqa: S108 - the sandbox's own tmpfs
_POINTS: tuple[skeleton.MountPoint, ...] = (("/proc", "dir"), ("/dev", "dir"), ("/sys", "dir"), (_SCRATCH, "dir"))
_FILTER_FLAG = "--oci-seccomp"
_ARCHES = {"x86_64": ("SCMP_ARCH_X86_64", ["mkdir", "mkdirat"]), "aarch64": ("SCMP_ARCH_AARCH64", ["mkdirat"])}
_NOBODY = 65534
_MAX_OUTPUT = 64 * 1024
# The prefix of the names of its directories and cgroups.
PREFIX = "doctor-"
_Note = Callable[[Mapping[str, Path]], None]


class Outcome(Struct, frozen=True):
    """Result of one start: runsc's exit status (None at the deadline), its output, the duration in seconds."""

    status: int | None
    output: bytes
    seconds: float


class Alive(Struct, frozen=True):
    """Result of the live probe. ``fault`` is empty if all is well, else one line that names the fault."""

    fault: str
    seconds: float


def alive(config: Config, binary: Path, *, deadline_seconds: float) -> Alive:
    """Start three sandboxes with the flags that runs use. ``deadline_seconds`` limits each of them.

    Raises:
        errors.MachineError: Raised when no cgroup can be made, or the probe's own programs are missing.
    """
    with _folder(config) as (folder, note):
        store = skeleton.Skeletons(folder / "rootfs")
        root = store.get([closure.of_elf(p, config) for p in _PROGRAMS.values()], _POINTS)
        probe = _Probe(folder, note, binary, root, deadline_seconds)
        status = probe.start([str(_PROGRAMS["cat"]), "/proc/self/status"], filtered=True)
        if fault := _started(status):
            return Alive(fault, status.seconds)
        if b"Seccomp:\t2" not in status.output:
            return Alive("the sandbox starts, and no filter is loaded in it although --oci-seccomp was given", 0)
        attempt = [str(_PROGRAMS["mkdir"]), f"{_SCRATCH}/probe"]
        denied = probe.start(attempt, filtered=True)
        control = probe.start(attempt, filtered=False)
        if control.status != 0:
            return Alive(f"the control without a filter failed: {_last_line(control.output)}", control.seconds)
        if denied.status == 0 or b"Operation not permitted" not in denied.output:
            return Alive("a call that the filter denies was not denied with EPERM", denied.seconds)
        return Alive("", status.seconds)


def networked(config: Config, binary: Path, *, network: int, covered: Sequence[str], deadline_seconds: float) -> str:
    """Start a sandbox in a network namespace whose device is eth0, with the configured network stack.

    Returns an empty string if the sandbox takes the device, else the fault.

    Raises:
        errors.MachineError: Raised when no cgroup can be made, or the probe's own program is missing.
    """
    with _folder(config) as (folder, note):
        store = skeleton.Skeletons(folder / "rootfs")
        root = store.get([closure.of_elf(_PROGRAMS["cat"], config)], _POINTS)
        probe = _Probe(folder, note, binary, root, deadline_seconds, stack=config.runsc_network)
        argv = [str(_PROGRAMS["cat"]), "/proc/net/dev"]
        found = probe.start(argv, filtered=True, network=network, covered=covered)
        if fault := _started(found):
            return fault
        return "" if b"eth0:" in found.output else "the sandbox starts, and has not taken its device"


def reads_erofs(config: Config, binary: Path, packer: Path, *, deadline_seconds: float) -> str:
    """Start programs of an EROFS image, whose root directory on the host is empty. ``packer`` is mkfs.erofs.

    The first must start. The second makes a directory where every user may, and gets EROFS. The third is the first
    without its execute bit, and must not start. Returns an empty string if all is so, else the fault.

    Raises:
        errors.MachineError: Raised when no cgroup can be made, or the probe's own programs are missing.
        errors.LayerToolError: Raised when the image cannot be made.
    """
    with _folder(config) as (folder, note):
        store = skeleton.Skeletons(folder / "rootfs")
        tree = store.get([closure.of_elf(p, config) for p in _PROGRAMS.values()], _POINTS)
        plain, place, empty, image = "/plain", "/open", folder / "empty", folder / erofs_image.NAME
        shutil.copyfile(_PROGRAMS["cat"], f"{tree}{plain}")
        Path(f"{tree}{plain}").chmod(0o644)
        Path(f"{tree}{place}").mkdir()
        Path(f"{tree}{place}").chmod(0o777)
        empty.mkdir(mode=0o755)
        erofs_image.make(packer, tree, image)
        probe = _Probe(folder, note, binary, empty, deadline_seconds, image=image)
        first = probe.start([str(_PROGRAMS["cat"]), "/proc/self/status"], filtered=True)
        if fault := _started(first):
            return fault
        if b"Seccomp:\t2" not in first.output:
            return "a sandbox starts from an EROFS file, and its program does not"
        written = probe.start([str(_PROGRAMS["mkdir"]), f"{place}/probe"], filtered=False)
        if written.status == 0 or b"Read-only file system" not in written.output:
            return f"an EROFS root is not read-only: {_last_line(written.output)}"
        if probe.start([plain, "/proc/self/status"], filtered=True).status == 0:
            return "a file of an EROFS root is started without its execute bit"
        return ""


@contextlib.contextmanager
def _folder(config: Config) -> Iterator[tuple[Path, _Note]]:
    """Make a run's directory that only root can enter. The next start removes the remains of a killed probe from it.

    Yields also the function to call with a cgroup's place before the cgroup is made.
    """
    if not config.state.is_dir():  # doctor, before there is a state
        with tempfile.TemporaryDirectory(prefix="covenant-doctor-", dir="/tmp") as folder:
            yield Path(folder), lambda paths: None
        return
    runs = config.state / "runs"
    runs.mkdir(mode=0o700, exist_ok=True)
    name = f"{PREFIX}{secrets.token_hex(8)}"
    with bundles.RunDirectory(runs / name, {label.SELF_TEST: "yes"}) as directory:
        yield directory.path, directory.note_cgroups


class _Probe:
    def __init__(
        self,
        folder: Path,
        note: _Note,
        binary: Path,
        root: Path,
        deadline_seconds: float,
        *,
        stack: str = "sandbox",
        image: Path | None = None,
    ) -> None:
        self._folder, self._note, self._deadline, self._stack = folder, note, deadline_seconds, stack
        self._binary, self._root = binary, root
        self._beside = {} if image is None else {"annotations": compiled_bundle.root_image(str(image))}

    def start(
        self, argv: list[str], *, filtered: bool, network: int | None = None, covered: Sequence[str] = ()
    ) -> Outcome:
        """Start one sandbox, wait for its end, and remove it."""
        name = f"{PREFIX}{secrets.token_hex(8)}"
        bundle, state = self._folder / name, self._folder / f"{name}-state"
        bundle.mkdir(mode=0o700)
        config = _config(self._root, argv, stack=None if network is None else self._stack)
        (bundle / "config.json").write_text(json.dumps({**config, **self._beside}))
        flags = {flag: value for flag, (value, _) in plan.RUNSC_FLAGS.items() if filtered or flag != _FILTER_FLAG}
        if network is not None:
            flags["--network"] = self._stack
        arguments = [str(self._binary), f"--root={state}", *(f"{k}={v}" for k, v in flags.items())]
        with contextlib.ExitStack() as stack:
            leaf = cgroup.Leaf(cgroup.Hierarchies.read(), name)
            self._note(leaf.plan())
            stack.enter_context(leaf)
            launch = proc_launch.Launch(
                program=str(self._binary),
                arguments=[*arguments, "run", f"--bundle={bundle}", name],
                environment=command.ENVIRONMENT,
                join_files=leaf.join_files(),
                network=network,
                covered=covered,
                filter=command.own_filter(os.uname().machine),
            )
            began = time.monotonic()
            try:
                child = stack.enter_context(spawn.spawn(launch, spawn.Patience(self._deadline, kill=leaf.kill)))
            except errors.StartTimeoutError:
                return Outcome(None, b"", time.monotonic() - began)
            # On every path the whole leaf is killed before the wait for the child.
            stack.callback(leaf.kill)
            output = _read(child, began + self._deadline)
            status = child.reap() if output is not None else None
            return Outcome(status, output or b"", time.monotonic() - began)


def _read(child: spawn.Child, until: float) -> bytes | None:
    """Read both outputs to their ends and wait for the exit. Returns None if the deadline comes first."""
    poller, out = select.poll(), b""
    open_fds = {child.stdout, child.stderr}
    for fd in open_fds:
        poller.register(fd, select.POLLIN)
    while open_fds:
        left = until - time.monotonic()
        ready = poller.poll(max(0, int(left * 1000)))
        if not ready:
            return None
        for fd, _ in ready:
            chunk = os.read(fd, 65536)
            out = (out + chunk)[-_MAX_OUTPUT:]
            if not chunk:
                poller.unregister(fd)
                open_fds.discard(fd)
    return out if pipes.readable(child.pidfd, until - time.monotonic()) else None


def _config(root: Path, argv: list[str], *, stack: str | None) -> Mapping[str, object]:
    arch, names = _ARCHES[os.uname().machine]
    deny = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": 1}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": _NOBODY, "gid": _NOBODY},
            "args": argv,
            "env": ["PATH=/usr/bin", "LANG=C"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {},
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": _SCRATCH, "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]},
        ],
        "linux": {
            **oci.namespaces(stack),
            "seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "architectures": [arch], "syscalls": [deny]},
        },
    }


def _started(outcome: Outcome) -> str:
    if outcome.status is None:
        return f"runsc hangs: no answer in {outcome.seconds:.0f} s"
    if b"panic:" in outcome.output or b"fatal error:" in outcome.output:
        # Seen with the distribution's rebuild by Go 1.26 (sandbox-facts).
        return "runsc panics at start: it was built with a Go that this release does not know"
    if outcome.status != 0:
        return f"runsc cannot start a sandbox (status {outcome.status}): {_last_line(outcome.output)}"
    return ""


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
