"""``covenant layer``: build, list, show, verify and remove the layers that manifests name by digest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, spinner, times
from policy import errors

if TYPE_CHECKING:
    from sandbox.layers.store import LayerInfo, LayerStore, Packed

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_SHOWN_FILES = 20


@click.group()
def layer() -> None:
    """Build the directory trees that agents' roots are made of, and keep them."""


@layer.command(
    epilog=common.examples(
        "covenant layer build debian-minimal",
        "covenant layer build tools --from ./tools --prefix /opt/tools",
        "covenant layer build app venv ./venv",
        "covenant layer build app npm ./app",
        "covenant layer build shell host-packages bash git",
    )
)
@click.argument("name")
@click.argument("source", nargs=-1, metavar="[venv DIR | npm DIR | host-packages P... | deb P... | oci ARCHIVE]")
@click.option("--from", "top", type=click.Path(path_type=Path), metavar="DIR", help="Pack this directory as it is.")
@click.option("--prefix", default="/", metavar="PATH", help="Where --from is in the root; default /.")
@_JSON
def build(name: str, source: tuple[str, ...], top: Path | None, prefix: str, as_json: bool) -> None:
    """Pack a tree once, and print the NAME@sha256:DIGEST that a manifest names it by.

    venv and npm take a directory at its own path; host-packages the files of installed Debian packages with what they
    need; deb packages that apt downloads; oci an image archive. debian-minimal alone is built in.
    """
    from sandbox.layers import sources

    if top is not None and str(top) in sources.KINDS and source:
        source, top = (str(top), *source), None
    if top is not None and source:
        raise errors.UsageError(
            f"--from has one directory, and beside it stands `{' '.join(source)}`",
            hint=f"give one source: --from DIR, or one of {', '.join(sources.KINDS)} with its arguments",
        )
    if top is None and prefix != "/":
        raise errors.UsageError("--prefix needs --from", hint="venv and npm keep the path that they have")
    store = _store()
    with spinner.shown(f"packing layer {common.visible(name)}", quiet=as_json):
        packed = sources.build(store, name, source) if top is None else sources.directory(store, name, top, prefix)
    if as_json:
        common.emit({"kind": "layer_built", **_document(packed.info), **_remarks(packed)})
        return
    for note in packed.notes:
        common.say(f"note: {common.visible(note)}", err=True)
    if packed.dropped:
        common.say(f"note: setuid and setgid bits are removed: {_few(packed.dropped)}", err=True)
    common.say(str(packed.ref))


@layer.command("list", epilog=common.examples("covenant layer list", "covenant layer list --json"))
@_JSON
def list_layers(as_json: bool) -> None:
    """List the layers of the store."""
    found = _store().listed()
    if as_json:
        common.emit({"kind": "layers", "layers": [_document(info) for info in found]})
        return
    for info in found:
        common.say(common.visible(f"{info.ref()}  {_size(info)}  {times.utc(info.made_ms)}  {info.source}"))


@layer.command(epilog=common.examples("covenant layer show debian-minimal", "covenant layer show app --files"))
@click.argument("layer_name", metavar="NAME|DIGEST")
@click.option("--files", is_flag=True, help="List every path too.")
@_JSON
def show(layer_name: str, files: bool, as_json: bool) -> None:
    """Show one layer: its reference, its size, what it was made of, the images that use it."""
    from sandbox.layers.images import RootImages

    store = _store()
    info = store.find(layer_name)
    images = RootImages(common.state()).made_of(info.digest)
    entries = store.listing(info.ref()) if files else ()
    if as_json:
        listed = [{"path": e.path, "kind": e.kind, "executable": e.executable, "size": e.size} for e in entries]
        kinds = {key: one.kind for key, one in images.items()}
        document = {"kind": "layer", **_document(info), "images": [*images], "image_kinds": kinds}
        common.emit({**document, **({"entries": listed} if files else {})})
        return
    common.say(common.visible(str(info.ref())))
    common.say(common.visible(f"names   {', '.join(info.names)}"))
    common.say(common.visible(f"source  {info.source}"))
    common.say(f"made    {times.utc(info.made_ms)}")
    common.say(f"size    {_size(info)}")
    common.say(f"images  {len(images)}")
    for path in info.search:
        common.say(common.visible(f"PATH    {path}"))
    for key, one in images.items():
        size = f"one file of {one.bytes / (1 << 20):.1f} MiB" if one.kind == "erofs" else "a directory"
        common.say(f"  {key[:16]}  {size}")
    for e in entries:
        mark = {"dir": "d", "link": "l", "file": "x" if e.executable else "-"}[e.kind]
        common.say(common.visible(f"{mark} {e.path}" + (f" -> {e.target}" if e.kind == "link" else "")))


