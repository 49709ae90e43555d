"""The volumes of one run: looked up for the decision, and mounted when it starts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from policy import errors
from policy.host import VolumeFacts
from sandbox.kernel import libc
from sandbox.kernel.fs import idmap
from sandbox.volumes import image
from sandbox.volumes.store import VolumeStore

_HELD: Final = libc.MOUNT_ATTR_NOSUID | libc.MOUNT_ATTR_NODEV | libc.MOUNT_ATTR_NOSYMFOLLOW | libc.MOUNT_ATTR_IDMAP


def facts(state: Path, name: str, caller: int, where: str) -> VolumeFacts | None:
    """Return the facts of a volume for a caller's run. None where there is no such volume.

    Raises:
        errors.VolumeError: it is another user's, or it cannot be read.
    """
    try:
        one = next((found for found in VolumeStore(state).listed() if found.name == name), None)
        if one is None:
            return None
        try:
            owner, mb = one.record().owner, one.mb
        except errors.VolumeError:
            if caller == 0:
                raise
            return None  # whose it is cannot be read
    except PermissionError:
        message = "the volumes of this host are root's to read"
        raise errors.VolumeError(message, hint="run it with sudo", where=where) from None
    if caller not in (0, owner):
        # A caller that may not use it is not told whether there is one.
        return None
    return VolumeFacts(mb)


def mounted(state: Path, name: str, mb: int, uid: int, stack: contextlib.ExitStack, *, noexec: bool) -> int:
    """Return a detached mount of a volume for the run's user. ``stack`` closes it, and then lets the volume go.

    Raises:
        errors.VolumeError: it has another size now, it is damaged, or the host has no room for it.
        errors.VolumeBusyError: a command changes it.
    """
    one = VolumeStore(state).find(name)
    stack.enter_context(one.used())
    if one.mb != mb:
        raise errors.VolumeError(f"volume `{name}` had {mb} MiB and has {one.mb} now", hint="run it again")
    try:
        with one.mounting():
            if not image.is_attached(one.image):
                image.check(one.image)
                image.allocate(one.image)
            with image.attached(one.image) as device:
                fd = image.mount(device)
    except OSError as e:
        raise errors.VolumeError(
            f"volume `{name}` cannot be mounted: {e.strerror}",
            hint="see the free space of COVENANT_STATE; modprobe loop",
        ) from e
    stack.callback(os.close, fd)
    info = os.fstat(fd)
    users = idmap.namespace((info.st_uid, info.st_gid), (uid, uid))
    try:
        libc.mount_setattr(fd, _HELD | (libc.MOUNT_ATTR_NOEXEC if noexec else 0), idmap=users)
    finally:
        os.close(users)
    return fd
