"""The units of the supervisor: systemd knows every line of them, and they leave exactly what the process needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sandbox.serve import hardening
from sandbox.serve.api import paths

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "packaging" / "systemd"
NAMES = ("covenant-supervisor.service", "covenant-supervisor.socket")


def _verified(place: Path, *, changed: tuple[str, str] = ("", "")) -> str:
    """Return systemd's messages on copies of the units whose program exists on any machine."""
    for name in NAMES:
        text = (UNITS / name).read_text().replace("/opt/covenant/bin/covenant-supervisor", "/bin/true")
        # The page is installed by the package, which is not on this machine.
        lines = [line for line in text.splitlines() if not line.startswith("Documentation=")]
        (place / name).write_text("\n".join(lines).replace(*changed) + "\n")
    done = subprocess.run(
        ["/usr/bin/systemd-analyze", "verify", "--man=no", *(f"./{name}" for name in NAMES)],
        cwd=place, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_systemd_takes_every_line(tmp_path: Path) -> None:
    assert _verified(tmp_path) == ""


@pytest.mark.parametrize(
    "changed", [("Delegate=yes", "Delegate=perhaps"), ("UMask=", "Umsk="), ("SocketMode=", "SocketMod=")]
)
def test_line_that_it_does_not_know_is_seen(changed: tuple[str, str], tmp_path: Path) -> None:
    assert ": " in _verified(tmp_path, changed=changed)


def test_unit_leaves_what_process_keeps_and_no_more() -> None:
    text = (UNITS / NAMES[0]).read_text()
    given = {name for line in re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.MULTILINE) for name in line.split()}
    assert given == {f"CAP_{name.upper()}" for name in hardening.CAPABILITIES}


def test_socket_is_where_clients_look() -> None:
    text = (UNITS / NAMES[1]).read_text()
    assert f"ListenStream={paths.SYSTEM_SOCKET}\n" in text
    # Open to root alone until the operator says otherwise.
    assert "SocketMode=0600\n" in text
