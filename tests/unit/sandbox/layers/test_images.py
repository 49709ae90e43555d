"""Root images: their order, their execute bits, their check, and who may remove them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from policy import errors
from policy.host import Closure, ClosureFile
from policy.layers import LayerRef
from sandbox.host import erofs_roots
from sandbox.layers import image_check, packing
from sandbox.layers.images import RootImages
from sandbox.layers.store import LayerStore
from sandbox.rootfs import erofs_image, host_links, loader_patch, skeleton

LOADER = loader_patch.LOADERS["x86_64"]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def images(state: Path) -> RootImages:
    return RootImages(state)


def _layer(state: Path, name: str, files: Mapping[str, bytes | str], *programs: str) -> LayerRef:
    """A layer of files (bytes) and links (str)."""

    def fill(pack: packing.Packing) -> None:
        for path, content in files.items():
            if isinstance(content, str):
                pack.link(path, content)
            else:
                pack.bytes(path, content, executable=path in programs)

    return LayerStore(state).pack(name, "test", fill).ref


def _closure(tmp_path: Path, path: str, data: bytes, mode: int = 0o644) -> Closure:
    source = tmp_path / hashlib.sha256(path.encode() + data).hexdigest()
    source.write_bytes(data)
    parts = path.split("/")[1:]
    above = [ClosureFile("/" + "/".join(parts[:n]), "dir", 0o755) for n in range(1, len(parts))]
    file = ClosureFile(path, "file", mode, len(data), hashlib.sha256(data).hexdigest(), source=str(source))
    return Closure(path, path, (*above, file))


def _bits(root: Path) -> dict[str, bool]:
    """The files of a root, each with whether it can be executed."""
    return {
        "/" + str(p.relative_to(root)): bool(os.lstat(p).st_mode & 0o111)
        for p in root.rglob("*")
        if stat.S_ISREG(os.lstat(p).st_mode)
    }


def test_parts_are_laid_in_their_order(state: Path, images: RootImages, tmp_path: Path) -> None:
    low = _layer(
        state, "low", {"/etc/a": b"low", "/etc/b": b"low", "/etc/c": b"low", "/usr/bin/x": b"", "/bin": "usr/bin"}
    )
    high = _layer(state, "high", {"/etc/b": b"high", "/etc/c": b"high", "/bin/y": b"y"})
    closure = _closure(tmp_path, "/etc/a", b"closure")
    derived = _closure(tmp_path, "/etc/c", b"derived")
    points: list[skeleton.MountPoint] = [("/work/space", "dir"), ("/etc/resolv.conf", "file"), ("/usr/bin/z", "dir")]
    with images.hold([closure], [low, high], points=points, derived=[derived]) as held:
        held.check.wait()
        root = held.root
        assert [(root / "etc" / name).read_bytes() for name in "abc"] == [b"low", b"high", b"derived"]
        assert (root / "usr/bin/y").read_bytes() == b"y"
        assert os.readlink(root / "bin") == "usr/bin"
        assert (root / "work/space").is_dir()
        assert (root / "usr/bin/z").is_dir()
        assert (root / "etc/resolv.conf").read_bytes() == b""
        layer = state / "layers" / high.digest / "root/etc/b"
        assert os.lstat(root / "etc/b").st_ino == os.lstat(layer).st_ino


def test_closures_alone_make_an_image(images: RootImages, tmp_path: Path) -> None:
    with images.hold([_closure(tmp_path, "/bin/tool", b"x", 0o755)], []) as held:
        held.check.wait()
        assert _bits(held.root) == {"/bin/tool": True}


TOOLS: Mapping[str, bytes | str] = {"/bin/a": b"a", "/bin/b": b"b", "/bin/link": "/../bin/b", "/bin/data": b"d"}


@pytest.mark.parametrize(
    ("executable", "programs", "bits"),
    [
        ([], [], {"/bin/a": False, "/bin/b": False}),
        (["root"], [], {"/bin/a": True, "/bin/b": True}),
        (["layer:tools"], [], {"/bin/a": True, "/bin/b": True}),
        (["layer:other"], [], {"/bin/a": False, "/bin/b": False}),
        ([], ["/bin/a"], {"/bin/a": True, "/bin/b": False}),
        ([], ["/bin/link"], {"/bin/a": False, "/bin/b": True}),
    ],
)
def test_execute_bit_is_kept_where_granted(
    state: Path, images: RootImages, executable: list[str], programs: list[str], bits: dict[str, bool]
) -> None:
    ref = _layer(state, "tools", TOOLS, "/bin/a", "/bin/b")
    with images.hold([], [ref], executable=executable, programs=programs) as held:
        held.check.wait()
        assert _bits(held.root) == {**bits, "/bin/data": False}
        assert (held.root / "bin/a").read_bytes() == b"a"
    # The layer itself is unchanged.
    assert LayerStore(state).verify(ref) == ()
    assert _bits(state / "layers" / ref.digest / "root")["/bin/a"]


@pytest.mark.parametrize("path", ["/bin/absent", "/bin", "/bin/data"])
def test_program_that_is_none_is_refused(state: Path, images: RootImages, path: str) -> None:
    ref = _layer(state, "tools", TOOLS, "/bin/a")
    with pytest.raises(errors.LayerError) as e, images.hold([], [ref], programs=[path]):
        pass
    assert (e.value.where, bool(e.value.hint)) == (path, True)
    # A program of a mount is no matter of the image.
    with images.hold([], [ref], programs=["/workspace/main"], points=[("/workspace", "dir")]):
        pass


def test_loader_of_a_program_is_no_program(state: Path, images: RootImages) -> None:
    real = Path(LOADER).resolve()
    program = Path("/usr/bin/true").read_bytes()
    files: dict[str, bytes | str] = {
        "/usr/bin/true": program,
        str(real): real.read_bytes(),
        "/lib64": "usr/lib64",
        "/lib": "usr/lib",
    }
    if str(real) != "/usr" + LOADER:
        files["/usr" + LOADER] = str(real)
    ref = _layer(state, "base", files, "/usr/bin/true", str(real))
    with images.hold([], [ref]) as held:
        assert not any(_bits(held.root).values())
    with images.hold([], [ref], programs=["/usr/bin/true"]) as held:
        held.check.wait()
        assert _bits(held.root) == {"/usr/bin/true": True, str(real): True}
        laid = (held.root / str(real)[1:]).read_bytes()
        assert laid == loader_patch.patch(real.read_bytes()) != real.read_bytes()
    with images.hold([], [ref], executable=["root"]) as held:
        assert (held.root / str(real)[1:]).read_bytes() == real.read_bytes()


def test_loader_that_cannot_be_stopped_is_refused(state: Path, images: RootImages) -> None:
    program = Path("/usr/bin/true").read_bytes()
    ref = _layer(state, "base", {"/usr/bin/true": program, LOADER: b"\x7fELF other"}, "/usr/bin/true", LOADER)
    with pytest.raises(errors.NotEnforceableError) as e, images.hold([], [ref], programs=["/usr/bin/true"]):
        pass
    assert 'allow = ["root"]' in e.value.hint
    with images.hold([], [ref], executable=["root"]) as held:
        assert _bits(held.root)["/usr/bin/true"]


def test_image_is_made_once_for_its_parts(state: Path, images: RootImages, monkeypatch: pytest.MonkeyPatch) -> None:
    one = _layer(state, "one", {"/a": b"1"}, "/a")
    two = _layer(state, "two", {"/a": b"2"}, "/a")
    keys = set()
    for order, executable, programs in (
        ([one, two], [], []),
        ([two, one], [], []),
        ([one], [], []),
        ([one, two], ["root"], []),
        ([one, two], ["layer:one"], []),
        ([one, two], [], ["/a"]),
    ):
        with images.hold([], order, executable=executable, programs=programs) as held:
            keys.add(held.key)
    assert len(keys) == 6
    # A grant of another layer's name changes nothing, and an image that is there is not read.
    shutil.rmtree(state / "layers" / one.digest)
    with images.hold([], [one, two], executable=["layer:other"]) as held:
        assert held.key in keys
        assert (held.root / "a").read_bytes() == b"2"


def test_root_grant_has_one_image_for_all_programs(state: Path, images: RootImages) -> None:
    """Each command of `covenant exec` would have its own copy of the same bytes."""
    ref = _layer(state, "tools", TOOLS, "/bin/a", "/bin/b")
    keys = set()
    for programs in (["/bin/a"], ["/bin/b"], ["/bin/link"], [], ["/bin/a"]):
        with images.hold([], [ref], executable=["root"], programs=programs) as held:
            keys.add(held.key)
            held.check.wait()
            assert _bits(held.root) == {"/bin/a": True, "/bin/b": True, "/bin/data": False}
    assert len(keys) == 1
    # A program that the image lacks is refused whether this run makes the image or finds it.
    for _ in range(2):
        for path in ("/bin/absent", "/bin", "/bin/data"):
            with pytest.raises(errors.LayerError) as e, images.hold([], [ref], executable=["root"], programs=[path]):
                pass
            assert (e.value.where, bool(e.value.hint)) == (path, True)
    with images.hold([], [ref], executable=["root"], programs=["/work/x"], points=[("/work", "dir")]):
        pass


def test_damaged_listing_is_named_with_its_fix(state: Path, images: RootImages) -> None:
    """A run of another program would be refused for the listing of a layer, and no layer has it."""
    ref = _layer(state, "tools", TOOLS, "/bin/a", "/bin/b")
    with images.hold([], [ref], executable=["root"], programs=["/bin/a"]) as held:
        folder = held.root.parent
    listing = folder / "listing"
    listing.write_bytes(listing.read_bytes()[:-5])
    with (
        pytest.raises(errors.LayerChangedError, match=r"/listing` is damaged") as e,
        images.hold([], [ref], executable=["root"], programs=["/bin/b"]),
    ):
        pass
    assert (e.value.hint, e.value.where) == (image_check.FIX, str(folder))
    # The fix.
    images.collect(unused_seconds=-100)
    with images.hold([], [ref], executable=["root"], programs=["/bin/b"]) as held:
        held.check.wait()


def test_program_without_a_mark_is_found_each_time(state: Path, images: RootImages) -> None:
    """As on a full disk: nothing can be written where the marks are."""
    ref = _layer(state, "tools", TOOLS, "/bin/a", "/bin/b")
    with images.hold([], [ref], executable=["root"], programs=["/bin/a"]) as held:
        folder = held.root.parent
    if (folder / "programs").exists():
        shutil.rmtree(folder / "programs")
    (folder / "programs").write_text("")
    for _ in range(2):
        with images.hold([], [ref], executable=["root"], programs=["/bin/b"]) as held:
            held.check.wait()
        with (
            pytest.raises(errors.LayerError),
            images.hold([], [ref], executable=["root"], programs=["/bin/absent"]),
        ):
            pass


def test_missing_layer_makes_no_image(state: Path, images: RootImages) -> None:
    ref = LayerRef("own", "0" * 64)
    with pytest.raises(errors.LayerError, match="not in the store"), images.hold([], [ref]):
        pass
    assert list((state / "rootfs/images").iterdir()) == []


def _spoil(place: Path) -> None:
    info = place.stat()
    raw = bytearray(place.read_bytes())
    raw[-1] ^= 1
    with place.open("r+b") as stream:
        stream.write(raw)
    os.utime(place, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("few", [0, 3000])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda root: _spoil(root / "a"), "/a: has other bytes"),
        (lambda root: (root / "new").touch(), "/new: is not in the listing"),
        (lambda root: (root / "d/b").unlink(), "/d/b: is missing"),
        (lambda root: (root / "a").chmod(0o755), "/a: has another execute bit"),
        (lambda root: (root / "d").chmod(0o777), "/d: has another owner or mode"),
        (lambda root: ((root / "l").unlink(), (root / "l").symlink_to("/etc")), "/l: leads elsewhere"),
        (lambda root: shutil.copy(root / "a", root / "x").rename(root / "d/b"), "/d/b: has other bytes"),
    ],
)
def test_changed_image_is_refused(
    state: Path,
    images: RootImages,
    change: Callable[[Path], object],
    told: str,
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process and by the process for large trees."""
    monkeypatch.setattr(image_check, "FEW_FILES", few)
    ref = _layer(state, "own", {"/a": b"a", "/d/b": b"b", "/l": "a"})
    with images.hold([], [ref]) as held:
        held.check.wait()
        root = held.root
    change(root)
    for _ in range(2):
        with images.hold([], [ref]) as held, pytest.raises(errors.LayerChangedError) as e:
            held.check.wait()
        assert (told in e.value.message, "gc --images" in e.value.hint) == (True, True)
    # The fix that the error names.
    images.collect(unused_seconds=-1)
    if told.startswith("/a: "):
        # The file is the layer's too.
        assert LayerStore(state).verify(ref)
        with pytest.raises(errors.LayerChangedError, match="it is not as it was packed"), images.hold([], [ref]):
            pass
        return
    with images.hold([], [ref]) as held:
        held.check.wait()


