"""Links that are followed by their text lead where the kernel leads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy.symlinks import MOST_LINKS, follow


@pytest.mark.parametrize(
    ("path", "links", "place"),
    [
        ("/usr/bin/sh", {}, "/usr/bin/sh"),
        ("/bin/sh", {"/bin": "usr/bin"}, "/usr/bin/sh"),
        ("/bin/sh", {"/bin": "usr/bin", "/usr/bin/sh": "dash"}, "/usr/bin/dash"),
        ("/a/b", {"/a/b": "../c"}, "/c"),
        ("/a/b", {"/a/b": "../../../.."}, "/"),
        ("/a/x/..", {"/a/x": "/d/e"}, "/d"),
        ("/a", {"/a": "/a"}, None),
        ("/a/x", {"/a": "/b", "/b": "a"}, None),
    ],
)
def test_links_are_followed_by_component(path: str, links: dict[str, str], place: str | None) -> None:
    assert follow(path, links) == place


def test_links_end_where_those_of_the_kernel_do() -> None:
    links = {f"/{i}": f"/{i + 1}" for i in range(MOST_LINKS + 1)}
    assert follow("/1", links) == f"/{MOST_LINKS + 1}"
    assert follow("/0", links) is None


NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=4).map("/".join)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), TEXTS, max_size=4),
    st.lists(NAMES, min_size=1, max_size=4),
)
def test_links_lead_where_the_kernel_leads(links: dict[str, str], parts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        top = Path(os.path.realpath(made))
        known = {}
        for name, text in links.items():
            place = top / name
            if any(parent in known for parent in place.parents) or place.exists():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            # Absolute texts lead into the tree; a relative one may leave it, and then both leave it alike.
            os.symlink(text, place)
            known[place] = text
        found = follow(str(top.joinpath(*parts)), {str(place): text for place, text in known.items()})
        try:
            real = os.path.realpath(top.joinpath(*parts), strict=True)
        except OSError:
            return  # it leads to nothing, or in a circle
        assert found == real
