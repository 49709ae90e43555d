"""Set-up, as numbered steps: each looks first, says what it will change, records it, and then changes it.

(1) the distribution is known, or everything is already there
(2) Debian packages
(3) a runsc that starts a sandbox
(4) the user that trusted-local agents run as
(5) the virtual environment, from the lock with its hashes
(6) the sample agents: built, and signed with a key made here
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import pwd
import shutil
import sys
from collections.abc import Callable

from scripts.machine import apt, console, runsc, sources
from scripts.machine.console import SetupError
from scripts.machine.record import Record

PYTHON = "/usr/bin/python3"
OLDEST_PYTHON = (3, 11)
AGENT_USER = "covenant-agent"
VENV = ".venv"
LOCK = pathlib.Path("locks/dev.txt")
HOME = ".demo"
ENVELOPE = "agent.dsse.json"
COMPILED = "agents/checksum/bin"
BACKPORTS_FILE = "/etc/apt/sources.list.d/covenant-backports.sources"
KNOWN = {("debian", "12"): "bookworm", ("debian", "13"): "trixie", ("ubuntu", "24.04"): "noble"}


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
    Need("gcc", _file("/usr/bin/gcc"), "compiles the sample agent that is a program"),
    Need("libc6-dev", _file("/usr/include/stdio.h"), "headers for it"),
    Need("nodejs", _file("/usr/bin/node", "/usr/local/bin/node"), "the runtime of the sample agent in JavaScript"),
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where set-up works: the clone, its record, and the distribution (None: one that is not known)."""

    clone: pathlib.Path
    record: Record
    system: str
    codename: str | None
    root: bool


def look(clone: pathlib.Path) -> Machine:
    """Read the machine's /etc/os-release; changes nothing."""
    fields = {}
    for line in pathlib.Path("/etc/os-release").read_text(errors="replace").splitlines():
        key, _, value = line.partition("=")
        fields[key] = value.strip("\"'")
    codename = KNOWN.get((fields.get("ID", ""), fields.get("VERSION_ID", "")))
    name = fields.get("PRETTY_NAME", "an unknown system")
    return Machine(clone, Record(clone), name, codename, os.geteuid() == 0)


def set_up(machine: Machine) -> None:
    """All steps in order.

    Raises:
        SetupError: something is missing that set-up cannot get; the message says what, the mend how.
    """
    _check_python()
    _packages(machine)
    _runsc(machine)
    _user(machine)
    _venv(machine)
    _agents(machine)