def test_new_times_alone_are_no_change(state: Path, images: RootImages) -> None:
    ref = _layer(state, "own", {"/a": b"a", "/d/b": b"b"})
    with images.hold([], [ref]) as held:
        held.check.wait()
    table = held.root.parent / "table"
    before = table.read_bytes()
    # Another image links to the same files.
    with images.hold([], [ref], points=[("/p", "dir")]) as other:
        other.check.wait()
    with images.hold([], [ref]) as held:
        held.check.wait()
        held.check.wait()
    after = table.read_bytes()
    assert before != after
    with images.hold([], [ref]) as held:
        held.check.wait()
    assert table.read_bytes() == after


def test_check_that_no_one_awaits_ends_with_the_run(
    state: Path, images: RootImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_check, "FEW_FILES", 0)
    ref = _layer(state, "own", {"/a": b"a"})
    before = set(os.listdir("/proc/self/fd"))
    with images.hold([], [ref]):
        pass
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_held_image_stays_and_keeps_its_layers(state: Path, images: RootImages) -> None:
    store = LayerStore(state)
    ref = _layer(state, "own", {"/a": b"a"})
    with images.hold([], [ref]) as held:
        assert images.of_layer(ref.digest) == [held.key]
        assert images.collect(unused_seconds=-1) == []
        with pytest.raises(errors.LayerInUseError) as e:
            store.remove(store.get(ref), images=images.of_layer(ref.digest))
        assert "gc --images" in e.value.hint
    assert images.collect(unused_seconds=3600) == []
    assert images.collect(unused_seconds=-1) == [held.key]
    assert images.of_layer(ref.digest) == []
    store.remove(store.get(ref), images=[])


