"""The union of trees holds together, and resolves links as the kernel does in a root directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy import errors, layers
from policy.layers import LayerEntry
from sandbox.kernel import libc

RESOLVE_IN_ROOT = 0x10
names = st.sampled_from(["a", "b", "a-b", "a.b", "é", "usr", "bin"])
paths = st.lists(names, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
steps = st.sampled_from(["a", "b", "a-b", "usr", "bin", "..", ".", ""])
targets = st.lists(steps, min_size=1, max_size=5).map("/".join).filter(bool)
absolute = targets.map(lambda target: "/" + target)
SETTINGS = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def trees(draw: st.DrawFn) -> list[LayerEntry]:
    """A listing that holds together."""
    made: dict[str, LayerEntry] = {}
    for path in draw(st.lists(paths, max_size=8)):
        parts = path.split("/")[1:]
        above = ["/" + "/".join(parts[:n]) for n in range(1, len(parts))]
        if path in made or any(place in made and made[place].kind != "dir" for place in above):
            continue
        made.update({place: LayerEntry(place, "dir") for place in above})
        kind = draw(st.sampled_from(["file", "link", "dir"]))
        if kind == "file":
            text = draw(st.sampled_from([b"", b"x", b"y"]))
            digest = hashlib.sha256(text).hexdigest()
            made[path] = LayerEntry(path, "file", draw(st.booleans()), len(text), digest)
        elif kind == "link":
            made[path] = LayerEntry(path, "link", target=draw(targets | absolute))
        else:
            made[path] = LayerEntry(path, "dir")
    return list(made.values())


@SETTINGS
@given(trees())
def test_listing_is_read_back_and_named_alone(tree: list[LayerEntry]) -> None:
    layers.check(tree)
    raw = layers.canonical(tree)
    assert layers.parsed(raw) == tuple(sorted(tree))
    assert layers.digest_of(tree) == hashlib.sha256(raw).hexdigest()


@SETTINGS
@given(trees(), trees())
def test_two_listings_have_two_digests(one: list[LayerEntry], other: list[LayerEntry]) -> None:
    assert (layers.digest_of(one) == layers.digest_of(other)) == (sorted(one) == sorted(other))


@SETTINGS
@given(st.binary(max_size=200) | trees().map(layers.canonical))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    with contextlib.suppress(errors.LayerError):
        assert layers.canonical(layers.parsed(raw)) == raw


@SETTINGS
@given(st.lists(trees(), min_size=1, max_size=4))
def test_union_can_be_made_without_following_links(given_trees: list[list[LayerEntry]]) -> None:
    union = layers.Union()
    for tree in given_trees:
        try:
            union.lay(tree)
        except errors.LayerError:
            return
    kinds = {"": "dir"}
    for placed in union.entries():
        assert kinds[placed.path.rpartition("/")[0]] == "dir"
        kinds[placed.path] = placed.entry.kind
        assert placed.entry in given_trees[placed.source]
    # Each entry of the last tree is there, by its own path or behind a link.
    for entry in given_trees[-1]:
        above = union.resolve(entry.path.rpartition("/")[0]) if entry.path.count("/") > 1 else None
        place = (above.path if above else "") + "/" + entry.path.rpartition("/")[2]
        assert kinds[place] == entry.kind or (entry.kind, kinds[place]) == ("dir", "link")


@SETTINGS
@given(trees(), trees(), st.lists(targets | absolute, min_size=1, max_size=6))
def test_union_resolves_as_the_kernel_does(low: list[LayerEntry], high: list[LayerEntry], asked: list[str]) -> None:
    union = layers.Union()
    try:
        union.lay(low)
        union.lay(high)
    except errors.LayerError:
        return
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder).resolve()
        for placed in union.entries():
            place = Path(f"{top}{placed.path}")
            if placed.entry.kind == "dir":
                place.mkdir()
            elif placed.entry.kind == "link":
                place.symlink_to(placed.entry.target)
            else:
                place.write_bytes(b"")
        root = os.open(top, os.O_PATH | os.O_DIRECTORY)
        try:
            for path in asked:
                found = union.resolve(path)
                assert _kernel(root, str(top), path) == (found.path if found else None), path
        finally:
            os.close(root)


def _kernel(root: int, top: str, path: str) -> str | None:
    try:
        fd = libc.openat2(path, os.O_PATH, dir_fd=root, resolve=RESOLVE_IN_ROOT)
    except OSError:
        return None
    try:
        return os.readlink(f"/proc/self/fd/{fd}").removeprefix(top) or None
    finally:
        os.close(fd)
