"""A plain gVisor sandbox with nothing of Covenant in it: the control half of every denial.

A denied probe proves something only beside the same probe that succeeds. `run` starts one command under real
runsc in a bundle without our policy: the host's /usr, a writable root of its own, uid 0 with every capability unless
told otherwise, no filter, no rlimits, no masked paths. gVisor itself and `--network=none` still hold, so that
nothing of the machine changes; a test that brings a network namespace of its own has netstack on its links.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Absolute, as the supervisor does it: a test must not find another runsc through PATH than the product does.
RUNSC_PATHS = ("/usr/bin/runsc", "/usr/local/bin/runsc", "/usr/sbin/runsc")

# Numbers 0 to 40 of capability.h, by name: OCI wants names.
_CAPABILITY_NAMES = """
CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
"""
ALL_CAPABILITIES = tuple("CAP_" + name for name in _CAPABILITY_NAMES.split())

# Links of a merged-/usr system. Debian 12 and Ubuntu 24.04 are merged.
_ROOT_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}

_KILL_SECONDS = 10.0
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Mount:
    """A host path (or a fresh tmpfs when `source` is None) at `target` inside the sandbox."""

    target: str
    source: Path | None = None
    writable: bool = False
    options: tuple[str, ...] = ()

    def oci(self) -> dict[str, object]:
        """The entry of `mounts` in config.json."""
        mode = "rw" if self.writable else "ro"
        if self.source is None:
            return {"destination": self.target, "type": "tmpfs", "source": "tmpfs", "options": [mode, *self.options]}
        return {
            "destination": self.target,
            "type": "bind",
            "source": str(self.source),
            "options": ["rbind", mode, *self.options],
        }


@dataclass(frozen=True)
class Result:
    """How the command ended. `status` is runsc's own: the command's status, or 128 + signal."""

    status: int
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool
    truncated: bool


def find_runsc() -> str:
    """The runsc of this machine.

    Raises:
        FileNotFoundError: none of `RUNSC_PATHS` exists.
    """
    for path in RUNSC_PATHS:
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(f"no runsc at {' or '.join(RUNSC_PATHS)}; install it with scripts/setup")


def config(
    argv: Sequence[str],
    *,
    mounts: Sequence[Mount] = (),
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    uid: int = 0,
    gid: int = 0,
    capabilities: Sequence[str] = ALL_CAPABILITIES,
    no_new_privileges: bool = False,
    rootfs: str = "rootfs",
    netns: str | None = None,
) -> dict[str, object]:
    """An OCI config.json that grants everything gVisor can grant without touching the host."""
    namespaces: list[dict[str, str]] = [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
    if netns is not None:
        namespaces[1]["path"] = netns
    caps = list(capabilities)
    environment = {"PATH": "/usr/bin:/usr/sbin", "HOME": "/tmp", "LANG": "C.UTF-8", **(env or {})}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": uid, "gid": gid},
            "args": list(argv),
            "env": [f"{key}={value}" for key, value in environment.items()],
            "cwd": cwd,
            "capabilities": dict.fromkeys(("bounding", "effective", "inheritable", "permitted", "ambient"), caps),
            "noNewPrivileges": no_new_privileges,
        },
        "root": {"path": rootfs, "readonly": False},
        "hostname": "plain",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs"},
            Mount("/usr", Path("/usr")).oci(),
            *(mount.oci() for mount in mounts),
        ],
        "linux": {"namespaces": namespaces},
    }


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    trees: Mapping[str, Path] | None = None,
    mounts: Sequence[Mount] = (),
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    uid: int = 0,
    gid: int = 0,
    capabilities: Sequence[str] = ALL_CAPABILITIES,
    no_new_privileges: bool = False,
    deadline_seconds: float = 60.0,
    max_output_bytes: int = 64 << 20,
    netns: str | None = None,
    inside: Sequence[str] = (),
    host_uds: str = "none",
) -> Result:
    """Run `argv` in a plain sandbox and give back all that it wrote.

    Args:
        netns: path of a network namespace of the test's own, whose links netstack takes; none without it.
        inside: the beginning of a command that starts runsc where it can do that (hostile_control.inside).
        host_uds: which unix sockets of the host may be opened through a mount, as runsc's flag has it.
        files: absolute path inside to content, planted in the sandbox's own (writable) root.
        trees: absolute path inside to a host directory that is copied there, writable.
        deadline_seconds: after this the whole sandbox is killed and `timed_out` is true.
        max_output_bytes: bound of each of stdout and stderr; beyond it the sandbox is killed.
    """
    with _scratch() as base:
        rootfs = _make_rootfs(base / "rootfs", files or {}, trees or {})
        document = config(
            argv,
            mounts=mounts,
            env=env,
            cwd=cwd,
            uid=uid,
            gid=gid,
            capabilities=capabilities,
            no_new_privileges=no_new_privileges,
            rootfs=str(rootfs),
            netns=netns,
        )
        (base / "config.json").write_text(json.dumps(document))
        container = "plain-" + secrets.token_hex(8)
        flags = [
            f"--root={base / 'state'}",
            "--platform=systrap",
            "--network=none" if netns is None else "--network=sandbox",
            "--overlay2=none",
            "--ignore-cgroups",
            "--net-raw",
            "--TESTONLY-allow-packet-endpoint-write",
            f"--host-uds={host_uds}",
        ]
        command = [*inside, find_runsc(), *flags, "run", f"--bundle={base}", container]
        with _process(command, container) as process:
            return _drain(process, stdin, deadline_seconds, max_output_bytes)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="plain-runsc-"))
    try:
        yield base
    finally:
        shutil.rmtree(base)


def _make_rootfs(rootfs: Path, files: Mapping[str, bytes], trees: Mapping[str, Path]) -> Path:
    for name in ("proc", "sys", "dev", "usr", "tmp", "etc"):
        (rootfs / name).mkdir(parents=True)
    # mkdtemp made the parent 0700; an unprivileged uid inside must be able to walk and use its own /tmp.
    os.chmod(rootfs, 0o755)
    os.chmod(rootfs / "tmp", 0o1777)
    for link, target in _ROOT_LINKS.items():
        if Path("/", target).is_dir():
            (rootfs / link).symlink_to(target)
    for inside, source in trees.items():
        shutil.copytree(source, rootfs / inside.lstrip("/"), symlinks=True)
    for inside, content in files.items():
        path = rootfs / inside.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return rootfs


@contextlib.contextmanager
def _process(command: Sequence[str], container: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    try:
        yield process
    finally:
        _end(process, container)


def _end(process: subprocess.Popen[bytes], container: str) -> None:
    """Leave no process of this container. Its random name makes the search exact."""
    deadline = time.monotonic() + _KILL_SECONDS
    while pids := pids_of(container):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        if time.monotonic() > deadline:
            raise RuntimeError(f"sandbox {container} is still there after {_KILL_SECONDS:g} s: {pids}")
    process.wait(_KILL_SECONDS)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def pids_of(container: str) -> list[int]:
    """Host processes whose command line carries the container's name (runsc, its sandbox and gofer)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if container.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _drain(process: subprocess.Popen[bytes], stdin: bytes, deadline_seconds: float, limit: int) -> Result:
    """Feed stdin and collect both outputs without ever blocking on one of the three."""
    started = time.monotonic()
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    pending = memoryview(stdin)
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    stdout, stderr = outputs.values()
    open_outputs = set(outputs)
    timed_out = truncated = False
    with selectors.DefaultSelector() as selector:
        for descriptor in outputs:
            selector.register(descriptor, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin.fileno(), selectors.EVENT_WRITE)
        while open_outputs:
            left = deadline_seconds - (time.monotonic() - started)
            timed_out = left <= 0
            if timed_out or truncated:
                break
            for key, _ in selector.select(left):
                if key.fd not in outputs:
                    pending = _feed(process, pending, selector)
                    continue
                chunk = os.read(key.fd, _CHUNK_BYTES)
                if not chunk:
                    selector.unregister(key.fd)
                    open_outputs.discard(key.fd)
                outputs[key.fd] += chunk
                truncated = truncated or len(outputs[key.fd]) > limit
    status = -1
    if not timed_out and not truncated:
        # Both outputs are closed, so the command is over; what is left is runsc's own clean-up.
        status = process.wait(_KILL_SECONDS)
    return Result(status, bytes(stdout), bytes(stderr), time.monotonic() - started, timed_out, truncated)


def _feed(process: subprocess.Popen[bytes], pending: memoryview, selector: selectors.BaseSelector) -> memoryview:
    assert process.stdin
    try:
        pending = pending[os.write(process.stdin.fileno(), pending[:_CHUNK_BYTES]) :] if pending else pending
    except BrokenPipeError:
        pending = pending[:0]
    if not pending:
        selector.unregister(process.stdin.fileno())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    return pending
