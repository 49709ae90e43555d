"""Check what this host can enforce: one table of checks, each with its purpose and the exact fix.

``covenant doctor`` prints them. The checks leave nothing behind, and each step has a deadline. A check that needs root
returns ``unknown`` without it instead of a guess.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pwd
import re
import secrets
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from policy import core_dumps, errors
from policy.host import RunscFacts
from sandbox import doctor_network, doctor_time, progress
from sandbox.config import Config, trusted_binary
from sandbox.host import erofs_roots, runsc_probe
from sandbox.host import facts as host_facts
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.fs import landlock
from sandbox.kernel.proc import launch, launcher, spawn
from sandbox.rootfs import closure, loader_patch, writable_size
from sandbox.standby import backoff, wanted

INSTALL_RUNSC = (
    "install runsc: Debian 12 `apt-get install -t bookworm-backports runsc`, Debian 13 `apt-get install runsc`, "
    "elsewhere gVisor's own release (gvisor.dev/docs/user_guide/install)"
)
# sandbox-facts: bookworm's own release knows only the platforms ptrace and kvm.
_RELEASES_WITHOUT_SYSTRAP = 20_230_101
_MIN_KERNEL = (5, 12)  # mount_setattr(2)
_PROBE_LIMITS = {
    1: (("memory", "memory.limit_in_bytes", "67108864"), ("pids", "pids.max", "64"), ("cpu", "cpu.shares", "100")),
    2: (("memory", "memory.max", "67108864"), ("pids", "pids.max", "64"), ("cpu", "cpu.max", "50000 100000")),
}


class Status(StrEnum):
    """Result of a check. ``unknown`` means that it could not be made, which does not count as ok."""

    OK = "ok"
    DEGRADED = "degraded"
    MISSING = "missing"
    UNKNOWN = "unknown"


class Check(Struct, frozen=True):
    """One line of the report. ``required`` checks must not be missing or unknown for linux-gvisor to be enforced."""

    name: str
    status: Status
    enforces: str
    found: str
    mend: str = ""
    required: bool = False


class Report(Struct, frozen=True):
    """All checks of one host, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def enforceable(self) -> bool:
        """Whether linux-gvisor runs can be enforced here."""
        return all(c.status in (Status.OK, Status.DEGRADED) for c in self.checks if c.required)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``covenant doctor --json``."""
        return {
            "kind": "doctor",
            "enforceable": self.enforceable,
            "checks": [structs.asdict(c) for c in self.checks],
        }


class Finding(Struct, frozen=True):
    """Result of one check: the status, the finding, and the fix if it is not ok."""

    status: Status
    found: str
    mend: str = ""


Look = Callable[[Config, float], Finding]


def _ok(found: str) -> Finding:
    return Finding(Status.OK, found)


def examine(config: Config, *, deadline_seconds: float) -> Report:
    """Make every check. ``deadline_seconds`` limits each start of a sandbox, of which there are six at most."""
    done: list[Check] = []
    for name, required, enforces, look in TABLE:
        try:
            with progress.step(f"checking {name}"):
                finding = look(config, deadline_seconds)
        except errors.CovenantError as e:
            finding = Finding(Status.MISSING, e.message, e.hint or "see `covenant help " + e.code + "`")
        except OSError as e:
            finding = Finding(Status.UNKNOWN, f"not probed: {e.strerror or e}", "run covenant doctor as root")
        done.append(Check(name, finding.status, enforces, finding.found, finding.mend, required))
    return Report(tuple(done))


def _root(config: Config, deadline: float) -> Finding:
    if os.geteuid() == 0:
        return _ok("running as root")
    return Finding(Status.UNKNOWN, f"running as uid {os.geteuid()}", "run covenant doctor as root (with COVENANT_HOME)")


def _machine(config: Config, deadline: float) -> Finding:
    arch = host_facts.architecture()
    if arch == "x86_64":
        return _ok(arch)
    return Finding(Status.DEGRADED, arch, "permissions.executables is refused here; use an x86_64 host for it")


def _kernel(config: Config, deadline: float) -> Finding:
    release = os.uname().release
    if kernel_version(release) >= _MIN_KERNEL:
        return _ok(release)
    return Finding(Status.MISSING, release, f"boot Linux {'.'.join(map(str, _MIN_KERNEL))} or newer")


def _runsc(config: Config, deadline: float) -> Finding:
    try:
        facts = host_facts.runsc_facts(config)
    except errors.HostError as e:
        return Finding(Status.MISSING, e.message, e.hint or INSTALL_RUNSC)
    found = f"{facts.path} {facts.version} sha256 {facts.sha256[:16]}"
    if 0 < release_date(facts.version) < _RELEASES_WITHOUT_SYSTRAP:
        return Finding(Status.MISSING, f"{found}: too old, it knows only the platforms ptrace and kvm", INSTALL_RUNSC)
    return _ok(found)


def _live(config: Config, deadline: float) -> Finding:
    if os.geteuid() != 0:
        return Finding(Status.UNKNOWN, "not probed: needs root", "run covenant doctor as root")
    facts = _runsc_or_none(config)
    if facts is None:
        return Finding(Status.MISSING, "no usable runsc to start", INSTALL_RUNSC)
    outcome = runsc_probe.alive(config, Path(facts.path), deadline_seconds=deadline)
    if outcome.fault:
        return Finding(Status.MISSING, outcome.fault, INSTALL_RUNSC)
    return _ok(f"systrap starts in {outcome.seconds:.2f} s, Seccomp: 2 inside, denied call EPERM, control passes")


def _platform(config: Config, deadline: float) -> Finding:
    kvm = "/dev/kvm is there and not used: a kvm that is not real hangs" if Path("/dev/kvm").exists() else "no /dev/kvm"
    return _ok(f"systrap always; {kvm}")


def _limits(config: Config, deadline: float) -> Finding:
    hierarchies = cgroup.Hierarchies.read()
    if hierarchies.version == 0:
        return Finding(
            Status.MISSING,
            "no hierarchy carries memory, pids and cpu",
            "boot with systemd's unified cgroups, or mount the v1 controllers",
        )
    if os.geteuid() != 0:
        return Finding(Status.UNKNOWN, f"cgroup v{hierarchies.version}, not probed: needs root", "run as root")
    limits = [cgroup.Limit(*row) for row in _PROBE_LIMITS[hierarchies.version]]
    with cgroup.Leaf(hierarchies, f"doctor-{secrets.token_hex(8)}") as leaf:
        leaf.apply(limits)
    return _ok(f"cgroup v{hierarchies.version}: memory, pids and cpu written and read back")


def _swap(config: Config, deadline: float) -> Finding:
    if host_facts.cgroup_facts().swap_accounting:
        return _ok("swap is counted per cgroup")
    return Finding(
        Status.DEGRADED,
        "swap is not counted: swap_mb above 0 is refused, and an agent's pages may be swapped out",
        "boot with swapaccount=1, or run without swap",
    )


def _freezer(config: Config, deadline: float) -> Finding:
    hierarchies = cgroup.Hierarchies.read()
    if hierarchies.version == 2 or "freezer" in hierarchies.mounts:
        return _ok("cgroup.freeze" if hierarchies.version == 2 else "v1 freezer")
    return Finding(Status.DEGRADED, "no freezer: suspension and standby are refused", "mount the v1 freezer controller")


def standby(config: Config, deadline: float) -> Finding:
    """Report the agents whose standby instances the supervisor holds back now, with the reasons."""
    try:
        kept = len(wanted.wanted(config.state))
        why = backoff.why_not_ready(config.state, now_ms=int(time.time() * 1000))
    except PermissionError:
        return Finding(Status.UNKNOWN, "the state is root's to read", "run it with sudo")
    if not why:
        return _ok(f"{kept} agents are to be kept ready" if kept else "no agent is to be kept ready")
    return Finding(
        Status.DEGRADED, "; ".join(why), "docs/standby.md says what an agent that waits does; its log says how it ended"
    )


def _tool(name: str, package: str) -> Callable[[Config, float], Finding]:
    def look(config: Config, deadline: float) -> Finding:
        try:
            return _ok(str(trusted_binary(getattr(config, name))))
        except errors.HostError as e:
            return Finding(Status.MISSING, e.message, e.hint or f"apt-get install {package}")

    return look


def _erofs(config: Config, deadline: float) -> Finding:
    program, slower = erofs_roots.program(), "a root of layers is a directory, and starts more slowly"
    if program is None:
        return Finding(Status.DEGRADED, f"no mkfs.erofs: {slower}", f"apt-get install {erofs_roots.PACKAGE}")
    if os.geteuid() != 0:
        return Finding(Status.UNKNOWN, f"{program}, not probed: needs root", "run covenant doctor as root")
    runsc = _runsc_or_none(config)
    if runsc is None:
        return Finding(Status.UNKNOWN, f"{program}, not probed: no usable runsc", INSTALL_RUNSC)
    fault = erofs_roots.fault(config, runsc, os.uname().release, program, deadline_seconds=deadline)
    if fault:
        return Finding(Status.DEGRADED, f"{fault}: {slower}", INSTALL_RUNSC)
    return _ok(f"{program}; a sandbox starts from one file")


def _of_network(look: Callable[[Config, RunscFacts | None, float], doctor_network.Look]) -> Look:
    def looked(config: Config, deadline: float) -> Finding:
        status, found, mend = look(config, _runsc_or_none(config), deadline)
        return Finding(Status(status), found, mend)

    return looked


def _of_time(look: Callable[[Config], doctor_network.Look]) -> Look:
    def looked(config: Config, deadline: float) -> Finding:
        status, found, mend = look(config)
        return Finding(Status(status), found, mend)

    return looked


def _seccomp_library(config: Config, deadline: float) -> Finding:
    try:
        module = importlib.import_module("pyseccomp")
    except (ImportError, OSError, RuntimeError) as e:
        return Finding(Status.MISSING, f"libseccomp cannot be loaded: {e}", "apt-get install libseccomp2")
    return _ok(f"libseccomp API level {module.get_api()}")


def _user(config: Config, deadline: float) -> Finding:
    name = config.trusted_local_user
    with contextlib.suppress(KeyError):
        uid = pwd.getpwnam(name).pw_uid
        if uid == 0:
            return Finding(Status.MISSING, f"`{name}` is uid 0", "set trusted_local_user to a user without rights")
        return _ok(f"{name} (uid {uid})")
    return Finding(
        Status.MISSING, f"no user `{name}`", f"useradd --system --no-create-home --shell /usr/sbin/nologin {name}"
    )


def _runtime(name: str, package: str) -> Callable[[Config, float], Finding]:
    def look(config: Config, deadline: float) -> Finding:
        try:
            found = closure.of_runtime(name, config)
        except errors.CovenantError as e:
            return Finding(Status.MISSING, e.message, e.hint or f"apt-get install {package}")
        size = sum(f.size for f in found.files) >> 20
        return _ok(f"{found.entry}: {len(found.files)} files, {size} MiB, closure {found.digest[:16]}")

    return look


def _loader(config: Config, deadline: float) -> Finding:
    path = Path(loader_patch.LOADERS[host_facts.architecture()])
    loader_patch.patch(path.read_bytes(), name=str(path))
    return _ok(f"{path} takes the trampoline")


def _written(config: Config, deadline: float) -> Finding:
    """Check whether this host can have a bounded write path. The bound itself is checked when a path is granted."""
    known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines() if line}
    kinds = sorted(known & set(writable_size.KINDS))
    if not kinds:
        return Finding(
            Status.MISSING, f"none of {', '.join(writable_size.KINDS)} is known to this kernel", "load the ext4 module"
        )
    return _ok(
        f"a write path is a file system of its own ({', '.join(kinds)}) of less than disk_mb; no project quotas; "
        "one run at a time writes it, and locks of host programs are not seen"
    )


def _io(config: Config, deadline: float) -> Finding:
    hierarchies = cgroup.Hierarchies.read()
    if "io" in hierarchies.mounts:
        return _ok("cgroup v2 with the controller io")
    lacking = "cgroup v1 counts no buffered write" if hierarchies.version == 1 else "the controller io is not there"
    return Finding(Status.DEGRADED, f"{lacking}: io limits are refused", "boot with systemd's unified cgroups")


def _cpu_time(config: Config, deadline: float) -> Finding:
    hierarchies = cgroup.Hierarchies.read()
    if hierarchies.version == 2 or "cpuacct" in hierarchies.mounts:
        return _ok("cpu.stat" if hierarchies.version == 2 else "cpuacct.usage")
    return Finding(Status.DEGRADED, "processor time is not counted: cpu_time_ms is refused", "mount the v1 cpuacct")


def _self_test(config: Config, deadline: float) -> Finding:
    if config.self_test:
        return _ok("each policy is tried once a day and after any change, before its first run")
    mend = "take self_test = false out of the configuration"
    return Finding(Status.DEGRADED, "off: each run says so in the log", mend)


def _starter(config: Config, deadline: float) -> Finding:
    if not launcher.there():
        mend = "install Covenant's wheel for this platform; in a clone, ./scripts/setup"
        return Finding(Status.DEGRADED, f"no {launcher.PROGRAM}: each run forks Python for it, some 8 ms", mend)
    # A program that exists and does not work fails every run; the error of `spawn` says so.
    with spawn.spawn(launch.Launch("/bin/true", ["true"], {})) as child:
        if status := child.reap():
            return Finding(Status.MISSING, f"{launcher.PROGRAM} does not work: status {status}", launcher.MEND)
    return _ok(f"{launcher.PROGRAM}: no run forks Python to start runsc")


def _core_dumps(config: Config, deadline: float) -> Finding:
    return core_dumps_of(Path("/proc/sys/kernel/core_pattern").read_text("utf-8", "backslashreplace").strip())


def core_dumps_of(core_pattern: str) -> Finding:
    """Report where this core_pattern sends the memory of an agent or a sandbox that crashes."""
    where, shown = core_dumps.destination(core_pattern), core_pattern[:200].encode("unicode_escape").decode()
    if where == "file":
        return _ok(f"core_pattern `{shown}` names a file: runs write none (RLIMIT_CORE is {core_dumps.LIMIT})")
    mend = "sysctl -w kernel.core_pattern=core, or have no run under trusted-local"
    if where == "program":
        found = f"`{shown}` gets no dump of a run (RLIMIT_CORE is 1); an agent of trusted-local can set its own to 0"
        return Finding(Status.DEGRADED, found, mend)
    found = f"`{shown}` gets the memory of what crashes, whatever its limit is"
    return Finding(Status.DEGRADED, found, "sysctl -w kernel.core_pattern=core")


def _landlock(config: Config, deadline: float) -> Finding:
    abi = landlock.abi()
    return _ok(f"landlock ABI {abi}") if abi else Finding(Status.DEGRADED, "no landlock", "boot with lsm=landlock,...")


def _vault(config: Config, deadline_seconds: float) -> Finding:
    """Open the vault as a run does: by the key file of the configuration, or the server's token."""
    from sandbox.vault import open as vault_open

    if os.geteuid() != 0:
        return Finding(Status.UNKNOWN, "not opened: needs root", "run covenant doctor as root")
    vault = vault_open.configured(config)
    # A name that no secret has: nothing is decrypted.
    with vault.opened("doctor", ""):
        where = (
            config.vault.address if vault.name == "openbao" else f"{config.state}/vault, opened by {config.vault.key}"
        )
    return _ok(f"{vault.name}: {where}")


