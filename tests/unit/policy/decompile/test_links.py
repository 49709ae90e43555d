"""Read the links of a root: which documents name links of what is granted, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from policy import errors
from policy.decompile import links

MOUNTED = ("/opt/a", "/srv/out", "/tmp", "/workspace")
READ = ("/opt/a", "/srv/out")
WRITTEN = ("/srv/out", "/tmp")
ENTRIES = ("/usr/bin/python3.11",)


def found(*pairs: tuple[Any, Any]) -> dict[str, str]:
    value = [{"path": path, "target": target} for path, target in pairs]
    return links.read(value, mounted=MOUNTED, read=READ, written=WRITTEN, entries=ENTRIES)


def test_links_are_read_with_their_texts() -> None:
    pairs = (("/opt/b", "a"), ("/opt/c", "../opt/b"), ("/usr/bin/python", "python3.11"), ("/x", "/absent"))
    assert found(*pairs) == dict(pairs)
    # A link in a granted directory, and one that leads to a place for writing.
    assert found(("/opt/a/b", "c"), ("/z", "/srv/out")) == {"/opt/a/b": "c", "/z": "/srv/out"}


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ((), "there is none"),
        ((("/b", "x"), ("/a", "x")), "not sorted"),
        ((("/a", "x"), ("/b", "x"), ("/b", "y")), "stands twice"),
        ((("/opt", "x"),), "`/opt/a` would be behind it"),
        ((("/opt/a", "x"),), "`/opt/a` would be behind it"),
        ((("/usr", "x"),), "`/usr/bin/python3.11` would be behind it"),
        ((("/tmp/a", "x"),), "in the mount at `/tmp`"),
        ((("/workspace/a/b", "x"),), "in the mount at `/workspace`"),
        ((("/a", "/b"), ("/b", "/a")), "too many links"),
        ((("/a", "/a"),), "too many links"),
        ((("/a", "/workspace"),), "leads into the mount at `/workspace`"),
        ((("/a", "b"), ("/b", "workspace/x")), "leads into the mount at `/workspace`"),
        ((("a", "x"),), "not absolute and normalised"),
        ((("/a/../b", "x"),), "not absolute and normalised"),
        ((("/a/", "x"),), "not absolute and normalised"),
        ((("/a\ud800", "x"),), "not absolute and normalised"),
        ((("/a", ""),), "no text of a link"),
        ((("/a", "x\0y"),), "no text of a link"),
        ((("/a", "\ud800"),), "no text of a link"),
    ],
)
def test_link_of_another_form_is_refused(pairs: tuple[tuple[str, str], ...], says: str) -> None:
    with pytest.raises(errors.ArtefactError) as caught:
        found(*pairs)
    assert says in str(caught.value)
    assert "mounts.json:root/links" in str(caught.value)


@pytest.mark.parametrize(
    "item",
    [{"path": "/a"}, {"target": "x"}, {"path": "/a", "target": "x", "more": 1}, {"path": 1, "target": "x"}, "/a", None],
)
def test_link_has_two_texts_and_nothing_else(item: Any) -> None:
    with pytest.raises(errors.ArtefactError):
        links.read([item], mounted=MOUNTED, read=READ, written=WRITTEN, entries=ENTRIES)