@layer.command(epilog=common.examples("covenant layer verify debian-minimal"))
@click.argument("layer_name", metavar="NAME|DIGEST")
@_JSON
@click.pass_context
def verify(ctx: click.Context, layer_name: str, as_json: bool) -> None:
    """Read every byte of a layer again, and name each file that is not as packed. Exit status 3 if there is one.

    Root images that are one file each are read too.
    """
    from sandbox.layers.images import RootImages

    store = _store()
    info = store.find(layer_name)
    with spinner.shown("reading the layer", quiet=as_json):
        of_layer = store.verify(info.ref())
        found = (*of_layer, *RootImages(common.state()).verify(info.digest))
    if as_json:
        common.emit({"kind": "layer_verified", **_document(info), "holds": not found, "differences": list(found)})
    elif not found:
        common.say(common.visible(f"ok: {info.ref()}"))
    else:
        for line in found:
            common.say(common.visible(line))
        again = f"; covenant layer rm {info.digest}; then build it again" if of_layer else ""
        common.say(f"  fix: covenant layer gc --images{again}")
    if found:
        ctx.exit(common.EXIT_NO)


@layer.command(epilog=common.examples("covenant layer rm app"))
@click.argument("layer_name", metavar="NAME|DIGEST")
@_JSON
def rm(layer_name: str, as_json: bool) -> None:
    """Remove a layer that no root image is made of."""
    from sandbox.layers.images import RootImages

    store = _store()
    info = store.find(layer_name)
    store.remove(info, images=RootImages(common.state()).of_layer(info.digest))
    if as_json:
        common.emit({"kind": "layer_removed", **_document(info)})
    else:
        common.say(common.visible(f"removed {info.ref()}"))


@layer.command(epilog=common.examples("covenant layer gc", "covenant layer gc --images"))
@click.option("--unused", default="30d", metavar="TIME", help="What was not used for this long, as 12h; default 30d.")
@click.option("--images", "images_only", is_flag=True, help="Every root image that no run uses; layers stay.")
@_JSON
def gc(unused: str, images_only: bool, as_json: bool) -> None:
    """Remove root images, then layers, that nothing used for a time.

    What a run uses stays, and a layer while an image is made of it. The next run makes a removed image again.
    """
    from sandbox.layers.images import RootImages

    seconds = times.duration_ms(unused, option="--unused") / 1000
    store, images = _store(), RootImages(common.state())
    gone = images.collect(unused_seconds=0 if images_only else seconds)
    layers = [] if images_only else store.collect(unused_seconds=seconds, images_of=images.of_layer)
    if as_json:
        common.emit({"kind": "layers_collected", "images": gone, "layers": layers})
    else:
        common.say(f"removed {len(gone)} root images and {len(layers)} layers")


def _store() -> LayerStore:
    from sandbox.layers.store import LayerStore

    if os.geteuid() != 0:
        raise errors.PrivilegeError("layers are root's", hint="run it with sudo, and give COVENANT_HOME")
    return LayerStore(common.state())


def _document(info: LayerInfo) -> dict[str, Any]:
    return {
        "ref": str(info.ref()),
        "names": list(info.names),
        "digest": info.digest,
        "source": info.source,
        "made_ms": info.made_ms,
        "files": info.files,
        "bytes": info.bytes,
        "search": list(info.search),
    }


def _remarks(packed: Packed) -> dict[str, Any]:
    return {"notes": list(packed.notes), "setuid_removed": list(packed.dropped)}


def _size(info: LayerInfo) -> str:
    return f"{info.files} files, {info.bytes / (1 << 20):.1f} MiB"


def _few(paths: tuple[str, ...]) -> str:
    more = f" and {len(paths) - _SHOWN_FILES} more" if len(paths) > _SHOWN_FILES else ""
    return common.visible(", ".join(paths[:_SHOWN_FILES])) + more
