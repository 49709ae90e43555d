"""Packing a tree, and what the store does with layers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from policy import errors, layers
from policy.layers import LayerRef
from sandbox.layers import packing, sources, tree_walk
from sandbox.layers.store import LayerStore


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "state")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "bin").mkdir(parents=True)
    (top / "bin/tool").write_bytes(b"#!/bin/sh\n")
    (top / "bin/tool").chmod(0o4755)
    (top / "data").write_bytes(b"data")
    (top / "data").chmod(0o600)
    (top / "out").symlink_to("/etc/passwd")
    (top / "up").symlink_to("../../../../etc")
    (top / "empty").mkdir()
    os.utime(top / "data", ns=(5, 7))
    return top


def _root(store: LayerStore, ref: LayerRef) -> Path:
    with contextlib.ExitStack() as stack:
        return store.hold(ref, stack).root


def test_tree_is_packed_as_it_is(store: LayerStore, tree: Path) -> None:
    packed = store.pack_tree(tree, "own", prefix="/opt/own")
    root = _root(store, packed.ref)
    found = {str(p.relative_to(root)): p for p in root.rglob("*")}
    assert sorted(found) == [
        *("opt", "opt/own", "opt/own/bin", "opt/own/bin/tool", "opt/own/data", "opt/own/empty"),
        *("opt/own/out", "opt/own/up"),
    ]
    assert [stat.S_IMODE(os.lstat(found[p]).st_mode) for p in ("opt", "opt/own/bin/tool", "opt/own/data")] == [
        *(0o755, 0o755, 0o644),
    ]
    assert os.readlink(found["opt/own/out"]) == "/etc/passwd"
    assert os.readlink(found["opt/own/up"]) == "../../../../etc"
    assert os.lstat(found["opt/own/data"]).st_mtime_ns == 7
    assert packed.dropped == ("/opt/own/bin/tool",)
    assert (packed.info.files, packed.info.bytes, packed.info.source) == (2, 14, "directory")
    listing = (root.parent / "listing").read_bytes()
    assert hashlib.sha256(listing).hexdigest() == packed.ref.digest == root.parent.name
    assert store.verify(packed.ref) == ()
    assert stat.S_IMODE(os.lstat(root.parent.parent).st_mode) == 0o700


def test_digest_is_of_content_alone(store: LayerStore, tree: Path) -> None:
    one = store.pack_tree(tree, "one")
    os.utime(tree / "data", ns=(9, 9))
    (tree / "data").chmod(0o664)
    again = store.pack_tree(tree, "two")
    assert again.ref.digest == one.ref.digest
    assert [info.names for info in store.listed()] == [("one", "two")]
    (tree / "data").chmod(0o700)
    assert store.pack_tree(tree, "two").ref.digest != one.ref.digest


def _bind(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        # The whole path may be longer than a socket's name.
        bound.bind(os.path.relpath(place))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a fifo"),
        (_bind, "a socket"),
        (lambda place: os.mknod(place, 0o600 | stat.S_IFCHR, os.makedev(1, 3)), "a device"),
    ],
)
def test_special_file_is_refused(
    store: LayerStore, tree: Path, make: Callable[[Path], object], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    make(tree / "bin" / "odd")
    with pytest.raises(errors.LayerError, match=f"`/bin/odd` is {kind}") as e:
        store.pack_tree(tree, "own")
    os.unlink(tree / "bin" / "odd")
    assert e.value.hint
    assert store.pack_tree(tree, "own").info.files == 2
    assert len(store.listed()) == 1


def test_name_that_is_not_utf8_is_refused(store: LayerStore, tree: Path) -> None:
    os.close(os.open(os.fsencode(tree) + b"/\xff", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(errors.LayerError, match="not UTF-8"):
        store.pack_tree(tree, "own")


def test_empty_or_missing_tree_is_refused(store: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "void").mkdir()
    with pytest.raises(errors.LayerError, match="empty"):
        store.pack_tree(tmp_path / "void", "own")
    with pytest.raises(errors.LayerError, match="cannot be read: No such file"):
        store.pack_tree(tmp_path / "absent", "own")
    with pytest.raises(errors.LayerError, match="cannot be read: Not a directory"):
        store.pack_tree(Path("/dev/null"), "own")
    with pytest.raises(errors.LayerError, match="cannot name"):
        store.pack_tree(tmp_path, "Own")


def test_file_that_grows_meanwhile_is_noticed(store: LayerStore, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = packing.copy

    def grow(source: int, place: Path, *, executable: bool, mtime_ns: int) -> tuple[int, str]:
        done = copy(source, place, executable=executable, mtime_ns=mtime_ns)
        with (tree / "data").open("ab") as stream:
            stream.write(b"more")
        return done

    monkeypatch.setattr(packing, "copy", grow)
    with pytest.raises(errors.LayerError, match="`/data` changed"):
        store.pack_tree(tree, "own")
    assert store.listed() == []


def test_directory_swapped_for_link_is_not_followed(tree: Path, tmp_path: Path) -> None:
    """A user swaps a directory of its tree while root packs it."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_bytes(b"secret")
    (tree / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "packed").mkdir()
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            os.rename(tree / "sub", tmp_path / "aside")
            os.rename(tmp_path / "link", tree / "sub")
            os.rename(tree / "sub", tmp_path / "link")
            os.rename(tmp_path / "aside", tree / "sub")

    swapper = threading.Thread(target=swap)
    swapper.start()
    outcomes = set()
    try:
        for number in range(500):
            root = tmp_path / "packed" / str(number)
            root.mkdir()
            top = tree_walk.open_top(tree)
            try:
                packing.Packing(root).tree(top)
            except errors.LayerError as e:
                outcomes.add("refused" if "changed" in e.message else e.message)
            finally:
                os.close(top)
            assert not (root / "sub" / "key").exists() or (root / "sub").is_symlink()
    finally:
        ended.set()
        swapper.join()
    assert outcomes == {"refused"}