def test_closure_s_copy_stays_while_an_image_links_to_it(state: Path, images: RootImages, tmp_path: Path) -> None:
    closure = _closure(tmp_path, "/bin/tool", b"x", 0o755)
    with images.hold([closure], []):
        pass
    store = skeleton.Skeletons(state / "rootfs")
    assert store.collect(unused_seconds=-1) == []
    images.collect(unused_seconds=-1)
    assert store.collect(unused_seconds=-1) == [closure.digest]


@pytest.mark.parametrize(
    ("point", "told"), [(("/a", "dir"), "is a file"), (("/a/b", "dir"), "is a file"), (("/d", "file"), "is a dir")]
)
def test_mount_point_that_cannot_be_is_refused(
    state: Path, images: RootImages, point: skeleton.MountPoint, told: str
) -> None:
    ref = _layer(state, "own", {"/a": b"a", "/d/b": b"b"})
    with pytest.raises(errors.HostError, match=told), images.hold([], [ref], points=[point]):
        pass


@pytest.mark.parametrize("point", ["/workspace", "/workspace/deep"])
def test_mount_point_behind_a_link_is_refused(state: Path, images: RootImages, point: str) -> None:
    tree: dict[str, bytes | str] = {"/etc/deep/a": b"a", "/workspace": "etc"}
    with (
        pytest.raises(errors.HostError, match="a layer has the link `/workspace` to `/etc`") as refused,
        images.hold([], [_layer(state, "own", tree)], points=[(point, "dir")]),
    ):
        pass
    assert refused.value.hint == "build the layer again without `/workspace`"
    del tree["/workspace"]
    with images.hold([], [_layer(state, "own", tree)], points=[(point, "dir")]) as held:
        assert (held.root / point[1:]).is_dir()


