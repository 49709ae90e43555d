"""Traces of a program's system calls: gVisor's own strace, read back call by call, and the programs worth tracing.

clone3 returns ENOSYS as in every sandbox of ours, so that libc's fallback is seen. Nothing else is refused: a call that
a profile lacks shows as a call, not as an error that the program worked around.
"""

from __future__ import annotations

import json
import re
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy import data
from tests.kernel import filtered_runsc
from tests.kernel.plain_runsc import Mount, Result

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ROOT / "agents"
WORKLOADS = Path(__file__).parent / "workloads"

_NO_CLONE3: Mapping[str, Any] = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
    "syscalls": [{"names": ["clone3"], "action": "SCMP_ACT_TRACE"}],
}
# strace.go:567] [   1:   1] comm E socket(AF_UNIX, SOCK_STREAM|SOCK_CLOEXEC, 0x0)
_ENTRY = re.compile(r"strace\.go:\d+\] \[ *\d+: *\d+\] .*? E ([a-z0-9_]+)\((.*)\)$")
# linux/sched.h; the other names are the socket and stat modules' own
_CLONE = {"CLONE_VM": 0x100, "CLONE_FS": 0x200, "CLONE_FILES": 0x400, "CLONE_SIGHAND": 0x800, "CLONE_VFORK": 0x4000,
          "CLONE_THREAD": 0x10000, "CLONE_SYSVSEM": 0x40000, "CLONE_SETTLS": 0x80000,
          "CLONE_PARENT_SETTID": 0x100000, "CLONE_CHILD_CLEARTID": 0x200000,
          "CLONE_CHILD_SETTID": 0x1000000}  # fmt: skip
_OTHERS = {"NETLINK_ROUTE": 0, "IPPROTO_IP": 0, "AT_FDCWD": 2**64 - 100}


@dataclass(frozen=True)
class Call:
    """One system call as gVisor prints it, with its arguments as far as a rule asks for them."""

    name: str
    arguments: tuple[int, ...] = ()

    def allowed(self, *, network: bool) -> bool:
        """Whether the argument rules let it pass; the grant by name is another question."""
        alternatives = data.arguments().alternatives(self.name, network=network)
        return alternatives is None or any(
            all(self.arguments[c.argument] & c.mask == c.value for c in alternative.conditions)
            for alternative in alternatives
        )

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(hex, self.arguments))})" if self.arguments else self.name


@dataclass(frozen=True)
class Trace:
    """How the program ended, and each different call that it made."""

    result: Result
    calls: frozenset[Call]

    @property
    def names(self) -> frozenset[str]:
        """The calls without their arguments."""
        return frozenset(call.name for call in self.calls)


def number(text: str) -> int:
    """The value of one printed argument: a number or names of bits, before what it stands for (`0x2 host:[2]`).

    Raises:
        ValueError: it holds a name that this reader does not know.
    """
    value = 0
    for part in text.split(" ", 1)[0].split("|"):
        named = _CLONE.get(part, _OTHERS.get(part, getattr(socket, part, getattr(stat, part, None))))
        value |= int(part, 0) if named is None else int(named)
    return value


def parse(log: str) -> Iterator[Call]:
    """Every call that a log of `--strace` shows on its way in."""
    rules = data.arguments().rules
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name, arguments = entry[1], entry[2]
            if name not in rules:
                yield Call(name)
                continue
            count = 1 + max(c.argument for a in rules[name].allow for c in a.conditions)
            yield Call(name, tuple(number(text) for text in arguments.split(", ")[:count]))


def run(argv: Sequence[str], **more: Any) -> Trace:
    """Trace `argv`; `more` as for filtered_runsc.run."""
    with tempfile.TemporaryDirectory(prefix="traced-runsc-") as logs:
        flags = ["--strace", "--strace-log-size=32", "--debug", f"--debug-log={logs}/"]
        result = filtered_runsc.run(argv, seccomp=_NO_CLONE3, flags=flags, **more)
        (boot,) = Path(logs).glob("*.boot.txt")
        return Trace(result, frozenset(parse(boot.read_text(errors="replace"))))