def test_walk_opens_only_the_file_it_saw(tree: Path) -> None:
    top = tree_walk.open_top(tree)
    try:
        for found in tree_walk.walk(top):
            if found.path == "/data":
                os.unlink(tree / "data")
                (tree / "data").symlink_to("/etc/passwd")
                with pytest.raises(errors.LayerError, match="cannot be read"):
                    found.open()
                os.unlink(tree / "data")
                (tree / "data").write_bytes(b"other")
                with pytest.raises(errors.LayerError, match="changed"):
                    found.open()
                break
    finally:
        os.close(top)


def test_depth_has_an_end(store: LayerStore, tmp_path: Path) -> None:
    place = tmp_path / "deep"
    place.mkdir()
    fd = os.open(place, os.O_RDONLY)
    for _ in range(250):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    with pytest.raises(errors.LayerError, match="deeper than 200"):
        store.pack_tree(place, "own")


def _spoil_byte(place: Path) -> None:
    info = place.stat()
    raw = bytearray(place.read_bytes())
    raw[0] ^= 1
    place.write_bytes(raw)
    os.utime(place, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda root: _spoil_byte(root / "data"), "/data: has other bytes"),
        (lambda root: (root / "data").unlink(), "/data: is missing"),
        (lambda root: (root / "new").touch(), "/new: is not in the listing"),
        (lambda root: (root / "data").chmod(0o755), "/data: has another execute bit"),
        (lambda root: (root / "data").chmod(0o666), "/data: has another owner or mode"),
        (lambda root: ((root / "up").unlink(), (root / "up").symlink_to("/x")), "/up: leads elsewhere"),
        (lambda root: ((root / "up").unlink(), (root / "up").mkdir()), "/up: is a dir and was a link"),
        (lambda root: (root / "empty").chmod(0o777), "/empty: has another owner or mode"),
        (lambda root: root.chmod(0o777), "/: has another owner or mode"),
    ],
)
def test_verify_names_what_changed(store: LayerStore, tree: Path, spoil: Callable[[Path], object], told: str) -> None:
    ref = store.pack_tree(tree, "own").ref
    assert store.verify(ref) == ()
    spoil(_root(store, ref))
    assert store.verify(ref) == (told,)


def test_changed_listing_is_refused(store: LayerStore, tree: Path) -> None:
    ref = store.pack_tree(tree, "own").ref
    place = _root(store, ref).parent / "listing"
    place.write_bytes(layers.canonical(layers.parsed(place.read_bytes())[:1]))
    with pytest.raises(errors.LayerChangedError):
        store.verify(ref)


def test_missing_layer_is_named_with_a_fix(store: LayerStore, tree: Path) -> None:
    absent = LayerRef("own", "0" * 64)
    with pytest.raises(errors.LayerError, match="not in the store") as e:
        store.get(absent)
    assert "covenant layer build own" in e.value.hint
    ref = store.pack_tree(tree, "own").ref
    with pytest.raises(errors.LayerError) as e:
        store.listing(absent)
    assert str(ref) in e.value.hint
    assert store.get(ref).ref() == ref
    assert store.get(LayerRef("other", ref.digest)).digest == ref.digest


def test_layer_is_found_by_each_of_its_words(store: LayerStore, tree: Path) -> None:
    ref = store.pack_tree(tree, "own").ref
    for word in ("own", ref.digest, ref.digest[:8], f"sha256:{ref.digest}", str(ref)):
        assert store.find(word).digest == ref.digest
    for word in ("absent", ref.digest[:7], ""):
        with pytest.raises(errors.LayerError, match="no layer"):
            store.find(word)
    (tree / "data").write_bytes(b"newer")
    store.pack_tree(tree, "own")
    with pytest.raises(errors.LayerError, match="name of 2 layers") as e:
        store.find("own")
    assert ref.digest[:12] in e.value.hint