def test_mount_point_takes_the_place_of_a_dead_link(state: Path, images: RootImages) -> None:
    ref = _layer(state, "own", {"/etc/resolv.conf": "../run/x", "/l": "/../../nowhere"})
    points: list[skeleton.MountPoint] = [("/etc/resolv.conf", "file"), ("/l/deep", "dir")]
    with images.hold([], [ref], points=points) as held:
        assert (held.root / "etc/resolv.conf").read_bytes() == b""
        assert not (held.root / "l").is_symlink()
        assert (held.root / "l/deep").is_dir()


def test_damaged_meta_is_refused(state: Path, images: RootImages) -> None:
    ref = _layer(state, "own", {"/a": b"a"})
    with images.hold([], [ref]) as held:
        folder = held.root.parent
    (folder / "meta.json").write_bytes(b"{}")
    with pytest.raises(errors.LayerChangedError), images.hold([], [ref]):
        pass
    images.collect(unused_seconds=-1)
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(images.hold([], [ref])).check is not None


LINKS = [{"path": "/bin", "target": "usr/bin"}, {"path": "/opt/current", "target": "v1"}]


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"/bin/tool": b"own"}, "`/bin` of this host, where a layer has a dir"),
        ({"/bin": "opt/bin", "/opt/bin/tool": b"own"}, "`/bin` of this host, where a layer has another link"),
        ({"/opt/current": b"file"}, "`/opt/current` of this host, where a layer has a file"),
        ({"/opt": "data", "/data/current": b"file"}, "`/opt/current` of this host, where a layer has a file"),
    ],
)
def test_link_of_a_grant_hides_no_part_of_a_layer(
    state: Path, images: RootImages, files: dict[str, bytes | str], told: str
) -> None:
    """Otherwise `/bin/tool` of the layer would be the file of another name."""
    links = host_links.closure(LINKS)
    ref = _layer(state, "own", files)
    with pytest.raises(errors.LayerError, match=told) as refusal, images.hold([], [ref], derived=[links]):
        pass
    assert "by its own path" in refusal.value.hint
    with images.hold([], [ref]) as held:  # the fix: no link
        assert (held.root / "opt").exists() or (held.root / "bin").exists()
    # Control: a layer that has the same link, or nothing there.
    same = _layer(state, "same", {"/bin": "usr/bin", "/usr/bin/tool": b"own"})
    with images.hold([], [same], derived=[links]) as held:
        assert (held.root / "bin/tool").read_bytes() == b"own"
        assert os.readlink(held.root / "opt/current") == "v1"


