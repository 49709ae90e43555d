"""Check the package's own steps, in their order: installation, backup, an upgrade with a live agent, a downgrade that
is refused, the way back to the older version, a restore, a purge.

One test: each step stands on the one before, and after the last Covenant is not there any more. The commands of the
backup, the way back and the restore are those of docs/install.md.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

from vagrant.tests import kit

BUILT = pathlib.Path(os.environ.get("BUILT", "/var/cache/covenant/built"))
UNITS = (
    *("covenant-supervisor.socket", "covenant-supervisor.service", "covenantd.socket", "covenantd.service"),
    "covenant-export.service",
)
BACKUP = pathlib.Path("/root/covenant.tar.gz")
STATES = ("covenant", "covenantd", "covenant-export")
LIVE = kit.Package("time.sleep(600)\nanswer = 1\n", "memory_mb = 64\n")
SHORT = kit.Package("answer = 7\n", "memory_mb = 64\n")


def _one(folder: pathlib.Path) -> str:
    [found] = folder.glob("covenant_*.deb")
    return str(found)


def _dpkg(*command: str, expect: int = 0) -> str:
    done = subprocess.run(["/usr/bin/dpkg", *command], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == expect, (command, done.stdout, done.stderr)
    return done.stdout + done.stderr


def _by_the_page(section: str, block: int = 0) -> str:
    """Run a block of docs/install.md as root who has set nothing; what it printed."""
    page = (kit.CLONE / "docs/install.md").read_text()
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)[block]
    # There is one version of the package here, and no terminal to ask.
    commands = re.sub(r"\./covenant_[0-9.]+_amd64\.deb", _one(BUILT), commands).replace("apt-get ", "apt-get -qy ")
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["/bin/bash", "-exc", commands],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def _installed(host: Any) -> None:
    """Every file is as it was packed, and the distribution's tools find what is theirs."""
    changed = [line for line in _dpkg("--verify", "covenant").splitlines() if "/etc/covenant/" not in line]
    assert changed == []
    assert host.file("/usr/share/man/man1/covenant-run.1.gz").exists
    assert host.file("/usr/share/bash-completion/completions/covenant").contains("_covenant_completion")
    assert host.user("covenant").shell == "/usr/sbin/nologin"
    state = host.file("/var/lib/covenantd")
    assert (state.user, state.mode) == ("covenant", 0o700)
    socket = host.service("covenant-supervisor.socket")
    assert socket.is_enabled
    assert socket.is_running
    assert not host.service("covenantd.socket").is_enabled


def _start(operator: kit.Operator, package: pathlib.Path) -> kit.Agent:
    """Ask the installed service for a run, and wait until its agent lives."""
    return operator.served().start(package)


def _upgrade(host: Any, operator: kit.Operator, packages: dict[str, pathlib.Path]) -> None:
    """A live agent ends as the configuration says, with its end in the log, and the new version serves."""
    live = _start(operator, packages["live"])
    live.leaf()
    _dpkg("--install", _one(BUILT / "newer"))
    document = live.answer()
    assert (document["kind"], document["code"]) == ("error", "stopped"), document
    ends = [row for row in kit.rows("run_ended") if row["agent_id"] == "live"]
    # The client is told why its run ended; the log has the signal by which the supervisor ended it.
    assert [row["code"] for row in ends] == ["interrupted"]
    assert host.service("covenant-supervisor.socket").is_running
    assert _start(operator, packages["short"]).value() == 7
    assert json.loads(operator.covenant("audit", "verify", "--json"))["kind"] != "error"


def _downgrade(host: Any) -> None:
    """It is refused before a file is touched, and the newer version goes on."""
    before = host.package("covenant").version
    said = _dpkg("--install", _one(BUILT), expect=1)
    assert "is refused" in said
    assert "fix: keep" in said
    assert host.package("covenant").version == before
    assert host.service("covenant-supervisor.socket").is_running


def _going_back(host: Any, operator: kit.Operator, package: pathlib.Path) -> None:
    """The older version serves the state of the backup, without what the newer one wrote."""
    operator.covenant(
        "trust", "revoke", "--package", str(package), "--reason", "it leaks", "--sign-with", "operator", "--yes"
    )
    assert _start(operator, package).answer()["code"] == "revoked"
    _by_the_page("Going back")
    assert f"covenant_{host.package('covenant').version}_" in _one(BUILT)
    socket = host.service("covenant-supervisor.socket")
    assert socket.is_enabled
    assert socket.is_running
    assert not [row for row in kit.rows("run_ended") if row["agent_id"] == "live"]
    # As the page says: the backup does not have the revocation.
    assert _start(operator, package).value() == 7
    _away("newer")


def _restore(operator: kit.Operator, package: pathlib.Path) -> None:
    """A file that the backup lacks is gone, and the restored state serves."""
    (kit.STATE / "later").touch()
    _by_the_page("Backup and restore", 1)
    assert not (kit.STATE / "later").exists()
    assert _start(operator, package).value() == 7
    _away("before")


def _away(suffix: str) -> None:
    """Compare owners and modes of the directories that the page moved with those in their place, and remove them."""
    for name in STATES:
        kept, present = pathlib.Path(f"/var/lib/{name}.{suffix}"), pathlib.Path(f"/var/lib/{name}")
        assert _owner(kept) == _owner(present)
        shutil.rmtree(kept)


def _owner(path: pathlib.Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid, found.st_mode


def _purge(host: Any) -> None:
    """Nothing of it is left: no file, no unit, no process, no state."""
    _dpkg("--purge", "covenant")
    for name in ("/opt/covenant", "/etc/covenant", "/var/lib/covenant", "/var/lib/covenantd", "/run/covenant"):
        assert not host.file(name).exists, name
    assert not host.file("/usr/bin/covenant").exists
    known = host.run(f"systemctl list-unit-files {' '.join(UNITS)}").stdout
    assert "0 unit files" in known, known
    running = host.check_output("ps -e -o args=")
    assert "/opt/covenant/bin" not in running


def test_package_is_installed_upgraded_and_purged(host: Any, operator: kit.Operator) -> None:
    _installed(host)
    packages = operator.signed({"live": LIVE, "short": SHORT})
    _by_the_page("Backup and restore", 0)
    _upgrade(host, operator, packages)
    _downgrade(host)
    _going_back(host, operator, packages["short"])
    _restore(operator, packages["short"])
    _purge(host)
    BACKUP.unlink()
