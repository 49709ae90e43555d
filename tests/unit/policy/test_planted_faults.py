"""Faults that a compiler could have, planted into real artefacts of real manifests: the proof finds each of them.

A fault is planted wherever the faulty compiler would have written it, so that what finds it is the comparison with the
grants and not that two files disagree. The filter's own faults are in tests/unit/policy/decompile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from policy import errors
from tests import proof_kit
from tests.proof_kit import Case, Documents

Fault = Callable[[Documents], None]
MIB = 1 << 20


@functools.cache
def compiled(name: str) -> Case:
    return proof_kit.CASES[name]()


# --- where a fault is written ----


def mount(d: Documents, place: str, **changes: Any) -> None:
    """Change a mount in mounts.json and in config.json alike."""
    for at, one in enumerate(d["mounts.json"]["mounts"]):
        if one["destination"] == place:
            one.update(changes)
            there = d["config.json"]["mounts"][at]
            bind = one["type"] == "bind"
            there["options"] = ["bind", *one["options"]] if bind else one["options"]
            there["type"], there["source"] = one["type"], f"mounts/{at}" if bind else one["source"]
            return
    raise AssertionError(place)


def without(d: Documents, place: str, option: str) -> None:
    options = next(m["options"] for m in d["mounts.json"]["mounts"] if m["destination"] == place)
    assert option in options
    mount(d, place, options=[o for o in options if o != option])


def unmount(d: Documents, place: str) -> None:
    plan = d["mounts.json"]["mounts"]
    (at,) = (i for i, one in enumerate(plan) if one["destination"] == place)
    del plan[at], d["config.json"]["mounts"][at], d["mounts.json"]["root"]["mount_points"][at]
    for index, one in enumerate(d["config.json"]["mounts"]):
        if one["type"] == "bind":
            one["source"] = f"mounts/{index}"


def bind(d: Documents, place: str, *options: str, source: str = "") -> None:
    """One mount more, after all others."""
    at = len(d["mounts.json"]["mounts"])
    one = {"destination": place, "kind": "dir", "options": list(options), "source": source or place, "type": "bind"}
    d["mounts.json"]["mounts"].append(one)
    d["mounts.json"]["root"]["mount_points"].append({"kind": "dir", "path": place})
    d["config.json"]["mounts"].append(
        {"destination": place, "options": ["bind", *options], "source": f"mounts/{at}", "type": "bind"}
    )


def secret_files(d: Documents) -> None:
    """The folder of secrets, and the variable that names it."""
    bind(d, "/run/credentials", *READ, source="credentials")
    process(d)["env"].insert(1, "CREDENTIALS_DIRECTORY=/run/credentials")


def limit_of(d: Documents) -> int:
    return int(next(one["hard"] for one in process(d)["rlimits"] if one["type"] == "RLIMIT_NPROC"))


def limit(d: Documents, name: str, value: int) -> None:
    for one in d["config.json"]["process"]["rlimits"]:
        if one["type"] == name:
            one["soft"] = one["hard"] = value


def file(d: Documents, version: str, name: str, value: str) -> None:
    (entry,) = (e for e in d["cgroup.json"][version] if e["file"] == name)
    assert entry["value"] != value
    entry["value"] = value


def oci(d: Documents, part: str, key: str, value: int) -> None:
    d["cgroup.json"]["oci"][part][key] = value
    d["config.json"]["linux"]["resources"][part][key] = value


def flag(d: Documents, name: str, value: str) -> None:
    assert d["runtime.json"]["flags"][name] != value
    d["runtime.json"]["flags"][name] = value


def process(d: Documents) -> Any:
    return d["config.json"]["process"]


def section(d: Documents, name: str, part: str, **changes: Any) -> None:
    for key, value in changes.items():
        assert d[name][part][key] != value
        d[name][part][key] = value


def memory(d: Documents, extra: int) -> None:
    """So many bytes more, wherever memory is limited."""
    (entry,) = (e for e in d["cgroup.json"]["v2"] if e["file"] == "memory.max")
    value = int(entry["value"]) + extra
    file(d, "v2", "memory.max", str(value))
    file(d, "v2", "memory.high", str(value))
    for key in ("limit", "swap"):
        oci(d, "memory", key, d["cgroup.json"]["oci"]["memory"][key] + extra)
    file(d, "v1", "memory.limit_in_bytes", str(value))
    file(d, "v1", "memory.memsw.limit_in_bytes", str(d["cgroup.json"]["oci"]["memory"]["swap"]))


def tasks(d: Documents, value: int) -> None:
    """Another wall around host tasks, wherever there is one."""
    for version in ("v1", "v2"):
        file(d, version, "pids.max", str(value))
    oci(d, "pids", "limit", value)


def one_process_more(d: Documents) -> None:
    limit(d, "RLIMIT_NPROC", 11)
    tasks(d, 84)
    d["cgroup.json"]["overhead"].update(mb=69)
    memory(d, MIB)


def a_directory_for_a_file(d: Documents) -> None:
    mount(d, "/opt/file", kind="dir")
    for point in d["mounts.json"]["root"]["mount_points"]:
        point["kind"] = "dir"


def resolver_directory(d: Documents) -> None:
    mount(d, "/etc/resolv.conf", kind="dir")
    for point in d["mounts.json"]["root"]["mount_points"]:
        point["kind"] = "dir"


def drop(entries: list[Any], **where: Any) -> None:
    """Take out the one entry that has these values."""
    (at,) = (i for i, one in enumerate(entries) if all(one[k] == v for k, v in where.items()))
    del entries[at]


READ = ["ro", "nosuid", "nodev", "noexec"]
WRITE = ["rw", "nosuid", "nodev", "noexec", "nosymfollow", "idmapped"]
SCRATCH = ["nosuid", "nodev", "noexec", "mode=1777"]
COVER = [*READ, "mode=0555", "size=4k"]

# --- what the agent sees and starts: (case, fault) by what was done wrong ----

MOUNTS: dict[str, tuple[str, Fault]] = {
    "a read path is writable": ("much", lambda d: mount(d, "/opt/a", options=["rw", *READ[1:]])),
    "a read path is a write path": ("much", lambda d: mount(d, "/opt/a", options=WRITE)),
    "a read path without nosuid": ("much", lambda d: without(d, "/opt/a", "nosuid")),
    "a read path without nodev": ("much", lambda d: without(d, "/opt/a", "nodev")),
    "a read path without noexec": ("much", lambda d: without(d, "/opt/a", "noexec")),
    "a read path is missing": ("much", lambda d: unmount(d, "/opt/a")),
    "a read path shows another": ("much", lambda d: mount(d, "/opt/a", source="/opt")),
    "a path that was not granted": ("much", lambda d: bind(d, "/zz", *READ)),
    "a granted path's parent": ("empty host", lambda d: bind(d, "/zz/usr", *READ)),
    "a write path without noexec": ("writes", lambda d: without(d, "/srv/data", "noexec")),
    "a write path that follows links": ("writes", lambda d: without(d, "/srv/data", "nosymfollow")),
    "a write path is only readable": ("writes", lambda d: mount(d, "/srv/data", options=READ)),
    "a write path that was not granted": ("writes", lambda d: bind(d, "/zz", *WRITE)),
    "the package is writable": ("much", lambda d: mount(d, "/workspace", options=["rw", *READ[1:]])),
    "the package's files can be started": ("much", lambda d: without(d, "/workspace", "noexec")),
    "the package is another directory": ("much", lambda d: mount(d, "/workspace", source="/opt/a")),
    "/proc without nosuid": ("much", lambda d: without(d, "/proc", "nosuid")),
    "/proc is the host's": ("much", lambda d: mount(d, "/proc", type="bind", source="/proc", options=READ)),
    "/sys is not covered": ("much", lambda d: unmount(d, "/sys")),
    "/dev/shm is not covered": ("least", lambda d: unmount(d, "/dev/shm")),
    "/sys is the host's": ("much", lambda d: mount(d, "/sys", type="bind", source="/sys", options=READ)),
    "/dev/net can be written": ("much", lambda d: mount(d, "/dev/net", options=["rw", *COVER[1:]])),
    "the scratch is larger": ("much", lambda d: mount(d, "/tmp", options=[*SCRATCH, "size=8m"])),
    "the scratch has no size": ("much", lambda d: mount(d, "/tmp", options=SCRATCH)),
    "the scratch has size 0, which is none": ("much", lambda d: mount(d, "/tmp", options=[*SCRATCH, "size=0m"])),
    "files of the scratch can be started": ("much", lambda d: without(d, "/tmp", "noexec")),
    "a scratch where none is granted": ("least", lambda d: mount(d, "/tmp", options=[*SCRATCH, "size=100m"])),
    "no scratch where one is granted": ("much", lambda d: mount(d, "/tmp", options=COVER)),
    "a mount over another": ("much", lambda d: bind(d, "/opt", *READ)),
    "two mounts at one place": ("much", lambda d: bind(d, "/opt/a", *READ)),
    "the root is writable": ("much", lambda d: d["config.json"]["root"].update(readonly=False)),
    "the root is the host's": ("much", lambda d: d["config.json"]["root"].update(path="/")),
    "a program that was not granted": (
        "much",
        lambda d: d["mounts.json"]["root"]["closures"].append(
            {"digest": "a" * 64, "entry": "/usr/bin/sh", "name": "/usr/bin/sh", "sha256": "b" * 64}
        ),
    ),
    "a granted program is missing": ("much", lambda d: d["mounts.json"]["root"]["closures"].pop()),
    "a pinned program has other content": (
        "much",
        lambda d: next(c for c in d["mounts.json"]["root"]["closures"] if c["name"] == "/usr/bin/grep").update(
            sha256="e" * 64
        ),
    ),
}

# --- the first process ----

PROCESS: dict[str, tuple[str, Fault]] = {
    "new privileges": ("much", lambda d: process(d).update(noNewPrivileges=False)),
    "a capability": ("much", lambda d: process(d)["capabilities"]["effective"].append("CAP_NET_RAW")),
    "a capability in the bounding set": ("much", lambda d: process(d)["capabilities"]["bounding"].append("CAP_CHOWN")),
    "uid 0": ("much", lambda d: process(d)["user"].update(uid=0)),
    "group 0 beside its own": ("much", lambda d: process(d)["user"].update(additionalGids=[0])),
    "a terminal": ("much", lambda d: process(d).update(terminal=True)),
    "another directory": ("much", lambda d: process(d).update(cwd="/")),
    "an environment variable more": ("much", lambda d: process(d)["env"].append("LD_PRELOAD=/workspace/x.so")),
    "PATH with the package": ("much", lambda d: process(d)["env"].__setitem__(3, "PATH=/workspace:/usr/bin")),
    "a shell instead of the interpreter": ("much", lambda d: process(d)["args"].__setitem__(1, "/bin/sh")),
    "a shell instead of init": ("much", lambda d: process(d)["args"].__setitem__(0, "/bin/sh")),
    "no init beside programs": ("much", lambda d: process(d)["args"].pop(0)),
    "init twice": ("much", lambda d: process(d)["args"].insert(0, "/.covenant/init")),
    "init without programs": ("least", lambda d: process(d)["args"].insert(0, "/.covenant/init")),
    "a mount over init": ("much", lambda d: bind(d, "/.covenant", *READ)),
    "an option of the interpreter": ("much", lambda d: process(d)["args"].__setitem__(2, "-c")),
    "a file outside of the package": (
        "much",
        lambda d: process(d)["args"].__setitem__(2, "../opt/a/evil.py"),
    ),
    "an argument more": ("much", lambda d: process(d)["args"].append("x")),
    "another program of the package": ("program", lambda d: process(d).update(args=["/usr/bin/python3.11"])),
    "no pid namespace": ("much", lambda d: drop(d["config.json"]["linux"]["namespaces"], type="pid")),
    "no network namespace": ("least", lambda d: drop(d["config.json"]["linux"]["namespaces"], type="network")),
    "the network namespace of an agent that has none": (
        "least",
        lambda d: d["config.json"]["linux"]["namespaces"][2].update(path="/proc/self/ns/net"),
    ),
    "a network namespace of its own beside the gateway's": (
        "network",
        lambda d: d["config.json"]["linux"]["namespaces"][2].pop("path"),
    ),
    "the host's network namespace": (
        "network",
        lambda d: d["config.json"]["linux"]["namespaces"][2].update(path="/proc/1/ns/net"),
    ),
    "the host's stack without a user namespace": (
        "host stack",
        lambda d: drop(d["config.json"]["linux"]["namespaces"], type="user"),
    ),
    "the host's user namespace": (
        "host stack",
        lambda d: d["config.json"]["linux"]["namespaces"][5].update(path="/proc/1/ns/user"),
    ),
    "another user for root inside": (
        "host stack",
        lambda d: d["config.json"]["linux"]["uidMappings"][0].update(hostID=1),
    ),
    "gVisor's stack with the form of the host's": (
        "host stack",
        lambda d: d["runtime.json"]["flags"].update({"--network": "sandbox"}),
    ),
    "the host's stack with the form of gVisor's": (
        "network",
        lambda d: d["runtime.json"]["flags"].update({"--network": "host"}),
    ),
    "the host's stack without a network": (
        "least",
        lambda d: d["runtime.json"]["flags"].update({"--network": "host"}),
    ),
    "secrets as files that nobody asked for": ("rest", secret_files),
    "secrets as files of an agent that has none": ("least", secret_files),
    "files of secrets that the environment does not name": (
        "secret files",
        lambda d: process(d)["env"].remove("CREDENTIALS_DIRECTORY=/run/credentials"),
    ),
    "files of secrets that are not mounted": ("secret files", lambda d: unmount(d, "/run/credentials")),
    "files of secrets that can be written": (
        "secret files",
        lambda d: mount(d, "/run/credentials", options=["rw", "nosuid", "nodev", "noexec"]),
    ),
    "the host's directory in the place of the secrets": (
        "secret files",
        lambda d: mount(d, "/run/credentials", source="/run/credentials"),
    ),
    "the agent's limits that it can write": (
        "least",
        lambda d: mount(d, "/run/covenant", options=["rw", "nosuid", "nodev", "noexec"]),
    ),
    "the host's directory in the place of the agent's limits": (
        "least",
        lambda d: mount(d, "/run/covenant", source="/run/covenant"),
    ),
    "no limits that the agent can read": ("least", lambda d: unmount(d, "/run/covenant")),
    "the agent's limits elsewhere": ("least", lambda d: bind(d, "/zzz", *READ, source="limits")),
    "secrets elsewhere": ("much", lambda d: bind(d, "/run/secrets", *READ, source="credentials")),
    "no resolver where names are resolved": ("network", lambda d: unmount(d, "/etc/resolv.conf")),
    "the host's resolver": ("network", lambda d: mount(d, "/etc/resolv.conf", source="/etc/resolv.conf")),
    "a resolver that can be written": (
        "network",
        lambda d: mount(d, "/etc/resolv.conf", options=["rw", "nosuid", "nodev", "noexec"]),
    ),
    "a directory for the resolver": ("network", resolver_directory),
    "a resolver where no name is resolved": ("least", lambda d: bind(d, "/etc/resolv.conf", *READ, source="resolver")),
    "a resolver elsewhere": ("much", lambda d: bind(d, "/etc/hosts", *READ, source="resolver")),
    "another's mount namespace": (
        "much",
        lambda d: d["config.json"]["linux"]["namespaces"][1].update(path="/proc/1/ns/mnt"),
    ),
    "a hook": ("much", lambda d: d["config.json"].update(hooks={"prestart": [{"path": "/bin/sh"}]})),
    "an annotation": ("much", lambda d: d["config.json"].update(annotations={"dev.gvisor.flag.host-uds": "open"})),
    "a device": ("much", lambda d: d["config.json"]["linux"].update(devices=[{"path": "/dev/kvm"}])),
    "a cgroup of its own choice": ("much", lambda d: d["config.json"]["linux"].update(cgroupsPath="/")),
    "the host's name": ("much", lambda d: d["config.json"].update(hostname="host")),
    "more processes": ("much", lambda d: limit(d, "RLIMIT_NPROC", 11)),
    "as many for the agent as with its init": ("least", lambda d: limit(d, "RLIMIT_NPROC", limit_of(d) + 1)),
    "more processes, with all that goes with them": ("much", one_process_more),
    "larger files": ("least", lambda d: limit(d, "RLIMIT_FSIZE", 101 * MIB)),
    "larger files than the scratch": ("much", lambda d: limit(d, "RLIMIT_FSIZE", 8 * MIB)),
    "core dumps": ("much", lambda d: limit(d, "RLIMIT_CORE", 1)),
    "more descriptors": ("much", lambda d: limit(d, "RLIMIT_NOFILE", 4096)),
    "a soft limit below the hard one": ("much", lambda d: process(d)["rlimits"][4].update(soft=1)),
    "no limit of processes": ("much", lambda d: drop(process(d)["rlimits"], type="RLIMIT_NPROC")),
}

# --- ceilings ----

CEILINGS: dict[str, tuple[str, Fault]] = {
    "a MiB more": ("much", lambda d: memory(d, MIB)),
    "a MiB less": ("much", lambda d: memory(d, -MIB)),
    "a page more": ("much", lambda d: memory(d, 4096)),
    "memory without end on version 2": ("much", lambda d: file(d, "v2", "memory.max", "max")),
    "a MiB more on version 1 alone": (
        "much",
        lambda d: file(d, "v1", "memory.limit_in_bytes", str((100 + 7 + 68 + 1) * MIB)),
    ),
    "memory that need not be held": ("much", lambda d: d["cgroup.json"]["v2"][0].update(required=False)),
    "swap": ("least", lambda d: file(d, "v2", "memory.swap.max", str(MIB))),
    "more swap": ("much", lambda d: file(d, "v2", "memory.swap.max", str(9 * MIB))),
    "more swap on version 1": (
        "much",
        lambda d: file(d, "v1", "memory.memsw.limit_in_bytes", str((100 + 7 + 68 + 9) * MIB)),
    ),
    "swap that need not be held": ("much", lambda d: d["cgroup.json"]["v2"][2].update(required=False)),
    "memory that is taken back too late": ("much", lambda d: file(d, "v2", "memory.high", "max")),
    "a written path without a bound": ("writes", lambda d: d["mounts.json"]["rooms"].clear()),
    "more room than there is": ("writes", lambda d: d["mounts.json"]["rooms"].update({"/srv/data": 9})),
    "no room at all": ("writes", lambda d: d["mounts.json"]["rooms"].update({"/srv/data": 0})),
    "room that is no number": ("writes", lambda d: d["mounts.json"]["rooms"].update({"/srv/data": True})),
    "a bound for what is not written": ("least", lambda d: d["mounts.json"]["rooms"].update({"/opt/a": 1})),
    "swappiness": ("least", lambda d: file(d, "v1", "memory.swappiness", "60")),
    "no swappiness": ("least", lambda d: drop(d["cgroup.json"]["v1"], file="memory.swappiness")),
    "tasks without end": ("much", lambda d: file(d, "v2", "pids.max", "max")),
    "more tasks": ("much", lambda d: tasks(d, 84)),
    "no wall around tasks": ("much", lambda d: drop(d["cgroup.json"]["v2"], file="pids.max")),
    "processor without end": ("much", lambda d: file(d, "v2", "cpu.max", "max 100000")),
    "quota -1": ("much", lambda d: file(d, "v1", "cpu.cfs_quota_us", "-1")),
    "twice the quota": ("much", lambda d: file(d, "v2", "cpu.max", "50000 100000")),
    "half the period": ("much", lambda d: file(d, "v1", "cpu.cfs_period_us", "50000")),
    "a longer period of the same share": ("much", lambda d: file(d, "v2", "cpu.max", "250000 1000000")),
    "a hundredth more of a core": ("much", lambda d: oci(d, "cpu", "quota", 26000)),
    "more weight": ("much", lambda d: file(d, "v2", "cpu.weight", "38")),
    "more shares": ("much", lambda d: file(d, "v1", "cpu.shares", "389")),
    "shares of no weight": ("much", lambda d: file(d, "v1", "cpu.shares", "379")),
    "shares rounded up": ("much", lambda d: oci(d, "cpu", "shares", 379)),
    "a file of another controller": ("much", lambda d: d["cgroup.json"]["v2"][4].update(controller="cpuset")),
    "a file more": (
        "much",
        lambda d: d["cgroup.json"]["v2"].append(
            {"controller": "devices", "file": "devices.allow", "required": True, "value": "a"}
        ),
    ),
    "an out-of-memory kill of one process": ("much", lambda d: file(d, "v2", "memory.oom.group", "0")),
    "more overhead than measured": ("much", lambda d: d["cgroup.json"]["overhead"].update(mb=69)),
    "an overhead of another version": ("much", lambda d: d["cgroup.json"]["overhead"].update(version=2)),
    "no version 1, which can hold it": ("much", lambda d: d["cgroup.json"].update(v1=None)),
    "io without end": ("rest", lambda d: drop(d["cgroup.json"]["v2"], file="io.max")),
    "more io": (
        "rest",
        lambda d: file(d, "v2", "io.max", "$DEVICE rbps=1000001 wbps=max riops=max wiops=200"),
    ),
    "io of reads for writes": (
        "rest",
        lambda d: file(d, "v2", "io.max", "$DEVICE rbps=max wbps=1000000 riops=max wiops=200"),
    ),
    "io of another device": (
        "rest",
        lambda d: file(d, "v2", "io.max", "8:0 rbps=1000000 wbps=max riops=max wiops=200"),
    ),
}

# --- runsc's flags ----

RUNSC: dict[str, tuple[str, Fault]] = {
    "a filter that is not applied": ("much", lambda d: flag(d, "--oci-seccomp", "false")),
    "every socket of a granted directory": ("much", lambda d: flag(d, "--host-uds", "open")),
    "every fifo of a granted directory": ("much", lambda d: flag(d, "--host-fifo", "open")),
    "a writable layer": ("much", lambda d: flag(d, "--overlay2", "root:self")),
    "flags by annotation": ("much", lambda d: flag(d, "--allow-flag-override", "true")),
    "the host's network": ("network", lambda d: flag(d, "--network", "host")),
    "a network where there is none": ("much", lambda d: flag(d, "--network", "sandbox")),
    "another platform": ("much", lambda d: flag(d, "--platform", "ptrace")),
    "a flag more": ("much", lambda d: d["runtime.json"]["flags"].update({"--debug": "true"})),
    "a flag less": ("much", lambda d: d["runtime.json"]["flags"].pop("--host-uds")),
    "a broker that nothing is asked of": ("much", lambda d: d["runtime.json"]["flags"].update({"--pass-fd": "3"})),
    "no broker where children are granted": ("rest", lambda d: d["runtime.json"]["flags"].pop("--pass-fd")),
    "a broker by another number": ("rest", lambda d: flag(d, "--pass-fd", "4")),
}

# --- what the supervisor and the vault hold ----

SUPERVISED: dict[str, tuple[str, Fault]] = {
    "a credential more": ("rest", lambda d: d["credentials.json"]["names"].append("root")),
    "a credential less": ("rest", lambda d: d["credentials.json"]["names"].pop()),
    "every credential": ("rest", lambda d: d["credentials.json"].update(names=["*"])),
    "no end of life": ("rest", lambda d: section(d, "supervision.json", "lifetime", ttl_seconds=None)),
    "a second more": ("rest", lambda d: section(d, "supervision.json", "lifetime", ttl_seconds=601)),
    "suspended at its end": ("much", lambda d: section(d, "supervision.json", "lifetime", on_expiry="suspend")),
    "a level more": ("rest", lambda d: section(d, "supervision.json", "spawn", max_depth=3)),
    "a descendant more": ("rest", lambda d: section(d, "supervision.json", "spawn", max_descendants=6)),
    "descendants without number": ("rest", lambda d: section(d, "supervision.json", "spawn", max_descendants=None)),
    "children where none may be": (
        "much",
        lambda d: section(d, "supervision.json", "spawn", max_depth=1, max_descendants=1),
    ),
    "descendants of no depth": ("much", lambda d: section(d, "supervision.json", "spawn", max_descendants=1)),
    "outlives its parent": ("rest", lambda d: section(d, "supervision.json", "spawn", on_parent_exit="adopt")),
    "a side effect more": ("rest", lambda d: d["supervision.json"]["skills"]["side_effects"].append("write")),
    "a side effect that does not exist": (
        "rest",
        lambda d: d["supervision.json"]["skills"]["side_effects"].append("root"),
    ),
    "a tool more": (
        "rest",
        lambda d: d["supervision.json"]["skills"]["allow"].append("matrix://tool/mcp/fs/write@1.0"),
    ),
    "another version of a tool": (
        "rest",
        lambda d: d["supervision.json"]["skills"].update(allow=["matrix://tool/mcp/fs/read@2.0"]),
    ),
    "no task deadline": ("much", lambda d: section(d, "supervision.json", "task", wall_ms=None)),
    "a longer task": ("much", lambda d: section(d, "supervision.json", "task", wall_ms=30001)),
    "more processor time": ("much", lambda d: section(d, "supervision.json", "task", cpu_time_ms=5001)),
    "no end of processor time": ("much", lambda d: section(d, "supervision.json", "task", cpu_time_ms=None)),
    "under no role": ("role", lambda d: d["supervision.json"].update(roles=["*"])),
    "a role more": ("role", lambda d: d["supervision.json"]["roles"].append("zz")),
}


# --- beside the grants, and what people read ----


def effective_of(d: Documents) -> Any:
    return d["effective.json"]["grants"]


def causes(d: Documents) -> Any:
    return d["provenance.json"]["rules"]


BESIDE: dict[str, tuple[str, Fault]] = {
    "another runtime of the host": ("much", lambda d: d["mounts.json"]["root"]["closures"][0].update(digest="a" * 64)),
    "another program for a granted one": (
        "much",
        lambda d: d["mounts.json"]["root"]["closures"][1].update(entry="/usr/bin/dash"),
    ),
    "another content of a program that is not pinned": (
        "much",
        lambda d: next(c for c in d["mounts.json"]["root"]["closures"] if c["name"] == "/usr/bin/cat").update(
            sha256="e" * 64
        ),
    ),
    "another file of the package": ("much", lambda d: process(d)["args"].__setitem__(2, "other.py")),
    "another runsc": ("much", lambda d: d["runtime.json"]["runsc"].update(sha256="a" * 64)),
    "another version of runsc": ("much", lambda d: d["runtime.json"]["runsc"].update(version="0")),
    "another package": ("much", lambda d: d["effective.json"].update(package_digest="a" * 64)),
    "another machine": ("much", lambda d: d["effective.json"].update(arch="aarch64")),
    "a file mounted as a directory": ("writes", a_directory_for_a_file),
    "other grants are told": ("much", lambda d: effective_of(d)["lifetime"].update(ttl_seconds=5)),
    "a domain is not told": ("much", lambda d: effective_of(d).pop("skills")),
    "a call without a cause": ("much", lambda d: causes(d).pop("seccomp.bpf:openat")),
    "a mount without a cause": ("much", lambda d: causes(d).pop("mounts.json:/opt/a")),
    "a cause without a rule": (
        "much",
        lambda d: causes(d).update({"mounts.json:/etc": {"key": "k", "kind": "built-in", "reason": "r"}}),
    ),
    "a cause of no kind": ("much", lambda d: causes(d)["mounts.json:/opt/a"].update(kind="because")),
    "a cause in no artefact": ("much", lambda d: causes(d).update({"x:y": {"key": "k", "kind": "built-in"}})),
}

FAULTS = {
    f"{part}: {name}": planted
    for part, table in (
        ("mounts", MOUNTS),
        ("process", PROCESS),
        ("ceilings", CEILINGS),
        ("runsc", RUNSC),
        ("supervised", SUPERVISED),
        ("beside", BESIDE),
    )
    for name, planted in table.items()
}


@pytest.mark.parametrize("name", proof_kit.CASES)
def test_what_was_compiled_is_proved(name: str) -> None:
    assert compiled(name).prove().lines()


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    case, plant = FAULTS[name]
    made = compiled(case)
    with pytest.raises((errors.ProofError, errors.ArtefactError)):
        made.prove(made.falsified(plant))


def test_there_are_faults_enough() -> None:
    assert len(FAULTS) >= 100
