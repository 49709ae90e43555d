"""Each thing that a path could be written as beside its one spelling is refused on parsing, by its own reason."""

from __future__ import annotations

import pytest

from policy import errors
from policy.manifest import parse
from tests.fuzz import drive

HEAD = '[agent]\nid = "a"\nname = "a"\nversion = "1"\nruntime = "python3"\nentry = "main.py"\n'
REFUSED = [
    (r"/srv/\u0000", "hidden character U+0000"),
    (r"/srv/x\u0000/y", "hidden character U+0000"),
    (r"/srv/a\u2044b", "looks like `/`"),
    (r"/srv/a\u2215b", "looks like `/`"),
    (r"/srv/\uff0e\uff0e/x", "looks like `.`"),
    (r"/srv/\u2025/x", "looks like `..`"),
    (r"/srv/\u202ex", "hidden character U+202E"),
    (r"/srv/x\u200b", "hidden character"),
    (r"/srv/x\ufe0f", "shows nothing"),
    (r"/srv/x\u3164", "shows nothing"),
    (r"/srv/e\u0301", "not in Unicode form NFC"),
    (r"/srv/x\u00a0y", "U+00A0"),
    (r"/srv/x\u2003y", "U+2003"),
    ("/srv//x", "not normalised"),
    ("/srv/./x", "not normalised"),
    ("/srv/../x", "not normalised"),
    ("/srv/..", "not normalised"),
    ("/srv/x/", "not normalised"),
    ("//srv", "not normalised"),
    ("/", "the whole root"),
    ("//", "the whole root"),
    ("srv", "not absolute"),
    ("./srv", "not absolute"),
    ("", "is empty"),
    ("~/x", "not absolute"),
    ("$HOME/x", "not absolute"),
    (r"/srv\\x", "a backslash"),
    ("/srv/*", "a wildcard"),
    ("/srv/a?", "a wildcard"),
    ("/srv/{a}", "a wildcard"),
    (r"/srv/\u2026/x", "looks like `...`"),
    (r"/srv/d\u0578cs", "d\u0578cs"),
    (r"/srv/\u13a0cat", "\u13a0cat"),
    (r"/srv/d\u043ecs", "d\u043ecs"),
    (r"/srv/\u03bfpt", "\u03bfpt"),
    ("/srv/[ab]", "a wildcard"),
    ("/srv/ x", "outer spaces"),
    ("/srv/" + "x" * 256, "too long"),
]
ACCEPTED = [
    "/srv",
    "/a",
    "/x/y/z",
    r"/srv/\u0430\u0431",
    r"/srv/doc-\u0430\u0431",
    "/srv/a b",
    r"/srv/\u00e9",
    "/srv/...",
    "/srv/.x",
    "/srv/x.",
    "/srv/" + "x" * 255,
]


def written(path: str, key: str) -> bytes:
    table = {
        "read": f'[permissions.filesystem]\nread = ["{path}"]\n',
        "write": f'[sandbox]\nfilesystem = "host"\n[permissions.filesystem]\nwrite = ["{path}"]\n',
        "allow": f'[permissions.executables]\nallow = ["{path}"]\n',
    }
    return f"{HEAD}{table[key]}".encode()


@pytest.mark.parametrize("key", ["read", "write", "allow"])
@pytest.mark.parametrize(("path", "message"), REFUSED)
def test_another_spelling_is_refused(path: str, message: str, key: str) -> None:
    with pytest.raises(errors.ManifestError) as caught:
        parse.parse(written(path, key))
    assert message in caught.value.message
    assert drive.ill_formed(caught.value) == ""


@pytest.mark.parametrize("path", ACCEPTED)
def test_one_spelling_is_kept_as_it_is(path: str) -> None:
    plain = path.encode().decode("unicode_escape") if "\\u" in path else path
    assert parse.parse(written(path, "read")).permissions.filesystem.read == (plain,)
