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
from sandbox.workspace.image import LayerNames

_HELD: Final = libc.MOUNT_ATTR_NOSUID | libc.MOUNT_ATTR_NODEV
# What a name in the upper layer can mean is kept small: no renamed directory, no file without its content, no index.
_OPTIONS: Final = {"redirect_dir": "nofollow", "metacopy": "off", "index": "off", "xino": "off"}
_LOWER, _CHANGES = "lower", "changes"


class Owner(Struct, frozen=True):
    """The ids of the owner of a directory."""

    uid: int
    gid: int


def made(
    directory: int,
    changes: int,
    *,
    owner: Owner,
    uid: int,
    masks: bool,
    scratch: Path,
    layers: LayerNames = image.DIRECTORY,
    flags: int = 0,
) -> int:
    """Return a detached mount of the overlay, which shows the owner as user ``uid``.

    ``directory`` is the caller's, ``changes`` a detached mount of its image, which takes the ids of the overlay here.
    ``scratch`` is a directory for mount points, ``layers`` names the layers of the image, ``flags`` are further ones of
    the mount.

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
            return _overlaid(below, changes, scratch, options(layers, masks=masks), _HELD | flags)
        finally:
            os.close(below)
    except OSError as e:
        raise errors.WorkspaceError(
            f"the workspace cannot be laid over the directory: {e.strerror}",
            hint="its file system must take idmapped mounts, as ext4, xfs, btrfs and tmpfs do",
        ) from e
    finally:
        os.close(users)


def empty() -> int:
    """Return a detached mount of an empty directory that no user can write to."""
    options: dict[str, str | None] = {"source": "covenant", "size": "4k", "nr_inodes": "1", "mode": "0555"}
    return libc.new_mount("tmpfs", options, _HELD | libc.MOUNT_ATTR_NOEXEC)


def options(layers: LayerNames, *, masks: bool) -> dict[str, str | None]:
    """Return the options of an overlay, with paths from the directory of the mount points."""
    return {
        "source": "covenant",
        "lowerdir": f"{_CHANGES}/{layers.mask}:{_LOWER}" if masks else _LOWER,
        "upperdir": f"{_CHANGES}/{layers.upper}",
        "workdir": f"{_CHANGES}/{layers.work}",
        **_OPTIONS,
    }


def _overlaid(below: int, changes: int, scratch: Path, options: dict[str, str | None], flags: int) -> int:
    """Make the overlay in a process with a mount namespace of its own, and take its descriptor."""
    for name in (_LOWER, _CHANGES):
        (scratch / name).mkdir(mode=0o700, exist_ok=True)
    _, (fd,) = child.work(lambda: (b"", [_overlay(below, changes, scratch, options, flags)]))
    return fd


def _overlay(below: int, changes: int, scratch: Path, options: dict[str, str | None], flags: int) -> int:
    """In the process of its own: attach the layers, and make the overlay."""
    libc.private_mounts()
    # fsconfig(2) takes 256 bytes, in which `:` and `,` part names: so the paths are relative.
    os.chdir(scratch)
    libc.move_mount(below, _LOWER)
    libc.move_mount(changes, _CHANGES)
    return libc.new_mount("overlay", options, flags)
