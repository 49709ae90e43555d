"""Packages of PyPI and npm for a test, in a directory in which only root can write: what a grant asks for.

pip and npm run no code of a package. The packages are loaded in a sandbox alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def wheels(requirements: Path) -> Iterator[Path]:
    """Install the pinned wheels of ``requirements``; remove them when the block ends."""
    with directory() as made:
        install_wheels(requirements, made / "wheels")
        yield made / "wheels"


@contextlib.contextmanager
def modules(locked: Path) -> Iterator[Path]:
    """Install the modules of a lock file of npm, by their digests; remove them when the block ends."""
    with directory() as made:
        lock = json.loads(locked.read_text())
        (made / "package-lock.json").write_text(json.dumps(lock))
        (made / "package.json").write_text(json.dumps(lock["packages"][""]))
        npm = ["npm", "ci", "--ignore-scripts", "--omit=optional", "--omit=peer", "--no-audit", "--no-fund"]
        subprocess.run([*npm, "--silent", "--prefix", str(made)], check=True, timeout=300)
        _close(made)
        yield made


def install_wheels(requirements: Path, folder: Path) -> None:
    """Install the pinned wheels of ``requirements`` in ``folder``. Byte code is left out."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:"]
    command = [*pip, "--disable-pip-version-check", "--root-user-action", "ignore", "--target", str(folder)]
    subprocess.run([*command, "--requirement", str(requirements)], check=True, timeout=500)
    _close(folder)


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """A directory of root in which only root can write, while the block lasts."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def _close(made: Path) -> None:
    subprocess.run(["chmod", "-R", "go-w", str(made)], check=True, timeout=60)
