"""Volumes for tests: a store, their content, and runs that use them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox.volumes import image
from sandbox.volumes.store import Volume, VolumeStore
from tests.kernel.world import World

MB = 16


def grant(*names: str, shared: bool = False) -> str:
    """The manifest's lines for volumes, each at /NAME."""
    paths = ", ".join(f'"volume:{name}:/{name}"' for name in names)
    return f"[permissions.filesystem]\nwrite = [{paths}]\n" + ("shared = true\n" if shared else "")


def created(state: Path, name: str = "data", mb: int = MB, owner: int = 0) -> Volume:
    """A new volume of a state."""
    return VolumeStore(state).create(name, mb, owner, lambda: None, now_ms=1)


def ask(world: World, code: str, *names: str, shared: bool = False, **fields: Any) -> Any:
    """The answer of an agent that has these volumes."""
    return world.ask(code, filesystem="host", disk_mb=128, more=grant(*names, shared=shared), **fields)


@contextlib.contextmanager
def opened(volume: Volume) -> Iterator[str]:
    """The top directory of a volume as a path, for root, while the block lasts."""
    with image.attached(volume.image) as device:
        fd = image.mount(device)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)


def content(volume: Volume) -> dict[str, str]:
    """The digest of each file in a volume, by name."""
    with opened(volume) as top:
        files = sorted(path for path in Path(f"{top}/").iterdir() if path.is_file())
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def damage(volume: Volume) -> None:
    """Overwrite what e2fsck does not repair without a choice: the root directory's inode."""
    command = ["debugfs", "-w", "-R", "clri <2>", str(volume.image)]
    subprocess.run(command, check=True, capture_output=True)


def attached_below(top: Path) -> list[str]:
    """The loop devices whose images lie below a directory."""
    found = subprocess.run(["losetup", "-a"], capture_output=True, check=True).stdout.decode()
    return [line for line in found.splitlines() if str(top) in line]