def kernel_version(release: str) -> tuple[int, int]:
    """Return major and minor of a kernel release such as ``6.1.0-18-amd64``, or (0, 0) if it has neither."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def release_date(version: str) -> int:
    """Return the date in a runsc version such as ``0.0~20240729.0`` or ``release-20240729.0`` as a number, else 0."""
    match = re.search(r"20\d{6}", version)
    return int(match[0]) if match else 0


def _runsc_or_none(config: Config) -> RunscFacts | None:
    with contextlib.suppress(errors.HostError):
        return host_facts.runsc_facts(config)
    return None


# name, required for linux-gvisor, what it enforces, how to look
TABLE: tuple[tuple[str, bool, str, Callable[[Config, float], Finding]], ...] = (
    ("root", True, "cgroups, mounts and uids of runs", _root),
    ("machine", True, "system call filters, and that only granted executables start", _machine),
    ("kernel", True, "mount flags of granted paths (mount_setattr)", _kernel),
    ("runsc", True, "everything that linux-gvisor confines", _runsc),
    ("runsc live", True, "the manifest's system calls: a filter that is alive", _live),
    ("platform", False, "how gVisor catches system calls", _platform),
    ("cgroup limits", True, "memory_mb, pids_max, cpu_millis, cpu_weight", _limits),
    ("swap accounting", False, "swap_mb", _swap),
    ("freezer", False, "suspension and standby at no cost", _freezer),
    ("standby", False, "[sandbox] standby: instances that are made before their intent", standby),
    ("python3", False, "runtime python3", _runtime("python3", "python3")),
    ("node", False, "runtime node", _runtime("node", "nodejs")),
    ("loader", False, "permissions.executables: ld.so starts no other file", _loader),
    ("network", False, "resources.network", _of_network(doctor_network.way)),
    (
        "uplink",
        False,
        "network modes other than off, and services under covenant-supervisor",
        _of_network(doctor_network.interface),
    ),
    ("netlink", False, "covenant attest of a run with a network", _of_network(doctor_network.readers)),
    ("resolvers", False, "permissions.network by name", _of_network(doctor_network.names)),
    (
        "other firewalls",
        False,
        "that agents' packets arrive: what is granted works",
        _of_network(doctor_network.others),
    ),
    ("authorities", False, "who is trusted by gates that speak TLS", _of_network(doctor_network.authorities)),
    ("nft", False, "network modes other than off", _tool("nft", "nftables")),
    ("libseccomp", False, "the deny list of trusted-local", _seccomp_library),
    ("trusted-local user", False, "trusted-local never runs as root", _user),
    ("write paths", False, "disk_mb over host write paths", _written),
    ("io limits", False, "io_read_bps, io_write_bps, io_read_iops, io_write_iops", _io),
    ("processor time", False, "cpu_time_ms", _cpu_time),
    ("clock", False, "that what had expired stays so, and new signatures count", _of_time(doctor_time.clock)),
    ("expiry", False, "nothing: what ends within 14 days stops to work then", _of_time(doctor_time.expiries)),
    ("self-test", False, "that what a policy forbids is refused, by trying it", _self_test),
    ("vault", False, "permissions.credentials", _vault),
    ("erofs", False, "nothing: how quickly a root of layers is started", _erofs),
    ("starter", False, "nothing: how quickly runsc is started", _starter),
    ("core dumps", False, "that the memory of a run that crashes stays with it", _core_dumps),
    ("landlock", False, "nothing yet: for information", _landlock),
)
