"""A second set-up makes no network request and changes no file, shown in a namespace without any network.

The first set-up is the one that made the environment that runs these tests (scripts/test, .ci/run).
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

# Files of the machine that set-up may write on a first run.
MACHINE = ("/etc/passwd", "/etc/group", "/etc/apt/sources.list.d", "/var/lib/dpkg/status", "/var/lib/apt/lists")

# After the command, how many packets this namespace could not route: every lookup and every connect counts.
_COUNT = '"$@"; status=$?; echo "@$(cat /proc/self/net/snmp | tr "\\n" " ")"; exit $status'


def _without_network(*command: str) -> tuple[int, str, int]:
    """Exit status, output, and packets that found no way, of a command in an empty network namespace."""
    done = subprocess.run(
        ["unshare", "--net", "--", "sh", "-c", _COUNT, "sh", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    output, _, snmp = done.stdout.rpartition("@")
    names, values = re.findall(r"Ip: ([^:]*?)(?= \w+: |$)", snmp)[:2]
    counters = dict(zip(names.split(), values.split(), strict=True))
    return done.returncode, output + done.stderr, int(counters["OutNoRoutes"])


def _listing(*roots: pathlib.Path) -> dict[str, tuple[int, int, int, int]]:
    found = {}
    for root in roots:
        paths = [root, *root.rglob("*")] if root.is_dir() else [root]
        for path in paths:
            info = os.lstat(path)
            found[str(path)] = (info.st_mtime_ns, info.st_size, info.st_mode, info.st_ino)
    return found


@pytest.mark.kernel
def test_second_set_up_asks_no_network_and_changes_no_file(clone: pathlib.Path) -> None:
    # Without this a machine that was never set up would be changed by its own test.
    assert (clone / ".venv/covenant-lock.sha256").is_file(), "run scripts/setup first"
    roots = (clone, *(pathlib.Path(name) for name in MACHINE))
    before = _listing(*roots)
    status, output, packets = _without_network(str(clone / "scripts/setup"))
    assert status == 0, output
    assert "change:" not in output
    assert packets == 0
    after = _listing(*roots)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == set()


@pytest.mark.kernel
def test_packet_counter_sees_lookup_and_connect() -> None:
    """The control: what set-up must not do is counted when something else does it."""
    for program in (
        "import socket; socket.socket().connect_ex(('192.0.2.1', 80))",
        "import socket; socket.socket(type=socket.SOCK_DGRAM).connect_ex(('192.0.2.1', 53))",
    ):
        assert _without_network(sys.executable, "-c", program)[2] > 0, program
