"""The overlay of a workspace: the caller's directory read-only below, the masked files over it, the changes on top.

In the overlay the owner of the directory is the run's user, and no other user has an id (sandbox.kernel.fs.idmap).
overlayfs takes its layers by path, and only from mounts of the caller's own mount namespace (Linux 6.1); a process of
its own attaches them in one that ends with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from msgspec import Struct

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.fs import idmap
from sandbox.kernel.proc import child
from sandbox.workspace import image

_HELD: Final = libc.MOUNT_ATTR_NOSUID | libc.MOUNT_ATTR_NODEV
# What a name in the upper layer can mean is kept small: no renamed directory, no file without its content, no index.
_OPTIONS: Final = {"redirect_dir": "off", "metacopy": "off", "index": "off", "xino": "off"}
_LOWER, _CHANGES = "lower", "changes"


class Owner(Struct, frozen=True):
    """The ids of the owner of a directory."""

    uid: int
    gid: int


def made(directory: int, changes: int, *, owner: Owner, uid: int, masks: bool, scratch: Path) -> int:
    """Return a detached mount of the overlay, which shows the owner as user ``uid``.

    ``directory`` is the caller's, ``changes`` a detached mount of its image, which takes the ids of the overlay here.
    ``scratch`` is a directory for mount points.

    Raises:
        errors.WorkspaceError: the kernel makes no overlay of them.
        errors.KernelError: the kernel maps no ids.
    """
    users = idmap.namespace((owner.uid, owner.gid), (uid, uid))
    try:
        below = libc.open_tree_clone(directory)
        try:
            libc.mount_setattr(below, _HELD | libc.MOUNT_ATTR_RDONLY, idmap=users)
            libc.mount_setattr(changes, _HELD, idmap=users)
            return _overlaid(below, changes, scratch, masks=masks)
        finally:
            os.close(below)
    except OSError as e:
        raise errors.WorkspaceError(
            f"the workspace cannot be laid over the directory: {e.strerror}",
            hint="its file system must take idmapped mounts, as ext4, xfs, btrfs and tmpfs do",
        ) from e
    finally:
        os.close(users)


def _overlaid(below: int, changes: int, scratch: Path, *, masks: bool) -> int:
    """Make the overlay in a process with a mount namespace of its own, and take its descriptor."""
    for name in (_LOWER, _CHANGES):
        (scratch / name).mkdir(mode=0o700, exist_ok=True)
    _, (fd,) = child.work(lambda: (b"", [_overlay(below, changes, scratch, masks=masks)]))
    return fd


def _overlay(below: int, changes: int, scratch: Path, *, masks: bool) -> int:
    """In the process of its own: attach the layers, and make the overlay."""
    libc.private_mounts()
    # fsconfig(2) takes 256 bytes, in which `:` and `,` part names: so the paths are relative.
    os.chdir(scratch)
    libc.move_mount(below, _LOWER)
    libc.move_mount(changes, _CHANGES)
    options = {
        "source": "covenant",
        "lowerdir": f"{_CHANGES}/{image.MASK}:{_LOWER}" if masks else _LOWER,
        "upperdir": f"{_CHANGES}/{image.UPPER}",
        "workdir": f"{_CHANGES}/{image.WORK}",
        **_OPTIONS,
    }
    return libc.new_mount("overlay", options, _HELD)