@pytest.fixture
def packer() -> Path:
    """mkfs.erofs, which set-up installs."""
    found = erofs_roots.program()
    assert found is not None, "apt-get install erofs-utils"
    return found


def test_image_is_one_file_where_it_is_packed(state: Path, images: RootImages, packer: Path) -> None:
    ref = _layer(state, "own", {"/a": b"a", "/d/b": b"b", "/l": "a"}, "/a")
    points: list[skeleton.MountPoint] = [("/p", "dir"), ("/etc/f", "file")]
    digests, keys = set(), set()
    for _ in range(2):
        with images.hold([], [ref], executable=["root"], points=points, packer=packer) as held:
            keys.add(held.key)
            held.check.wait()
            assert list(held.root.iterdir()) == []
            assert held.file is not None
            digests.add(held.file.digest)
            (meta,) = images.made_of(ref.digest).values()
            size = os.fstat(held.file.fd).st_size
            assert (meta.kind, meta.digest, meta.bytes) == ("erofs", held.file.digest, size)
            assert images.collect(unused_seconds=-1) == []
        assert images.collect(unused_seconds=-1) == [*keys]
    assert len(digests) == 1, "the same parts give the same bytes"
    # A tree of the same parts is another image, and both may be there.
    with images.hold([], [ref], executable=["root"], points=points) as tree:
        assert (tree.root / "a").read_bytes() == b"a"
        assert (tree.file, images.made_of(ref.digest)[tree.key].kind) == (None, "tree")
        assert tree.key not in keys


def test_file_of_an_image_changed_while_it_is_held(state: Path, images: RootImages, packer: Path) -> None:
    """The descriptor of a run is the file that was checked, also after its name leads elsewhere."""
    ref = _layer(state, "own", {"/a": b"a"})
    with images.hold([], [ref], packer=packer) as held:
        held.check.wait()
        assert held.file is not None
        place = held.root.parent / erofs_image.NAME
        other = place.with_name("other")
        other.write_bytes(b"other")
        other.chmod(0o400)
        other.rename(place)
        assert erofs_image.digest(held.file.fd) == held.file.digest
    with images.hold([], [ref], packer=packer) as held, pytest.raises(errors.LayerChangedError) as e:
        held.check.wait()
    assert "gc --images" in e.value.hint
    images.collect(unused_seconds=-1)
    with images.hold([], [ref], packer=packer) as held:
        held.check.wait()


