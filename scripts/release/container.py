"""Make the image of the daemon alone: an OCI archive (image layout 1.0 in a tar), without a registry or a builder."""

from __future__ import annotations

import datetime
import gzip
import hashlib
import io
import json
import pathlib
import shutil
import tarfile
from collections.abc import Iterator
from typing import Any

from scripts.machine import console
from scripts.release import base
from scripts.release.environment import PLACE
from scripts.release.recipe import PYTHON, Source

# A number that no package of the distribution gives to a user.
UID = 65532
HOME = "/var/lib/covenantd"
SOCKETS = "/run/covenant"
PORT = 8421
_TYPE = "application/vnd.oci.image"
_ACCOUNTS = {
    "etc/passwd": f"root:x:0:0:root:/:/usr/sbin/nologin\ncovenant:x:{UID}:{UID}::{HOME}:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\ncovenant:x:{UID}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
# Directories with another mode or owner than those of the system.
_PLACES = {HOME.lstrip("/"): (0o700, UID), SOCKETS.lstrip("/"): (0o755, 0), "tmp": (0o1777, 0)}


def make(source: Source, tree: pathlib.Path, out: pathlib.Path) -> tuple[pathlib.Path, list[dict[str, str]]]:
    """Make the image of `tree`'s environment, and return the archive with the system's packages in it.

    Raises:
        SetupError: this machine's Python is of no Debian package, or was changed.
    """
    system, own = tree.parent / "image-base", tree.parent / "image-daemon"
    packages = base.make(source, system)
    _compile(source, system)
    shutil.copytree(tree / PLACE.lstrip("/"), own / PLACE.lstrip("/"), symlinks=True)
    for name, text in _ACCOUNTS.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    for name in _PLACES:
        (own / name).mkdir(parents=True)
    # No service of root's is in it.
    (own / PLACE.lstrip("/") / "bin/covenant-supervisor").unlink()
    (own / "usr/bin").mkdir(parents=True)
    for name in ("covenant", "covenantd"):
        (own / "usr/bin" / name).symlink_to(f"{PLACE}/bin/{name}")
    target = out / f"covenantd-{source.version}-amd64.oci.tar"
    console.change(f"pack {target.name}")
    target.write_bytes(archive(source, [layer(source, system), layer(source, own)]))
    return target, packages


def _compile(source: Source, system: pathlib.Path) -> None:
    """Byte code of the standard library, since the daemon's user cannot write it."""
    options = ["-q", "-f", "--invalidation-mode", "unchecked-hash", "-s", str(system), "-p", "/"]
    console.run([PYTHON, "-IB", "-m", "compileall", *options, str(system / "usr/lib")], env=source.environment)


def layer(source: Source, tree: pathlib.Path) -> bytes:
    """Return `tree` as a tar of root's files in one order, without times, modes or owners of this machine."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(tree.rglob("*")):
            name = str(path.relative_to(tree))
            entry = tarfile.TarInfo(name)
            entry.mtime = source.epoch
            if path.is_symlink():
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
                tar.addfile(entry)
            elif path.is_dir():
                entry.type = tarfile.DIRTYPE
                entry.mode, entry.uid = _PLACES.get(name, (0o755, 0))
                entry.gid = entry.uid
                tar.addfile(entry)
            else:
                entry.mode, entry.size = 0o755 if path.stat().st_mode & 0o100 else 0o644, path.stat().st_size
                with path.open("rb") as file:
                    tar.addfile(entry, file)
    return stream.getvalue()


def configuration(source: Source, layers: list[bytes]) -> dict[str, Any]:
    """Return the image's configuration: who runs, what is started, what is kept."""
    time = datetime.datetime.fromtimestamp(source.epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "created": time,
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "User": f"{UID}:{UID}",
            "Env": [
                "PATH=/usr/bin:/bin",
                "LANG=C.UTF-8",
                f"COVENANT_HOME={HOME}",
                f"COVENANT_SOCKET={SOCKETS}/supervisor.sock",
            ],
            "Entrypoint": ["/usr/bin/covenantd"],
            "WorkingDir": HOME,
            "Volumes": {HOME: {}},
            "ExposedPorts": {f"{PORT}/tcp": {}},
            "StopSignal": "SIGTERM",
            "Labels": {
                "org.opencontainers.image.title": "covenantd",
                "org.opencontainers.image.version": source.version,
                "org.opencontainers.image.licenses": "Apache-2.0",
                "org.opencontainers.image.description": "The daemon alone: the host's supervisor runs agents.",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [_digest(content) for content in layers]},
        "history": [{"created": time, "created_by": "scripts/package"} for _ in layers],
    }


def archive(source: Source, layers: list[bytes]) -> bytes:
    """Return the layout with these layers as a tar; each blob has its digest as its name."""
    blobs: dict[str, bytes] = {}

    def put(content: bytes, media: str) -> dict[str, Any]:
        digest = _digest(content)
        blobs[f"blobs/{digest.replace(':', '/')}"] = content
        return {"mediaType": f"{_TYPE}.{media}", "digest": digest, "size": len(content)}

    packed = [put(gzip.compress(content, 3, mtime=0), "layer.v1.tar+gzip") for content in layers]
    config = put(_json(configuration(source, layers)), "config.v1+json")
    manifest = {"schemaVersion": 2, "mediaType": f"{_TYPE}.manifest.v1+json", "config": config, "layers": packed}
    entry = put(_json(manifest), "manifest.v1+json")
    entry["platform"] = {"architecture": "amd64", "os": "linux"}
    entry["annotations"] = {"org.opencontainers.image.ref.name": source.version}
    index = {"schemaVersion": 2, "mediaType": f"{_TYPE}.index.v1+json", "manifests": [entry]}
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json(index), **blobs}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, content in _entries(source, files):
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def _entries(source: Source, files: dict[str, bytes]) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for name in ("blobs", "blobs/sha256"):
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, source.epoch
        yield info, b""
    for name, content in sorted(files.items()):
        info = tarfile.TarInfo(name)
        info.size, info.mtime = len(content), source.epoch
        yield info, content


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
