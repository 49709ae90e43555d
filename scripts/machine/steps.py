"""Set-up, as numbered steps: each looks first, says what it will change, records it, and then changes it.

(1) a python that is new enough
(2) Debian packages
(3) a runsc that starts a sandbox
(4) the user that trusted-local agents run as
(5) the virtual environment, from the lock with its hashes
(6) what is made here: the starter of sandboxes, compiled sample agents, and modules that sample agents share
(7) the sample agents, signed with a key made here
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pwd
import sys
from collections.abc import Callable

from scripts.machine import apt, console, environment, gvisor, shared_modules
from scripts.machine.console import SetupError
from scripts.machine.where import PYTHON, Machine

OLDEST_PYTHON = (3, 11)
AGENT_USER = "covenant-agent"
HOME = ".demo"
ENVELOPE = "agent.dsse.json"
COMPILED = ("sandbox/kernel/proc/covenant-start", "agents/checksum/bin", "agents/hostile/binary/bin")


@dataclasses.dataclass(frozen=True)
class Need:
    """A Debian package, how to see that it (or its like) is there, and what for."""

    package: str
    present: Callable[[], bool]
    why: str


def _file(*paths: str) -> Callable[[], bool]:
    return lambda: any(os.path.exists(path) for path in paths)


def _library(name: str) -> Callable[[], bool]:
    folders = ("/lib", "/usr/lib", f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64")
    return _file(*(f"{folder}/{name}" for folder in folders))


def _ensurepip() -> bool:
    return console.quiet([PYTHON, "-c", "import ensurepip, venv"])[0] == 0


NEEDS = (
    Need("nftables", _file("/usr/sbin/nft", "/sbin/nft"), "firewall rules"),
    Need("libseccomp2", _library("libseccomp.so.2"), "loads the deny list of trusted-local agents"),
    Need("iproute2", _file("/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip"), "network namespaces"),
    Need("python3-venv", _ensurepip, "the virtual environment"),
    Need("gcc", _file("/usr/bin/gcc"), "compiles the starter of sandboxes, and the sample agents that are programs"),
    Need("libc6-dev", _file("/usr/include/stdio.h"), "headers for it"),
    Need("openssh-client", _file("/usr/bin/ssh-agent"), "a real ssh-agent for the tests to sign with"),
    Need("openssh-server", _file("/usr/sbin/sshd"), "a real sshd for the tests; its service is turned off"),
    Need(
        "systemd",
        lambda: os.path.exists("/usr/bin/systemd-analyze") and os.path.exists("/lib/systemd/systemd"),
        "checks the units of policy compile --target systemd, and starts one in the tests",
    ),
    Need("nodejs", _file("/usr/bin/node", "/usr/local/bin/node"), "the runtime of the sample agent in JavaScript"),
    Need("erofs-utils", _file("/usr/bin/mkfs.erofs", "/usr/sbin/mkfs.erofs"), "roots of layers as one file each"),
)


def set_up(machine: Machine) -> None:
    """All steps in order.

    Raises:
        SetupError: something is missing that set-up cannot get; the message says what, the mend how.
    """
    _check_python()
    _packages(machine)
    gvisor.provide(machine)
    _user(machine)
    environment.provide(machine)
    _compiled(machine)
    _agents(machine)


def _check_python() -> None:
    status, out = console.quiet([PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    if status != 0 or tuple(map(int, out.split("."))) < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(
            f"{PYTHON} is {out.strip() or 'absent'}, and {wanted} or later is needed",
            "use Debian 12, Ubuntu 24.04 or later",
        )
    console.ok(f"{PYTHON} {out.strip()}")


def _packages(machine: Machine) -> None:
    # (2) Debian packages. An nft or node that was installed in another way stays: the program counts, not the package.
    missing = [need for need in NEEDS if not need.present()]
    if not missing:
        console.ok("packages: " + " ".join(need.package for need in NEEDS))
        return
    names = [need.package for need in missing]
    _may_install(machine, names, [f"{need.package}: {need.why}" for need in missing])
    if any(apt.candidate(name) is None for name in names):
        apt.update()
    apt.install(machine.record, names)
    if "openssh-server" in names and os.path.isdir("/run/systemd/system"):
        console.change("turn the service of openssh-server off, which the package has turned on")
        console.run(["systemctl", "disable", "--now", "ssh.service"])
    still = [need.package for need in missing if not need.present()]
    if still:
        raise SetupError(f"{' '.join(still)} was installed and is still not usable", "see the messages above")


def _may_install(machine: Machine, names: list[str], reasons: list[str]) -> None:
    """Raise unless this process can install `names`, with the command that the operator can use instead."""
    command = f"apt-get install --no-install-recommends {' '.join(names)}"
    if machine.codename is None:
        raise SetupError(
            f"{', '.join(names)} on {machine.system}, where set-up does not install packages itself",
            "install what they stand for on your system, then run set-up again:",
            *reasons,
        )
    if not machine.root:
        raise SetupError(
            f"{', '.join(names)}, and installing needs root",
            f"sudo {command}",
            "or run the same script as root: sudo ./scripts/setup",
            *reasons,
        )


def _user(machine: Machine) -> None:
    # (4) trusted-local never runs as uid 0, and not as a user that owns anything else.
    try:
        known = pwd.getpwnam(AGENT_USER)
    except KeyError:
        pass
    else:
        if known.pw_uid == 0:
            raise SetupError(f"user {AGENT_USER} has uid 0", f"userdel {AGENT_USER}, then run set-up again")
        console.ok(f"user {AGENT_USER} (uid {known.pw_uid})")
        return
    command = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    command += ["--shell", "/usr/sbin/nologin", AGENT_USER]
    if not machine.root:
        raise SetupError(f"user {AGENT_USER}, and making one needs root", "sudo " + " ".join(command))
    console.change(f"add system user {AGENT_USER} without home or login: {' '.join(command)}")
    machine.record.add("users", AGENT_USER)
    console.run(command)


def _compiled(machine: Machine) -> None:
    # (6) programs are made here and never committed; each script looks before it writes.
    for compiled in COMPILED:
        if not (machine.clone / compiled).exists():
            console.change(f"compile {compiled}")
            machine.record.add("paths", compiled)
    for copy in shared_modules.copies():
        if not (machine.clone / copy).exists():
            machine.record.add("paths", copy)
    for script in ("build_starter", "build_agents"):
        sys.stdout.write(console.run([str(machine.clone / "scripts" / script)]))


def _agents(machine: Machine) -> None:
    # (7) envelopes are made here and never committed.
    if not machine.root:
        console.note("the sample agents are signed when set-up runs as root, since root runs them")
        return
    if not (machine.clone / HOME).exists():
        console.change(f"make {HOME}, the home of the demo, with a signing key without a passphrase")
        machine.record.add("paths", HOME)
    for package in packages(machine.clone):
        envelope = package / ENVELOPE
        if not envelope.exists():
            machine.record.add("paths", str(envelope.relative_to(machine.clone)))
    python = [str(machine.clone / environment.VENV / "bin/python"), "-B"]
    sign = str(machine.clone / "scripts/sign_agents")
    sys.stdout.write(console.run([*python, sign, str(machine.clone / HOME)]))


def packages(clone: pathlib.Path) -> list[pathlib.Path]:
    """The sample packages of the clone: every folder below agents/ that holds a manifest."""
    return sorted(path.parent for path in (clone / "agents").rglob("agent.toml"))