def _check_python() -> None:
    status, out = console.quiet([PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    if status != 0 or tuple(map(int, out.split("."))) < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(
            f"{PYTHON} is {out.strip() or 'absent'}, and {wanted} or later is needed",
            "use Debian 12, Ubuntu 24.04 or later",
        )
    console.fine(f"{PYTHON} {out.strip()}")


def _packages(machine: Machine) -> None:
    # (2) Debian packages. Whoever brought nft or node in another way keeps it: what counts is the thing.
    missing = [need for need in NEEDS if not need.present()]
    if not missing:
        console.fine("packages: " + " ".join(need.package for need in NEEDS))
        return
    names = [need.package for need in missing]
    _may_install(machine, names, [f"{need.package}: {need.why}" for need in missing])
    if any(apt.candidate(name) is None for name in names):
        apt.update()
    apt.install(machine.record, names)
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


def _runsc(machine: Machine) -> None:
    # (3) a runsc that starts a sandbox. Only root can try; without root its presence is all that is known.
    found = runsc.probe()
    if found.works:
        console.fine(f"{found.path} starts a sandbox")
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
    _install_runsc(machine)
    found = runsc.probe()
    if not found.works:
        raise SetupError(f"a runsc that works: the one that was installed does not ({found.problem})", *GVISOR_RELEASE)
    console.fine(f"{found.path} starts a sandbox")


GVISOR_RELEASE = (
    "gVisor's own release is a single program: https://gvisor.dev/docs/user_guide/install/ (section",
    "`Install from a release`): download `runsc` and `runsc.sha512` for `uname -m`, check with",
    "`sha512sum -c runsc.sha512`, then `install -o root -g root -m 0755 runsc /usr/local/bin/runsc`",
)


def _install_runsc(machine: Machine) -> None:
    if machine.codename is None:
        raise SetupError(f"runsc (gVisor) on {machine.system}", *GVISOR_RELEASE)
    if not apt.at_least(apt.candidate("runsc"), runsc.OLDEST) and machine.codename != "bookworm":
        apt.update()
    if apt.at_least(apt.candidate("runsc"), runsc.OLDEST):
        apt.install(machine.record, ["runsc"])
        return
    if machine.codename != "bookworm":
        raise SetupError(
            f"runsc {runsc.OLDEST} or later: {machine.system} offers {apt.candidate('runsc') or 'none'}",
            *GVISOR_RELEASE,
        )
    # Bookworm's own runsc is of 2022 and knows no systrap; its backports have one that works.
    release = f"{machine.codename}-backports"
    files = apt.source_files()
    if not sources.names(files, release):
        text = sources.backports(files, machine.codename)
        if text is None:
            raise SetupError(
                f"an apt source for {machine.codename}, from which the one for {release} could be derived",
                f"add {release} to the apt sources of this machine",
                *GVISOR_RELEASE,
            )
        if pathlib.Path(BACKPORTS_FILE).exists() and BACKPORTS_FILE not in machine.record.added.files:
            raise SetupError(
                f"an apt source for {release}: {BACKPORTS_FILE} is there, but not made by set-up, and does not give it",
                f"look at {BACKPORTS_FILE}; remove it or enable what it names, then run set-up again",
            )
        console.change(f"write {BACKPORTS_FILE}:\n" + "".join(f"    {line}\n" for line in text.splitlines()))
        machine.record.add("files", BACKPORTS_FILE)
        pathlib.Path(BACKPORTS_FILE).write_text(text)
        pathlib.Path(BACKPORTS_FILE).chmod(0o644)
    apt.update()
    apt.install(machine.record, ["runsc"], release=release)


def _user(machine: Machine) -> None:
    # (4) trusted-local never runs as uid 0, and not as a user that owns anything else.
    try:
        known = pwd.getpwnam(AGENT_USER)
    except KeyError:
        pass
    else:
        if known.pw_uid == 0:
            raise SetupError(f"user {AGENT_USER} has uid 0", f"userdel {AGENT_USER}, then run set-up again")
        console.fine(f"user {AGENT_USER} (uid {known.pw_uid})")
        return
    command = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    command += ["--shell", "/usr/sbin/nologin", AGENT_USER]
    if not machine.root:
        raise SetupError(f"user {AGENT_USER}, and making one needs root", "sudo " + " ".join(command))
    console.change(f"add system user {AGENT_USER} without home or login: {' '.join(command)}")
    machine.record.add("users", AGENT_USER)
    console.run(command)


def environment_digest(clone: pathlib.Path) -> str:
    """What the environment was made from: lock, project table, interpreter and place of the clone."""
    import tomllib  # here, so that an older python is told by step (1) and not by a traceback

    project = tomllib.loads((clone / "pyproject.toml").read_text())
    parts = [
        (clone / LOCK).read_bytes(),
        repr((project["project"], project["build-system"], project["tool"]["hatch"])).encode(),
        console.quiet([PYTHON, "-VV"])[1].encode(),
        os.fsencode(clone),
    ]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _venv(machine: Machine) -> None:
    # (5) pip checks every archive against the lock; which index it asks is the machine's own setting.
    venv = machine.clone / VENV
    stamp = venv / "covenant-lock.sha256"
    digest = environment_digest(machine.clone)
    if stamp.is_file() and stamp.read_text() == digest:
        console.fine(f"{VENV} is what {LOCK} says")
        return
    if venv.exists():
        if VENV not in machine.record.added.paths:
            raise SetupError(
                f"`{venv}` was not made by set-up, so it is left as it is",
                f"rm -r {venv}, then run set-up again",
            )
        console.change(f"remove {VENV}, made from another lock or not finished")
        shutil.rmtree(venv)
    console.change(f"make {VENV} and install {LOCK} with its hashes")
    machine.record.add("paths", VENV)
    # Without pip's cache: it lies in the home of the caller, where undo would have to look for it.
    options = ["--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    pip = [str(venv / "bin/python"), "-m", "pip", *options, "install", "-q"]
    console.run([PYTHON, "-m", "venv", str(venv)])
    hashes = ["--require-hashes", "--no-deps", "--only-binary=:all:"]
    try:
        console.run([*pip, *hashes, "-r", str(machine.clone / LOCK)])
    except SetupError as e:
        raise SetupError(
            f"the Python packages of {LOCK}: {e}",
            "pip needs an index that it can reach (PIP_INDEX_URL or pip.conf); then run set-up again",
        ) from e
    # hatchling is in the lock: the project itself is built without an index.
    local = ["--no-index", "--no-deps", "--no-build-isolation", "-e", str(machine.clone)]
    console.run([*pip, *local], env={"PYTHONDONTWRITEBYTECODE": "1"})
    stamp.write_text(digest)


def _agents(machine: Machine) -> None:
    # (6) a program and envelopes are made here and never committed; each script looks before it writes.
    scripts = machine.clone / "scripts"
    if not (machine.clone / COMPILED).exists():
        console.change(f"compile {COMPILED}")
        machine.record.add("paths", COMPILED)
    sys.stdout.write(console.run([str(scripts / "build_agents")]))
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
    python = [str(machine.clone / VENV / "bin/python"), "-B"]
    sys.stdout.write(console.run([*python, str(scripts / "sign_agents"), str(machine.clone / HOME)]))


def packages(clone: pathlib.Path) -> list[pathlib.Path]:
    """The sample packages of the clone: every folder below agents/ that holds a manifest."""
    return sorted(path.parent for path in (clone / "agents").rglob("agent.toml"))