@dataclass(frozen=True)
class Sample:
    """A program that is traced, the profile that has to do for it, and the grants that it has besides."""

    name: str
    profile: str
    argv: tuple[str, ...]
    files: tuple[str, ...] = ()
    agent: str | None = None
    additions: tuple[str, ...] = ()

    @property
    def network(self) -> bool:
        """Whether it has a network grant."""
        return "network" in self.additions

    @property
    def granted(self) -> frozenset[str]:
        """The calls of its profile and of what its grants bring."""
        return data.profile(self.profile).names.union(*(data.addition(name).names for name in self.additions))

    def refused(self, trace: Trace) -> frozenset[Call]:
        """Return the calls that the filter of this sample refuses."""
        return frozenset(
            call for call in trace.calls if call.name not in self.granted or not call.allowed(network=self.network)
        )

    def trace(self) -> Trace:
        """Run it under strace.

        Raises:
            RuntimeError: it failed.
        """
        line = json.dumps({"intent_id": "i", "text": "which package mentions seccomp"}).encode() + b"\n"
        planted = {f"/{name}": (WORKLOADS / name).read_bytes() for name in self.files}
        package = (Mount("/workspace", AGENTS / self.agent),) if self.agent else ()
        done = run(
            self.argv, files={**NAME_FILES, **planted}, mounts=package, cwd="/workspace" if package else "/", stdin=line
        )
        if done.result.status != 0:
            raise RuntimeError(f"{self.name} failed: {(done.result.stdout + done.result.stderr).decode()[-2000:]}")
        return done


# A resolver that no server answers, and a name with three addresses: libc sorts several, and asks netlink for that.
NAME_FILES = {
    "/etc/hosts": b"127.0.0.1 localhost\n127.0.0.1 two.example\n127.0.0.2 two.example\n127.0.0.3 two.example\n",
    "/etc/resolv.conf": b"nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
    "/etc/host.conf": b"multi on\n",
}
PYTHON, NODE = ("/usr/bin/python3", "-I", "-B"), ("/usr/bin/node",)
LICENSE = "/usr/share/common-licenses/GPL-3"


def _workload(profile: str, name: str, *additions: str) -> Sample:
    interpreter = {"python3": PYTHON, "node": NODE}[profile]
    return Sample(name, profile, (*interpreter, f"/{name}"), (name,), additions=additions)


def _compiled(*argv: str) -> Sample:
    return Sample(argv[0].rsplit("/", 1)[-1], "static", argv)


AGENT_SAMPLES = (
    Sample("hello", "python3", ("/usr/bin/python3", "main.py"), agent="hello"),
    Sample("librarian", "python3", ("/usr/bin/python3", "main.py"), agent="librarian"),
    Sample("wordcount", "node", ("/usr/bin/node", "main.js"), agent="wordcount"),
    Sample("checksum", "static", ("./bin/checksum",), agent="checksum"),
)
SAMPLES = (
    *AGENT_SAMPLES,
    _workload("python3", "python3.py"),
    _workload("node", "node.js"),
    _workload("python3", "network.py", "network"),
    _workload("node", "network.js", "network"),
    _workload("python3", "programs.py", "executables"),
    _workload("node", "programs.js", "executables"),
    _compiled("/usr/bin/sort", "--parallel=4", "-S1M", LICENSE),
    _compiled("/usr/bin/find", "/usr/share/doc", "-maxdepth", "1"),
    _compiled("/usr/bin/gzip", "-kc", LICENSE),
    _compiled("/usr/bin/cp", "-r", "/usr/share/common-licenses", "/tmp/"),
    _compiled("/usr/bin/runsc", "--version"),  # a program in Go
)

# What programs of the table ask for, do not get, and do without; each by its printed form.
KNOWN_REFUSED = {
    "socket(0x10, 0x80003, 0x0)": "libc asks netlink for addresses to sort by, and goes on without",
    "ioctl(0x5, 0x40049409)": "FICLONE: cp copies instead",
    "capget": "runsc looks at its own capabilities; no agent of ours is runsc",
}


def build_agents() -> None:
    """Set-up has built the compiled agent; a clone without it is built here in the same way."""
    subprocess.run([str(ROOT / "scripts/build_agents")], check=True, timeout=120, capture_output=True)
