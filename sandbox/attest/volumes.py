"""Check that the file system at a volume's place is the image of that volume, mounted as the supervisor mounts it.

    (1) the device at the place is a loop device of the image: device and inode of its backing file
    (2) the options of the file system: it is written, gives no block back, and stops at an error

The flags of the mount itself are among those of all mounts (policy.decompile.live).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from policy.compile.workspace import OWN_VOLUME, VOLUME
from policy.prove.live import Layer, Standing
from sandbox.kernel import small_files
from sandbox.kernel.fs import loop_device
from sandbox.volumes import store

_NEEDED: Final = frozenset({"rw", "errors=remount-ro"})
_REFUSED: Final = frozenset({"discard"})


def made(plan: Iterable[Mapping[str, Any]], state: Path) -> dict[str, str]:
    """Return the image of each volume of a plan, by its place."""
    volumes = [one for one in plan if one["source"].startswith((VOLUME, OWN_VOLUME))]
    found = store.VolumeStore(state)
    return {one["destination"]: str(found.find(one["source"].partition(":")[2]).image) for one in volumes}


def judge(images: Mapping[str, str], gofer: int) -> Iterator[Layer]:
    """Yield the differences. ``images`` is what ``made`` returned, ``gofer`` the process that has the mounts."""
    options = dict(_superblocks(gofer))
    for place, image in images.items():
        device, held = options.get(place, ("", frozenset()))
        if not _backs(device, Path(image)):
            yield Layer("mounts", Standing.WIDER, f"at {place} the image {image}", f"device {device or 'of none'}")
        elif odd := sorted(_NEEDED - held) or sorted(_REFUSED & held):
            yield Layer("mounts", Standing.WIDER, f"at {place} {', '.join(sorted(_NEEDED))}", f"`{odd[0]}` differs")


def _superblocks(pid: int) -> Iterator[tuple[str, tuple[str, frozenset[str]]]]:
    """Yield each mount point with its device and the options of its file system (proc(5), mountinfo)."""
    for line in small_files.text(f"/proc/{pid}/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, options = left.split(" "), right.split(" ")[2]
        yield fields[4], (fields[2], frozenset(options.split(",")))


def _backs(device: str, image: Path) -> bool:
    """Whether the block device is a loop device of the image."""
    name = Path(f"/sys/dev/block/{device}")
    if not device or not name.exists():
        return False
    try:
        info = image.stat()
        fd = os.open(f"/dev/{name.resolve().name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return loop_device.backs(fd, info)
    finally:
        os.close(fd)
