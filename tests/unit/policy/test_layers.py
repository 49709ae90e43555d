"""Names, listings and digests of layers, and what a later layer replaces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from policy import errors, layers
from policy.layers import LayerEntry

HEX = hashlib.sha256(b"x").hexdigest()


def _file(path: str, text: str = "x", *, executable: bool = False) -> LayerEntry:
    raw = text.encode()
    return LayerEntry(path, "file", executable, len(raw), hashlib.sha256(raw).hexdigest())


def _dir(path: str) -> LayerEntry:
    return LayerEntry(path, "dir")


def _link(path: str, target: str) -> LayerEntry:
    return LayerEntry(path, "link", target=target)


def _union(*trees: list[LayerEntry]) -> dict[str, tuple[str, int]]:
    union = layers.Union()
    for tree in trees:
        layers.check(tree)
        union.lay(tree)
    return {p.path: (p.entry.path, p.source) for p in union.entries()}


def test_reference_is_read_as_it_is_written() -> None:
    ref = layers.parse_ref(f"debian-minimal@sha256:{HEX}")
    assert (ref.name, ref.digest, str(ref)) == ("debian-minimal", HEX, f"debian-minimal@sha256:{HEX}")


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", f"@sha256:{HEX}", f"A@sha256:{HEX}", f"a@sha256:{HEX[:63]}", f"a@sha256:{HEX.upper()}"),
        *(f"a@md5:{HEX}", f"a/b@sha256:{HEX}", f"{'a' * 65}@sha256:{HEX}", f"a\n@sha256:{HEX}", f"a@sha256:{HEX}\n"),
        f".a@sha256:{HEX}",
    ],
)
def test_malformed_reference_is_refused(text: str) -> None:
    with pytest.raises(errors.LayerError) as e:
        layers.parse_ref(text)
    assert e.value.hint


def test_digest_is_that_of_the_listing() -> None:
    entries = [_file("/a/b", executable=True), _dir("/a"), _link("/l", "/../etc")]
    raw = layers.canonical(entries)
    assert layers.digest_of(reversed(entries)) == hashlib.sha256(raw).hexdigest()
    assert layers.parsed(raw) == tuple(sorted(entries))


@pytest.mark.parametrize(
    "path", ["", "/", "a", "//a", "/a/", "/a//b", "/.", "/a/..", "/../a", "/a\0b", "/" + "n" * 256, "/a\udc80"]
)
def test_refused_path_is_named(path: str) -> None:
    with pytest.raises(errors.LayerError):
        layers.check([LayerEntry(path, "dir")])


def test_path_that_is_too_long_is_refused() -> None:
    layers.check_path("/" + "/".join(["n" * 255] * 15))
    with pytest.raises(errors.LayerError, match="too long"):
        layers.check_path("/" + "/".join(["n" * 255] * 16))


@pytest.mark.parametrize(
    "entries",
    [
        [_dir("/a"), _dir("/a")],
        [_file("/a/b")],
        [_file("/a"), _file("/a/b")],
        [_link("/a", "b"), _file("/a/b")],
        [_link("/a", "")],
        [_link("/a", "b\0c")],
        [_link("/a", "x" * 4096)],
        [LayerEntry("/a", "file", sha256="x")],
        [LayerEntry("/a", "file", size=-1, sha256=HEX)],
        [LayerEntry("/a", "file", sha256=HEX, target="b")],
        [LayerEntry("/a", "dir", executable=True)],
        [LayerEntry("/a", "link", sha256=HEX, target="b")],
    ],
)
def test_wrong_listing_is_refused(entries: list[LayerEntry]) -> None:
    with pytest.raises(errors.LayerError):
        layers.check(entries)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"x\0",
        lambda raw: raw.replace(b"layer 1", b"layer 2"),
        lambda raw: raw.replace(b"file", b"fifo"),
        lambda raw: raw.replace(b"\0-\0", b"\0?\0"),
        lambda raw: raw.replace(b"\x001\0", b"\x0001\0"),
        lambda raw: raw.replace(b"/a\0", b"/\xff\0"),
        lambda raw: b"",
    ],
)
def test_damaged_listing_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    raw = layers.canonical([_file("/a"), _dir("/b")])
    layers.parsed(raw)
    with pytest.raises(errors.LayerError):
        layers.parsed(spoil(raw))


def test_later_file_replaces_earlier_one() -> None:
    assert _union([_dir("/a"), _file("/a/b"), _file("/a/c")], [_dir("/a"), _file("/a/b", "y")]) == {
        "/a": ("/a", 0),
        "/a/b": ("/a/b", 1),
        "/a/c": ("/a/c", 0),
    }


def test_file_over_directory_removes_what_is_below() -> None:
    assert _union([_dir("/a"), _dir("/a/b"), _file("/a/b/c")], [_file("/a")]) == {"/a": ("/a", 1)}


def test_directory_over_file_replaces_it() -> None:
    assert _union([_file("/a")], [_dir("/a"), _file("/a/b")]) == {"/a": ("/a", 1), "/a/b": ("/a/b", 1)}


MERGED = [_dir("/usr"), _dir("/usr/bin"), _file("/usr/bin/sh"), _link("/bin", "usr/bin")]


@pytest.mark.parametrize("target", ["usr/bin", "/usr/bin", "../../usr/bin", "/../usr/./bin", "usr/bin/../bin"])
def test_directory_over_link_fills_its_target(target: str) -> None:
    base = [*MERGED[:3], _link("/bin", target)]
    found = _union(base, [_dir("/bin"), _file("/bin/tool")])
    assert found["/usr/bin/tool"] == ("/bin/tool", 1)
    assert found["/bin"] == ("/bin", 0)
    assert "/bin/tool" not in found


@pytest.mark.parametrize("target", ["nowhere", "/bin", "usr/bin/sh", "usr/bin/sh/x", "../../etc"])
def test_directory_over_other_link_replaces_it(target: str) -> None:
    found = _union([*MERGED[:3], _link("/bin", target)], [_dir("/bin"), _file("/bin/tool")])
    assert found["/bin/tool"] == ("/bin/tool", 1)
    assert found["/bin"] == ("/bin", 1)


def test_link_over_directory_replaces_it() -> None:
    found = _union([_dir("/bin"), _file("/bin/old")], MERGED)
    assert "/bin/old" not in found
    assert found["/bin"] == ("/bin", 1)


def test_same_file_by_two_names_is_taken_once() -> None:
    found = _union(MERGED, [_dir("/bin"), _file("/bin/t"), _dir("/usr"), _dir("/usr/bin"), _file("/usr/bin/t")])
    assert found["/usr/bin/t"] == ("/bin/t", 1)


@pytest.mark.parametrize(
    "tree",
    [
        [_dir("/bin"), _file("/bin/t", "one"), _dir("/usr"), _dir("/usr/bin"), _file("/usr/bin/t", "two")],
        [_dir("/bin"), _file("/bin/t"), _dir("/usr"), _file("/usr/bin")],
        [_dir("/bin"), _file("/bin/t"), _dir("/usr"), _dir("/usr/bin"), _dir("/usr/bin/t")],
    ],
)
def test_layer_that_meets_itself_is_refused(tree: list[LayerEntry]) -> None:
    """Through a link of a lower layer two paths of one layer become one."""
    with pytest.raises(errors.LayerError) as e:
        _union(MERGED, tree)
    assert e.value.hint


def test_directory_replaced_by_its_own_layer_is_refused() -> None:
    base = [_dir("/x"), _link("/x/up", "/")]
    with pytest.raises(errors.LayerError):
        _union(base, [_dir("/x"), _dir("/x/up"), _file("/x/up/x"), _file("/x/z")])


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/bin/sh", "/usr/bin/sh"),
        ("/usr/bin/../bin/./sh", "/usr/bin/sh"),
        ("/../bin/sh", "/usr/bin/sh"),
        ("/bin", "/usr/bin"),
        ("/", None),
        ("/usr/bin/sh/..", None),
        ("/usr/bin/no", None),
    ],
)
def test_path_is_resolved_within_the_union(path: str, place: str | None) -> None:
    union = layers.Union()
    union.lay(MERGED)
    found = union.resolve(path)
    assert (found.path if found else None) == place


def test_links_in_a_circle_lead_nowhere() -> None:
    union = layers.Union()
    union.lay([_link("/a", "b"), _link("/b", "a/x")])
    assert union.resolve("/a") is None