def test_held_layer_is_not_removed(store: LayerStore, tree: Path) -> None:
    info = store.pack_tree(tree, "own").info
    with contextlib.ExitStack() as stack:
        held = store.hold(info.ref(), stack)
        with pytest.raises(errors.LayerInUseError):
            store.remove(info, images=[])
        assert store.collect(unused_seconds=-1, images_of=lambda _: []) == []
        assert (held.root / "data").read_bytes() == b"data"
    with pytest.raises(errors.LayerInUseError):
        store.remove(info, images=["x"])
    assert store.collect(unused_seconds=-1, images_of=lambda _: ["x"]) == []
    assert store.collect(unused_seconds=3600, images_of=lambda _: []) == []
    store.remove(info, images=[])
    assert store.listed() == []


def test_unused_layer_is_collected(store: LayerStore, tree: Path) -> None:
    info = store.pack_tree(tree, "own").info
    assert store.collect(unused_seconds=-1, images_of=lambda _: []) == [info.digest]


def test_same_path_twice_is_refused(store: LayerStore) -> None:
    def fill(pack: packing.Packing) -> None:
        pack.link("/a/b", "c")
        pack.link("/a/b", "c")
        pack.directory("/a")
        pack.bytes("/x", b"1")
        with pytest.raises(errors.LayerError, match="twice"):
            pack.link("/a/b", "d")
        with pytest.raises(errors.LayerError, match="twice"):
            pack.bytes("/x/y", b"2")

    assert store.pack("own", "test", fill).info.files == 1


def test_damaged_meta_is_named_with_a_fix(store: LayerStore, tree: Path) -> None:
    ref = store.pack_tree(tree, "own").ref
    folder = _root(store, ref).parent
    (folder / "meta.json").write_bytes(b"{")
    with pytest.raises(errors.LayerChangedError) as e:
        store.listed()
    assert e.value.hint.startswith(f"rm -r {folder},")
    shutil.rmtree(folder)
    assert store.pack_tree(tree, "own").ref == ref


@pytest.mark.usefixtures("promptly")
@pytest.mark.parametrize("record", ["meta.json", "listing", "complete"])
def test_record_that_is_a_fifo_is_refused(store: LayerStore, tree: Path, record: str) -> None:
    """No reader waits for a writer of it."""
    ref = store.pack_tree(tree, "own").ref
    place = _root(store, ref).parent / record
    place.unlink()
    os.mkfifo(place, 0o600)
    with pytest.raises(errors.LayerError) as e:
        store.listing(store.get(ref).ref())
    assert e.value.hint
    # What the hints say.
    shutil.rmtree(place.parent)
    assert store.pack_tree(tree, "own").ref == ref
    assert store.listing(ref)


def test_link_on_the_way_to_the_tree_is_refused(store: LayerStore, tree: Path, tmp_path: Path) -> None:
    """Another user could make it lead to files of root."""
    (tmp_path / "way").symlink_to(tree)
    for place in (tmp_path / "way", tmp_path / "way" / "bin"):
        with pytest.raises(errors.LayerError, match="goes through a link") as e:
            store.pack_tree(place, "own")
        real = e.value.hint.rpartition(": ")[2]
        assert real == str(place.resolve())
        assert store.pack_tree(Path(real), "own").info.files


@pytest.mark.parametrize(("kind", "programs"), [("venv", "bin"), ("npm", "node_modules/.bin")])
def test_programs_of_an_environment_are_remembered(store: LayerStore, tmp_path: Path, kind: str, programs: str) -> None:
    top = tmp_path / "own"
    (top / programs).mkdir(parents=True)
    (top / "pyvenv.cfg").touch()
    packed = sources.build(store, "own", [kind, str(top)])
    assert packed.info.search == (f"{top}/{programs}",)
    assert [one.search for one in store.listed()] == [packed.info.search]
    # Packed as a plain directory, the same tree has the same digest and no programs to find by name.
    assert store.pack_tree(top, "own", prefix=str(top)).ref == packed.ref
    assert store.find("own").search == ()


def test_programs_that_are_not_there_are_not_remembered(store: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/pyvenv.cfg").touch()
    assert sources.build(store, "own", ["venv", str(tmp_path / "own")]).info.search == ()


def test_programs_behind_a_colon_are_not_on_path(store: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "a:b/bin").mkdir(parents=True)
    (tmp_path / "a:b/pyvenv.cfg").touch()
    packed = sources.build(store, "own", ["venv", str(tmp_path / "a:b")])
    assert packed.info.search == ()
    assert any("has a `:`" in note for note in packed.notes)
