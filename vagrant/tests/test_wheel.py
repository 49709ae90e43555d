"""Check the other installation, of the wheel with `covenant setup`, on a machine that has no Covenant any more.

One test, as in test_package.py, after which nothing but users and state is left. Then `./scripts/undo` takes back what
set-up may add to a machine.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from typing import Any

from scripts.machine.record import Record
from vagrant.tests import kit

BUILT = pathlib.Path(os.environ.get("BUILT", "/var/cache/covenant/built"))
WHEELS = pathlib.Path(os.environ.get("WHEELS", "/var/cache/covenant/wheels"))
PIP = ("/opt/covenant-tests/bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet")
# The place where docs/install.md has pipx put it.
PLACE = pathlib.Path("/opt/pipx/venvs/covenant-supervisor")
UNITS = (
    *("covenant-supervisor.socket", "covenant-supervisor.service", "covenantd.socket", "covenantd.service"),
    "covenant-export.service",
)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def _install() -> None:
    """Do what pipx does: an environment of its own with the wheel, here without a network."""
    _run("/usr/bin/python3", "-m", "venv", "--without-pip", str(PLACE))
    into = (*PIP, "--python", str(PLACE / "bin/python"), "install", "--no-compile", "--no-index")
    _run(
        *into, "--find-links", str(WHEELS), "--require-hashes", "--no-deps", "-r", str(kit.CLONE / "locks/runtime.txt")
    )
    [wheel] = BUILT.glob("*.whl")
    _run(*into, "--no-deps", str(wheel))


def _set_up(host: Any) -> None:
    config = pathlib.Path("/etc/covenant/config.toml")
    config.parent.mkdir()
    # A configuration that is there is kept; an emulated machine needs this one.
    config.write_text("start_deadline_seconds = 300\n")
    command = str(PLACE / "bin/covenant")
    _run(command, "setup")
    _run(command, "setup", "--check")
    assert config.read_text() == "start_deadline_seconds = 300\n"
    assert host.file("/usr/bin/covenant").linked_to == command
    socket = host.service("covenant-supervisor.socket")
    assert socket.is_enabled
    assert socket.is_running
    assert host.user("covenant").shell == "/usr/sbin/nologin"


def _serves(host: Any, base: pathlib.Path) -> None:
    """The units start the code of the wheel, and an agent runs."""
    operator = kit.Operator(base)
    # The home of the suite has keys of the trust root that was purged.
    operator.environment["COVENANT_HOME"] = str(base / "home")
    operator.covenant("keys", "new", "second", "--no-passphrase")
    operator.covenant("trust", "init", "--key", "second")
    path = kit.Package("answer = 7\n", "memory_mb = 64\n").write(base / "short")
    operator.covenant("manifest", "sign", str(path), "--key", "second")
    assert operator.served().start(path).value() == 7
    host.check_output("systemctl start covenantd.service")
    running = host.check_output("ps -eww -o user:32=,args=").splitlines()
    for user, name in (("root", "covenant-supervisor"), ("covenant", "covenantd")):
        ours = [line for line in running if "covenant" in line]
        assert any(line.split()[0] == user and f"{PLACE}/bin/{name}" in line for line in ours), "\n".join(ours)
    asked = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8421/health', timeout=60).status)"
    assert _run("/usr/bin/python3", "-c", asked) == "200\n"


def _remove(host: Any) -> None:
    """Services and files are gone; users, state and the changed configuration stay."""
    _run(str(PLACE / "bin/covenant"), "setup", "--remove")
    assert "0 unit files" in host.run(f"systemctl list-unit-files {' '.join(UNITS)}").stdout
    assert str(PLACE) not in host.check_output("ps -eww -o args=")
    for name in ("/usr/bin/covenant", "/usr/share/man/man1/covenant-run.1.gz", "/var/lib/covenant-setup.json"):
        assert not host.file(name).exists, name
    assert host.file("/etc/covenant/config.toml").exists
    assert host.file("/var/lib/covenant/audit/events.jsonl").exists
    assert host.user("covenant").exists


def test_wheel_is_set_up_serves_and_is_removed(host: Any, tmp_path: pathlib.Path) -> None:
    assert not host.file("/usr/bin/covenant").exists
    _install()
    _set_up(host)
    _serves(host, tmp_path)
    _remove(host)


def test_undo_takes_back_what_set_up_added(host: Any, tmp_path: pathlib.Path) -> None:
    """Set-up needs a network, so the record is written here: of packages of the provision, and of things made here."""
    clone, source = tmp_path / "clone", pathlib.Path("/etc/apt/sources.list.d/covenant-undo.sources")
    shutil.copytree(kit.CLONE / "scripts", clone / "scripts")
    added = set(Record(pathlib.Path("/var/lib/covenant-provision")).added.packages) & {"erofs-utils", "runsc"}
    assert added
    record = Record(clone)
    record.add("packages", *added)
    record.add("users", "covenant-undo")
    record.add("files", str(source))
    record.add("paths", ".venv")
    _run("useradd", "--system", "--no-create-home", "covenant-undo")
    source.write_text("# nothing\n")
    (clone / ".venv").mkdir()
    (clone / "mine").mkdir()
    before = _installed()
    said = _run(str(clone / "scripts/undo"))
    assert "set-up is taken back" in said
    assert before - _installed() == added
    assert not host.user("covenant-undo").exists
    assert host.user("covenant").exists
    assert not source.exists()
    assert sorted(path.name for path in clone.iterdir()) == ["mine", "scripts"]
    # Again there is nothing to take back.
    assert _run(str(clone / "scripts/undo")).splitlines()[-1] == "set-up is taken back"
    assert before - _installed() == added


def _installed() -> set[str]:
    rows = _run("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n").splitlines()
    return {row.partition(" ")[2] for row in rows if row.startswith("installed ")}
