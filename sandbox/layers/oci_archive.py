"""Put the root file system of an OCI image into a layer: an archive, or a directory with an OCI layout.

skopeo copies the image into a layout and checks its digests; umoci unpacks it. Both run as an ordinary user without
rights. The configuration of the image (entry point, environment) is no part of the layer.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from policy import errors
from sandbox.layers import tree_walk, unprivileged
from sandbox.layers.packing import Packing

TOOLS = (Path("/usr/bin/skopeo"), Path("/usr/bin/umoci"))
_HINT = "name an OCI archive, or a directory with an OCI layout, that has one image"


def fill(pack: Packing, archive: Path) -> None:
    """Unpack an image.

    Raises:
        errors.LayerToolError: Raised when skopeo or umoci is missing or fails.
        errors.LayerError: Raised when the archive is missing, or the unpacked tree is refused.
    """
    missing = [tool.name for tool in TOOLS if not tool.exists()]
    if missing:
        raise errors.LayerToolError(
            f"{' and '.join(missing)} is not installed, which an OCI image needs",
            hint=f"apt-get install {' '.join(missing)}",
        )
    if not archive.exists():
        raise errors.LayerError(f"`{archive}` is not there", hint="name an OCI archive or layout", where=str(archive))
    skopeo, umoci = map(str, TOOLS)
    with unprivileged.directory() as own:
        source = own / "source"
        # A copy: the user without rights may not reach the operator's directories.
        if archive.is_dir():
            shutil.copytree(archive, source, symlinks=True)
        else:
            shutil.copyfile(archive, source)
        for place in (source, *source.rglob("*")):
            os.lchown(place, unprivileged.NOBODY, unprivileged.NOBODY)
        transport = "oci" if archive.is_dir() else _transport(source)
        layout = f"{own / 'layout'}:image"
        copy = [skopeo, "--insecure-policy", "--tmpdir", str(own), "copy", "--quiet"]
        unprivileged.run([*copy, f"{transport}:{source}", f"oci:{layout}"], own, hint=_HINT)
        unprivileged.run([umoci, "unpack", "--rootless", "--image", layout, str(own / "bundle")], own, hint=_HINT)
        top = tree_walk.open_top(own / "bundle" / "rootfs")
        try:
            pack.tree(top)
        finally:
            os.close(top)


def _transport(archive: Path) -> str:
    """Tell an OCI archive from one that `docker save` made, by the names in it."""
    import tarfile

    try:
        with tarfile.open(archive) as tar:
            names = {name.removeprefix("./") for name in tar.getnames()}
    except (tarfile.TarError, OSError, EOFError) as e:
        raise errors.LayerError(f"`{archive.name}` of the image is no tar archive: {e}") from e
    return "oci-archive" if "oci-layout" in names else "docker-archive"
