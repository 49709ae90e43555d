"""Entries that only root can put into a package: devices and mounts. Each is refused beside a package that is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from policy import errors
from sandbox.storage import package_reader

# Runs in a mount namespace of its own, which ends with it.
_WITH_A_MOUNT = """
import sys
from pathlib import Path
from sandbox.storage import package_reader as package
from sandbox.kernel import libc
from policy import errors

folder = Path(sys.argv[1])
libc.private_mounts()
package.read(folder)
libc.mount("none", str(folder / "lib"), "tmpfs")
(folder / "lib" / "a").write_bytes(b"other")
try:
    package.read(folder)
except errors.PackageError as e:
    print(e.message)
libc.umount2(str(folder / "lib"))
package.read(folder)
print("read again")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    (tmp_path / "agent.toml").write_bytes(b"manifest")
    (tmp_path / "lib" / "a").write_bytes(b"a")
    return tmp_path


def test_device_is_refused(folder: Path) -> None:
    assert package_reader.read(folder).manifest == b"manifest"
    # /dev/zero would never end.
    os.mknod(folder / "bad", 0o020666, os.makedev(1, 5))
    with pytest.raises(errors.PackageError, match="`bad` is a device"):
        package_reader.read(folder)


def test_another_file_system_in_package_is_refused(folder: Path, clone: Path) -> None:
    command = [sys.executable, "-c", _WITH_A_MOUNT, str(folder)]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "`lib` cannot be read: another file system is mounted there",
        "read again",
    ]
