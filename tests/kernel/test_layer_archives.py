"""Layers of packages that apt downloads from a repository of the test, and of OCI images."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from policy import errors
from sandbox.layers import debian_archives, oci_archive, sources
from sandbox.layers.store import LayerStore, Packed


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that a user without rights reaches."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="covenant-layers-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "state")


class Repository:
    """A repository of Debian packages in a directory, with an apt of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "repo").mkdir()
        (place / "lists").mkdir()
        self.options = {
            "Dir::Etc::sourcelist": str(place / "sources.list"),
            "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferencesparts": "-",
            "Dir::State::lists": str(place / "lists"),
            "APT::Architecture": "amd64",
        }

    def add(self, name: str, files: Mapping[str, bytes], depends: str = "") -> Path:
        top = self.place / "build" / name
        for path, content in files.items():
            file = Path(f"{top}{path}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(0o4755)
        control = f"Package: {name}\nVersion: 1\nArchitecture: amd64\nMaintainer: a <a@b>\nDescription: x\n"
        control += f"Depends: {depends}\n" if depends else ""
        (top / "DEBIAN").mkdir()
        (top / "DEBIAN/control").write_text(control)
        script = top / "DEBIAN/postinst"
        script.write_text(f"#!/bin/sh\ntouch {self.place}/ran\n")
        script.chmod(0o755)
        made = self.place / "repo" / f"{name}_1_amd64.deb"
        subprocess.run(["dpkg-deb", "--root-owner-group", "-b", str(top), str(made)], check=True, capture_output=True)
        raw = made.read_bytes()
        with (self.place / "repo/Packages").open("a") as index:
            index.write(f"{control}Filename: ./{made.name}\nSize: {len(raw)}\n")
            index.write(f"SHA256: {hashlib.sha256(raw).hexdigest()}\n\n")
        return made

    def update(self, trusted: str) -> None:
        (self.place / "sources.list").write_text(f"deb [trusted={trusted}] file:{self.place}/repo ./\n")
        words = [word for name, value in self.options.items() for word in ("-o", f"{name}={value}")]
        unsigned = ["-o", "Acquire::AllowInsecureRepositories=true"]
        subprocess.run(["apt-get", *words, *unsigned, "update"], check=True, capture_output=True)

    def layer(self, store: LayerStore, *names: str) -> Packed:
        return store.pack("own", "deb", lambda pack: debian_archives.fill(pack, names, options=self.options))


@pytest.fixture
def repository(place: Path) -> Repository:
    made = Repository(place)
    made.add("tool", {"/usr/bin/tool": b"#!/bin/sh\n", "/usr/share/doc/tool/x": b"d", "/etc/tool": b"c"}, "library")
    made.add("library", {"/usr/lib/library.so": b"so"})
    return made


def test_packages_come_with_what_they_need(repository: Repository, store: LayerStore) -> None:
    repository.update("yes")
    packed = repository.layer(store, "tool")
    listed = {entry.path for entry in store.listing(packed.ref) if entry.kind == "file"}
    assert listed == {"/usr/bin/tool", "/usr/lib/library.so"}
    assert packed.dropped == ("/usr/bin/tool", "/usr/lib/library.so")
    assert "tool_1_amd64.deb" in packed.notes[0]
    assert not (repository.place / "ran").exists(), "no script of a package is run"


def test_unsigned_repository_is_refused(repository: Repository, store: LayerStore) -> None:
    repository.update("no")
    with pytest.raises(errors.LayerToolError, match="apt-get failed"):
        repository.layer(store, "tool")
    # Control: the same repository, once its lists are trusted.
    repository.update("yes")
    assert repository.layer(store, "tool").info.files == 2


def test_changed_archive_is_refused(repository: Repository, store: LayerStore) -> None:
    repository.update("yes")
    archive = repository.place / "repo/library_1_amd64.deb"
    raw = archive.read_bytes()
    archive.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(errors.LayerToolError, match="apt-get failed"):
        repository.layer(store, "tool")
    archive.write_bytes(raw)
    assert repository.layer(store, "tool").info.files == 2


def test_unknown_package_is_named(repository: Repository, store: LayerStore) -> None:
    repository.update("yes")
    with pytest.raises(errors.LayerToolError, match="Unable to locate package absent") as e:
        repository.layer(store, "absent")
    assert "apt-get update" in e.value.hint
    assert store.listed() == []


def _image(top: Path) -> None:
    """An OCI layout with one layer: a program, a link, and a file that an upper layer removes."""
    blobs = top / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(raw: bytes) -> dict[str, object]:
        digest = hashlib.sha256(raw).hexdigest()
        (blobs / digest).write_bytes(raw)
        return {"digest": f"sha256:{digest}", "size": len(raw)}

    def tar(files: Mapping[str, bytes | str]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.mode = 0o755
                if isinstance(content, str):
                    info.type, info.linkname = tarfile.SYMTYPE, content
                    archive.addfile(info)
                else:
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        return out.getvalue()

    raws = [tar({"usr/bin/tool": b"#!", "old": b"old", "out": "/etc/passwd"}), tar({".wh.old": b""})]
    kinds = "application/vnd.oci.image"
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(raw).hexdigest()}" for raw in raws]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kinds}.manifest.v1+json",
        "config": {"mediaType": f"{kinds}.config.v1+json", **blob(json.dumps(config).encode())},
        "layers": [{"mediaType": f"{kinds}.layer.v1.tar", **blob(raw)} for raw in raws],
    }
    entry = {"mediaType": f"{kinds}.manifest.v1+json", **blob(json.dumps(manifest).encode())}
    (top / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (top / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


@pytest.mark.parametrize("form", ["layout", "archive"])
def test_image_is_unpacked_or_its_tools_are_named(place: Path, store: LayerStore, form: str) -> None:
    _image(place / "layout")
    archive = place / "layout"
    if form == "archive":
        archive = place / "image.tar"
        with tarfile.open(archive, "w") as out:
            out.add(place / "layout", ".")
    missing = [tool.name for tool in oci_archive.TOOLS if not tool.exists()]
    if missing:
        with pytest.raises(errors.LayerToolError) as e:
            sources.build(store, "own", ["oci", str(archive)])
        assert e.value.hint == f"apt-get install {' '.join(missing)}"
        return
    ref = sources.build(store, "own", ["oci", str(archive)]).ref
    listed = {entry.path: entry.kind for entry in store.listing(ref) if entry.kind != "dir"}
    assert listed == {"/usr/bin/tool": "file", "/out": "link"}
    shutil.rmtree(place / "layout/blobs")
    with pytest.raises(errors.LayerError):
        sources.build(store, "own", ["oci", str(place / "layout")])


def test_tools_that_are_not_there_are_named(place: Path, store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci_archive, "TOOLS", (place / "skopeo", place / "umoci"))
    with pytest.raises(errors.LayerToolError) as e:
        sources.build(store, "own", ["oci", str(place)])
    assert e.value.hint == "apt-get install skopeo umoci"