def test_packing_that_fails_leaves_nothing(state: Path, images: RootImages, packer: Path, tmp_path: Path) -> None:
    ref = _layer(state, "own", {"/a": b"a"})
    broken = tmp_path / "mkfs.erofs"
    broken.write_text(f'#!/bin/sh\n{packer} "$@"\necho no room left >&2\nexit 1\n')
    broken.chmod(0o755)
    with pytest.raises(errors.LayerToolError, match="no room left"), images.hold([], [ref], packer=broken):
        pass
    assert list((state / "rootfs/images").iterdir()) == []
    with images.hold([], [ref], packer=packer) as held:
        held.check.wait()


def _pipe(place: Path) -> None:
    place.unlink()
    os.mkfifo(place, 0o600)


def _link(place: Path) -> None:
    place.rename(place.with_name("x"))
    place.symlink_to("x")


@pytest.mark.usefixtures("promptly")
@pytest.mark.parametrize("swap", [_pipe, _link])
@pytest.mark.parametrize("few", [0, 3000])
@pytest.mark.parametrize("kind", ["tree", "erofs"])
@pytest.mark.parametrize("record", ["meta.json", "table"])
def test_record_that_is_no_plain_file_is_refused(
    state: Path,
    images: RootImages,
    packer: Path,
    swap: Callable[[Path], None],
    few: int,
    kind: str,
    record: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start does not wait for a writer of a FIFO."""
    monkeypatch.setattr(image_check, "FEW_FILES", few)
    ref, one = _layer(state, "own", {"/a": b"a"}), packer if kind == "erofs" else None
    with images.hold([], [ref], packer=one) as held:
        held.check.wait()
        folder = held.root.parent
    swap(folder / record)
    for _ in range(2):
        with pytest.raises(errors.LayerChangedError) as e, images.hold([], [ref], packer=one) as held:
            held.check.wait()
        assert record in e.value.message
        assert "gc --images" in e.value.hint
    images.collect(unused_seconds=-1)
    with images.hold([], [ref], packer=one) as held:
        held.check.wait()


@pytest.mark.usefixtures("promptly")
@pytest.mark.parametrize("swap", [_pipe, _link])
@pytest.mark.parametrize("few", [0, 3000])
def test_listing_that_is_no_plain_file_is_refused(
    state: Path, images: RootImages, swap: Callable[[Path], None], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing of a tree is read where a time differs."""
    monkeypatch.setattr(image_check, "FEW_FILES", few)
    ref = _layer(state, "own", {"/a": b"a"})
    with images.hold([], [ref]) as held:
        held.check.wait()
    os.utime(held.root / "a")
    swap(held.root.parent / "listing")
    with images.hold([], [ref]) as held, pytest.raises(errors.LayerChangedError, match="listing` cannot be read"):
        held.check.wait()


@pytest.mark.usefixtures("promptly")
@pytest.mark.parametrize("swap", [_pipe, _link])
def test_image_without_its_mark_is_made_again(
    state: Path, images: RootImages, packer: Path, swap: Callable[[Path], None]
) -> None:
    ref = _layer(state, "own", {"/a": b"a"})
    for one in (None, packer):
        with images.hold([], [ref], packer=one) as held:
            mark = held.root.parent / "complete"
        swap(mark)
        with images.hold([], [ref], packer=one) as held:
            held.check.wait()
            assert stat.S_ISREG(os.lstat(mark).st_mode)


def test_maker_that_was_killed_leaves_no_image(state: Path, images: RootImages, packer: Path) -> None:
    """After each step of the making: the next run makes the image, and a collection removes what was left."""
    ref = _layer(state, "own", {"/a": b"a"})
    with images.hold([], [ref], packer=packer) as held:
        key = held.key
    folder = state / "rootfs/images" / key
    for lost in ("complete", "meta.json", "table", "listing", erofs_image.NAME):
        (folder / "complete").unlink(missing_ok=True)
        (folder / lost).unlink(missing_ok=True)
        with images.hold([], [ref], packer=packer) as held:
            held.check.wait()
            assert held.key == key
    images.collect(unused_seconds=3600)
    assert [path.name for path in (state / "rootfs/images").iterdir()] == [key]
