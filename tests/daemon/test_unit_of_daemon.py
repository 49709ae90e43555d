"""The units of the daemon: systemd knows every line of them, and they remove the privileges that it does not need."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path

import pytest

from covenant import daemon
from covenant.wire import client

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "packaging" / "systemd"
NAMES = ("covenantd.service", "covenantd.socket")
HOME = "/var/lib/covenantd"


def _verified(place: Path, *, changed: tuple[str, str] = ("", "")) -> str:
    """Return systemd's messages on copies of the units whose program and user exist on any machine."""
    for name in NAMES:
        text = (UNITS / name).read_text().replace("/opt/covenant/bin/covenantd", "/bin/true")
        text = re.sub(r"(?m)^((?:Socket)?(?:User|Group))=covenant$", r"\1=root", text)
        kept = [line for line in text.splitlines() if not line.startswith(("Documentation=", "Wants="))]
        text = "\n".join(kept).replace(" covenant-supervisor.socket", "")
        (place / name).write_text(text.replace(*changed) + "\n")
    done = subprocess.run(
        ["/usr/bin/systemd-analyze", "verify", "--man=no", *(f"./{name}" for name in NAMES)],
        cwd=place, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout + done.stderr


def _unit(name: str) -> str:
    return (UNITS / name).read_text()


def test_systemd_takes_every_line(tmp_path: Path) -> None:
    assert _verified(tmp_path) == ""


@pytest.mark.parametrize(
    "changed", [("ProtectSystem=strict", "ProtectSystem=perhaps"), ("UMask=", "Umsk="), ("SocketMode=", "SocketMod=")]
)
def test_line_that_it_does_not_know_is_seen(changed: tuple[str, str], tmp_path: Path) -> None:
    assert ": " in _verified(tmp_path, changed=changed)


def test_systemd_calls_it_well_confined(tmp_path: Path) -> None:
    """`systemd-analyze security` counts from 0, nothing left to take, to 10."""
    unit = tmp_path / "covenantd.service"
    unit.write_text(_unit("covenantd.service"))
    done = subprocess.run(
        ["/usr/bin/systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= 2.0


def test_socket_is_where_clients_look() -> None:
    assert f"ListenStream={HOME}/{client.SOCKET}\n" in _unit("covenantd.socket")
    assert f"COVENANT_HOME={HOME} " in _unit("covenantd.service")


def test_nothing_of_daemons_directory_is_given_away_by_root() -> None:
    """systemd gives a socket to a user by its path: where that lies in the user's own directory, it may be a link."""
    text = _unit("covenantd.socket")
    assert not re.search(r"(?m)^Socket(User|Group)=", text)
    assert "SocketMode=0666\n" in text
    # Who may connect is said by the directory alone.
    assert f"ExecStartPre=/usr/bin/install -d -m 0700 -o covenant -g covenant {HOME}\n" in text
    assert "DirectoryMode=0700\n" in text
    assert "StateDirectoryMode=0700\n" in _unit("covenantd.service")


def test_systemd_waits_for_end_longer_than_daemon_takes() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(_unit("covenantd.service"))
    # Answers, then the rows of what is cut off (covenant.handlers.intents.pipeline), then the stores.
    assert int(parser["Service"]["TimeoutStopSec"]) >= daemon.STOP_SECONDS + 60 + 30
