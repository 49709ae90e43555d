"""Where layers come from: a directory, a virtual environment, node_modules, installed packages, archives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from policy import errors, layers
from policy.manifest import text
from sandbox.layers import debian_archives, host_packages, oci_archive, presets, tree_walk
from sandbox.layers.packing import Packing
from sandbox.layers.store import LayerStore, Packed

# Mounts of a run in the agent's root.
COVERED = ("/tmp/", "/workspace/", "/proc/", "/dev/", "/sys/", "/run/")  # noqa: S108
KINDS = ("venv", "npm", "host-packages", "deb", "oci")


def directory(store: LayerStore, name: str, top: Path, prefix: str) -> Packed:
    """Build a layer of a directory, which is at ``prefix`` in the root.

    Raises:
        errors.LayerError: Raised when the prefix or the tree is refused.
    """
    if prefix != "/":
        layers.check_path(prefix)
    return store.pack_tree(top, name, prefix=prefix.rstrip("/"), source=f"directory {top}")


def build(store: LayerStore, name: str, words: Sequence[str]) -> Packed:
    """Build a layer of a source that has a name: a kind of ``KINDS`` with its arguments, or none for a preset.

    Raises:
        errors.UsageError: Raised when the kind is unknown, or has a wrong number of arguments.
        errors.LayerError: Raised when the source cannot be packed.
    """
    layers.check_name(name)
    if not words:
        if name not in presets.PRESETS:
            near = text.nearest(name, tuple(presets.PRESETS))
            raise errors.UsageError(
                f"what layer `{name}` is made of is not said",
                hint=(f"did you mean `{near}`? or: " if near else "")
                + f"give --from DIR or one of {', '.join(KINDS)}; built in are {', '.join(presets.PRESETS)}",
            )
        return store.pack(name, "built in", presets.PRESETS[name])
    kind, *given = words
    if kind not in KINDS:
        raise errors.UsageError(
            f"`{kind}` is no source of layers", hint=f"give --from DIR or one of {', '.join(KINDS)}"
        )
    if not given or (kind in ("venv", "npm", "oci") and len(given) != 1):
        one = kind in ("venv", "npm", "oci")
        raise errors.UsageError(
            f"`{kind}` takes {'one path' if one else 'packages'}",
            hint=f"covenant layer build {name} {kind} {'PATH' if one else 'PACKAGE...'}",
        )
    source = " ".join((kind, *given))
    if kind == "venv":
        return _at_its_place(store, name, Path(given[0]), source, needs="pyvenv.cfg", programs="bin")
    if kind == "npm":
        return _at_its_place(store, name, Path(given[0]), source, needs="node_modules", programs="node_modules/.bin")
    if kind == "host-packages":
        return store.pack(name, source, lambda pack: host_packages.fill(pack, given))
    if kind == "deb":
        return store.pack(name, source, lambda pack: debian_archives.fill(pack, given))
    return store.pack(name, source, lambda pack: oci_archive.fill(pack, Path(given[0])))


def _meant(place: str, needs: str, name: str) -> str:
    """Return the fix for a directory that is no environment: the one directly below it, or another source."""
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(place)):
            if os.path.lexists(os.path.join(place, entry, needs)):
                return f"did you mean `{os.path.join(place, entry)}`?"
    made = "python3 -m venv DIR" if needs == "pyvenv.cfg" else "npm install in DIR"
    return f"make one: {made}; any other directory: covenant layer build {name} --from DIR"


def _at_its_place(store: LayerStore, name: str, top: Path, source: str, *, needs: str, programs: str) -> Packed:
    """Build a layer of a directory at the path that it has on the host: its own files name that path.

    ``programs`` is the directory of its programs.
    """
    place = os.path.abspath(top)
    if not os.path.lexists(os.path.join(place, needs)):
        kind = "virtual environment" if needs == "pyvenv.cfg" else "directory of npm"
        raise errors.LayerError(
            f"`{place}` is no {kind}: it has no {needs}", hint=_meant(place, needs, name), where=place
        )
    top_fd = tree_walk.open_top(Path(place))

    def fill(pack: Packing) -> None:
        pack.tree(top_fd, place)
        if ":" in place:
            pack.notes.append(f"{place} has a `:`, so its programs cannot be found by name: move it, and build again")
        else:
            pack.search.append(f"{place}/{programs}")
        if (place + "/").startswith(COVERED):
            pack.notes.append(
                f"{place} is below a directory that every run covers by its own: move it, and build again"
            )
        python = f"{place}/bin/python"
        if pack.kind(python) == "link" and not os.path.realpath(python).startswith(f"{place}/"):
            pack.notes.append(
                f"its interpreter is {os.path.realpath(python)}, which a layer below or the base closure must have"
            )

    try:
        return store.pack(name, source, fill)
    finally:
        os.close(top_fd)
