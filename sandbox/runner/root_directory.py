"""The root of a sandbox: a directory of closures alone, or an image of layers, which may be one EROFS file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from policy.compile.artefacts import Artefacts
from policy.host import Closure
from policy.layers import LayerRef
from sandbox.rootfs import host_links
from sandbox.rootfs.erofs_image import ImageFile
from sandbox.rootfs.skeleton import MountPoint, Skeletons


class HeldRoot(Struct, frozen=True):
    """A root directory that stays while it is held. ``check`` is called before code of it runs.

    ``file`` is the EROFS file that has the root; ``path`` is an empty directory then.
    """

    path: Path
    check: Callable[[], None]
    file: ImageFile | None = None


def hold(
    artefacts: Artefacts,
    closures: Sequence[Closure],
    derived: Sequence[Closure],
    *,
    state: Path,
    stack: contextlib.ExitStack,
    packer: Callable[[], Path | None] = lambda: None,
) -> HeldRoot:
    """Give the root directory of a policy, which is made if there is none. ``stack`` owns the hold.

    ``derived`` are files of ours over closures and layers; the links that granted paths lead through are added.
    ``packer`` gives mkfs.erofs where an image of layers is one file. ``check`` raises errors.LayerChangedError.

    Raises:
        errors.HostError: closures differ about a path, or the host's files are no longer those of the listing.
        errors.LayerError: a layer is missing, or the parts cannot be united.
    """
    root = artefacts.json("mounts.json")["root"]
    points: list[MountPoint] = [(point["path"], point["kind"]) for point in root["mount_points"]]
    derived = [*derived, host_links.closure(root.get("links", []))]
    image = root.get("image")
    if image is None:
        skeletons = Skeletons(state / "rootfs")
        return HeldRoot(stack.enter_context(skeletons.hold([*closures, *derived], points)), _nothing)
    # Imported only here: most runs have no layers, and a cold start pays for each import.
    from sandbox.layers.images import RootImages

    held = stack.enter_context(
        RootImages(state).hold(
            [one for one in closures if not one.layered],
            [LayerRef(one["name"], one["digest"]) for one in image["layers"]],
            executable=image["executable"],
            programs=image["programs"],
            points=points,
            derived=derived,
            packer=packer(),
        )
    )
    return HeldRoot(held.root, held.check.wait, held.file)


def _nothing() -> None:
    """A root of closures was checked file by file when it was made, and only root can reach it."""
