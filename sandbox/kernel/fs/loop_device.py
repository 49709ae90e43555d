"""Loop devices: attach an image file, and find the device that has one already (linux/loop.h).

The kernel detaches a device when its last user is gone (LO_FLAGS_AUTOCLEAR), so a killed process leaves none behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

_CONTROL: Final = "/dev/loop-control"
_GET_FREE, _CONFIGURE, _GET_STATUS = 0x4C82, 0x4C0A, 0x4C05
_AUTOCLEAR: Final = 4
# struct loop_config: descriptor, block size, then struct loop_info64 with its flags after 52 bytes.
_CONFIG: Final = struct.Struct("=II52xI176x64x")
# struct loop_info64: device and inode of the backing file come first.
_INFO: Final = struct.Struct("=QQ216x")
_TRIES: Final = 64


class LoopDevice:
    """An open loop device. As a context manager it is closed at the end; its mounts keep it attached."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self.path = fd, path

    def __enter__(self) -> LoopDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it. Without a mount the kernel detaches it."""
        os.close(self._fd)


def attach(backing: int) -> LoopDevice:
    """Attach an image, open for reading and writing, to a free device.

    Raises:
        OSError: there is no free device, or the kernel takes none.
    """
    for _ in range(_TRIES):
        control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            path = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
        finally:
            os.close(control)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _CONFIGURE, _CONFIG.pack(backing, 0, _AUTOCLEAR))
        except OSError as e:
            os.close(fd)
            if e.errno != errno.EBUSY:  # another process took it first
                raise
        else:
            return LoopDevice(fd, path)
    raise OSError(errno.EBUSY, "others took each device that was free")


def find(backing: int) -> LoopDevice | None:
    """Return the device to which the open image is attached, None without one. While it is open it stays attached.

    Raises:
        OSError: the kernel does not show a device.
    """
    info = os.fstat(backing)
    for place in sorted(Path("/sys/block").glob("loop*/loop/backing_file")):
        path = f"/dev/{place.parts[3]}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if backs(fd, info):
            return LoopDevice(fd, path)
        os.close(fd)
    return None


def backs(fd: int, info: os.stat_result) -> bool:
    """Whether the file of ``info`` is attached to an open loop device."""
    try:
        raw = fcntl.ioctl(fd, _GET_STATUS, bytes(_INFO.size))
    except OSError as e:
        if e.errno == errno.ENXIO:  # nothing is attached
            return False
        raise
    device, inode = _INFO.unpack(raw)
    return bool((device, inode) == (info.st_dev, info.st_ino))
