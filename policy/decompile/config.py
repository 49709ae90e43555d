"""config.json and runtime.json read back: the OCI configuration that runsc is given, and runsc's own flags.

Both are closed. runsc only logs a key that it does not know, and some keys (hooks, annotations, devices) grant, so a
key that is not in the tables below is refused. What is the same in every policy is held to its one value; what
varies is returned.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any, Final

from msgspec import Struct

from policy.decompile import documents
from policy.decompile.documents import Files, closed, fixed, refuse, shown

MIB: Final = 1 << 20
CONFIG = "config.json"
RUNTIME = "runtime.json"
# Machine -> the name that OCI has for it.
ARCHES: Final = {"SCMP_ARCH_X86_64": "x86_64", "SCMP_ARCH_AARCH64": "aarch64"}
_CAPABILITY_SETS = ("ambient", "bounding", "effective", "inheritable", "permitted")
# All new, or with the network namespace in which runsc is started. Another path would be another's namespace; one that
# is not listed is the host's.
_NEW = [{"type": name} for name in ("ipc", "mount", "network", "pid", "uts")]
_STARTED_IN = [{**one, "path": "/proc/self/ns/net"} if one["type"] == "network" else one for one in _NEW]
# With the host's stack runsc must be told to make a user namespace, in which every number is itself.
_EVERY_ID = [{"containerID": 0, "hostID": 0, "size": 4294967295}]
_BY_STACK: Final[dict[str, dict[str, Any]]] = {
    "": {"namespaces": _NEW},
    "sandbox": {"namespaces": _STARTED_IN},
    "host": {
        "gidMappings": _EVERY_ID,
        "namespaces": [*_STARTED_IN, {"type": "user"}],
        "uidMappings": _EVERY_ID,
    },
}
# A uid of its own is filled in for each run; the template stands for it. Never 0 (sandbox-facts: "never run as uid 0").
USER = {"gid": 65534, "uid": 65534}
SECRETS: Final = "CREDENTIALS_DIRECTORY=/run/credentials"
RUN_ID = "COVENANT_RUN_ID=00000000-0000-0000-0000-000000000000"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_ALWAYS = frozenset({"COVENANT_RUN_ID", "HOME", "LANG", "PATH"})
# What the loader of every program takes code from (ld.so(8)).
_LOADERS = frozenset({"LD_AUDIT", "LD_PRELOAD"})
_OWN_VARIABLES: Final = {
    "COVENANT_RUN_ID": RUN_ID,
    "CREDENTIALS_DIRECTORY": SECRETS,
    "TMPDIR": "TMPDIR=/tmp",
}
_FIXED_LIMITS = {"RLIMIT_CORE": 0, "RLIMIT_MEMLOCK": 65536, "RLIMIT_NOFILE": 1024}
_OWN_LIMITS = ("RLIMIT_FSIZE", "RLIMIT_NPROC")
# runsc's flags: what each must say, and in a word what another value would open.
FLAGS: Final = {
    "--allow-flag-override": "false",  # annotations would set flags
    "--host-fifo": "none",  # named pipes of granted directories
    "--host-uds": "none",  # every unix socket in a granted directory
    "--network": "none",  # without a network; else the one of a network namespace
    "--ignore-cgroups": "true",  # the supervisor's leaf holds the limits; runsc writes none to one that exists
    "--oci-seccomp": "true",  # without it the filter is dead text
    "--overlay2": "none",  # a writable layer that no limit bounds
    "--platform": "systrap",
}
# The first process of an agent that may start programs, on these machines, if its filter has these calls.
INIT_ARCHES: Final = ("x86_64",)
INIT: Final = "/.covenant/init"
INIT_CALLS: Final = frozenset(
    {"clone", "close_range", "execve", "exit_group", "ioctl", "kill", "rt_sigprocmask", "rt_sigtimedwait", "wait4"}
)
# It starts the relay of the ssh-agent service, where there is one, and that the agent.
SSH_RELAY: Final = "/.covenant/ssh-relay"
_BROKER: Final = {"--pass-fd": "3"}  # the descriptor over which the agent asks for children, credentials and tools


class Config(Struct, frozen=True):
    """The variable parts of a config.json.

    ``args`` start the agent; by ``init`` they are the arguments of the first process, by ``relay`` of that which it
    starts. ``stack`` names the agent's network stack, in a given namespace, or is empty. ``pids_max`` leaves both out.
    """

    args: tuple[str, ...]
    init: bool
    relay: bool
    cwd: str
    env: tuple[str, ...]
    terminal: bool
    stack: str
    scratch: bool  # whether HOME and TMPDIR say that /tmp can be written
    secrets: bool  # whether CREDENTIALS_DIRECTORY names the files of the credentials
    pids_max: int
    disk_bytes: int
    mounts: list[Any]
    resources: dict[str, Any]
    seccomp: Any


def read(files: Files) -> Config:
    """The configuration of the sandbox.

    Raises:
        errors.ArtefactError: config.json is not exactly of the form that a policy of this backend has.
    """
    whole = closed(
        documents.load(files, CONFIG),
        CONFIG,
        {
            "hostname": str,
            "linux": dict,
            "mounts": list,
            "ociVersion": str,
            "process": dict,
            "root": dict,
        },
    )
    fixed(whole["hostname"], f"{CONFIG}:hostname", "agent")
    fixed(whole["ociVersion"], f"{CONFIG}:ociVersion", "1.0.2")
    fixed(whole["root"], f"{CONFIG}:root", {"path": "rootfs", "readonly": True})
    linux = dict(whole["linux"])
    varies = {name: linux.pop(name) for name in ("resources", "seccomp") if name in linux}
    closed(varies, f"{CONFIG}:linux", {"resources": dict, "seccomp": dict})
    stack = next((name for name, form in _BY_STACK.items() if linux == form), "")
    fixed(linux, f"{CONFIG}:linux", _BY_STACK[stack])
    process, limits = _process(whole["process"])
    scratch, secrets = _environment(process["env"], f"{CONFIG}:process/env")
    args = tuple(process["args"])
    init = args[:1] == (INIT,)
    relay = init and args[1:2] == (SSH_RELAY,)
    return Config(
        args[init + relay :],
        init,
        relay,
        process["cwd"],
        tuple(process["env"]),
        process["terminal"],
        stack,
        scratch,
        secrets,
        limits["RLIMIT_NPROC"] - init - relay,
        limits["RLIMIT_FSIZE"],
        whole["mounts"],
        varies["resources"],
        varies["seccomp"],
    )


def _process(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """The process, whose parts that vary are of their form, and the rlimits that vary."""
    where = f"{CONFIG}:process"
    process = closed(
        value,
        where,
        {
            "args": list,
            "capabilities": dict,
            "cwd": str,
            "env": list,
            "noNewPrivileges": bool,
            "rlimits": list,
            "terminal": bool,
            "user": dict,
        },
    )
    fixed(process["capabilities"], f"{where}/capabilities", {name: [] for name in _CAPABILITY_SETS})
    fixed(process["noNewPrivileges"], f"{where}/noNewPrivileges", True)
    fixed(process["user"], f"{where}/user", USER)
    documents.listed(process["args"], f"{where}/args", str)
    documents.listed(process["env"], f"{where}/env", str)
    cwd = process["cwd"]
    if not cwd.startswith("/") or "\0" in cwd or (cwd != "/" and posixpath.normpath(cwd) != cwd):
        raise refuse(f"{where}/cwd", f"{shown(cwd)} is not absolute and normalised")
    return process, _limits(process["rlimits"], f"{where}/rlimits")


def _environment(value: list[str], where: str) -> tuple[bool, bool]:
    """Whether there are a scratch and files of credentials, by variables that no manifest sets."""
    pairs = [one.partition("=") for one in value]
    names = [name for name, _, _ in pairs]
    if any(not equals or not _VARIABLE.fullmatch(name) for name, equals, _ in pairs) or names != sorted(set(names)):
        raise refuse(where, f"the variables {shown(names)} are malformed, repeated or unsorted")
    if any("\0" in one for one in value):
        raise refuse(where, "a variable holds a NUL")
    if loaders := sorted(_LOADERS & set(names)):
        raise refuse(where, f"{shown(loaders[0])} would load code into every program")
    if missing := sorted(_ALWAYS - set(names)):
        raise refuse(where, f"{shown(missing[0])} is missing")
    for name, expected in _OWN_VARIABLES.items():
        if name in names:
            fixed(value[names.index(name)], where, expected)
    return "TMPDIR" in names, "CREDENTIALS_DIRECTORY" in names


def _limits(value: list[Any], where: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in value:
        limit = closed(item, where, {"hard": int, "soft": int, "type": str})
        if limit["hard"] != limit["soft"] or limit["type"] in found:
            raise refuse(where, f"limit {shown(limit)} is doubled, or its soft and hard values differ")
        found[limit["type"]] = documents.whole(limit["hard"], where)
    if found.keys() != {*_FIXED_LIMITS, *_OWN_LIMITS} or list(found) != sorted(found):
        raise refuse(where, f"the limits are {shown(sorted(found))}")
    for name, expected in _FIXED_LIMITS.items():
        fixed(found[name], f"{where}/{name}", expected)
    return {name: found[name] for name in _OWN_LIMITS}


class Runsc(Struct, frozen=True):
    """The runsc binary that the policy is bound to; ``sha256`` is hex, ``flags`` are the names of its flags.
    ``stack`` is whose network stack it gives the agent; empty where it gives none."""

    version: str
    sha256: str
    flags: tuple[str, ...] = tuple(FLAGS)
    stack: str = ""


def runtime(files: Files, *, stack: str, broker: bool = False) -> Runsc:
    """runtime.json, with the flags that a policy with this network stack must have and no other. With ``broker`` the
    agent has the one descriptor by which it asks for what it was granted.

    Raises:
        errors.ArtefactError: a flag is missing, unknown or has another value than its safe one.
    """
    whole = closed(documents.load(files, RUNTIME), RUNTIME, {"flags": dict, "runsc": dict, "version": int})
    fixed(whole["version"], f"{RUNTIME}:version", 1)
    wanted = FLAGS | {"--network": stack or FLAGS["--network"]} | (_BROKER if broker else {})
    flags = closed(whole["flags"], f"{RUNTIME}:flags", dict.fromkeys(wanted, str))
    for name, value in wanted.items():
        fixed(flags[name], f"{RUNTIME}:{name}", value)
    runsc = closed(whole["runsc"], f"{RUNTIME}:runsc", {"sha256": str, "version": str})
    return Runsc(runsc["version"], digest(runsc["sha256"], f"{RUNTIME}:runsc"), tuple(wanted), stack)


def digest(value: str, where: str) -> str:
    """``value`` as a hex SHA-256.

    Raises:
        errors.ArtefactError: it is none.
    """
    if len(value) != 64 or value.strip("0123456789abcdef"):
        raise refuse(where, f"{shown(value)} is no SHA-256")
    return value
