"""How the changes of a workspace are staged, applied step by step, and shown: as a page and as a unified diff."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy.workspace import changes, globs, page, steps, unified
from policy.workspace.changes import Action, Change, Kind
from policy.workspace.entries import LowerEntry
from policy.workspace.steps import ApplyStep


def change(path: str, action: Action, kind: Kind = "file", mode: int = 0o644, **more: object) -> Change:
    return structs.replace(Change(path, action, kind, mode), **more)


def was(path: str, size: int = 1, mode: int = 0o644) -> LowerEntry:
    return LowerEntry(path, "file", mode, size, sha256="a")


NO_NEWLINE = '<span class="">\\ No newline at end of file</span>'
FOUND = [
    change("a", "delete"),
    change("a", "add", "dir", 0o700),
    change("a/n", "add"),
    change("c", "modify", mode=0o600),
    change("d", "delete", "dir", 0o755),
    change("d/e", "delete", "dir", 0o755),
    change("d/e/f", "delete"),
    change("l", "delete", "link"),
    change("l", "add", "link", 0o777, target="x"),
    change("m", "mode", "dir", 0o711),
    change("m/f", "mode", mode=0o611),
    change("n", "add", "dir", 0o755),
    change("n/p", "add", "dir", 0o500),
    change("n/p/q", "add", "link", 0o777, target="y"),
]


def test_steps_remove_then_make_then_set_modes() -> None:
    staged = steps.staging(FOUND, ".s-", ["", "m"])
    assert staged == {"a/n": ".s-0", "c": ".s-1", "l": ".s-2", "n/p/q": ".s-3"}
    assert steps.steps(FOUND, staged) == [
        ApplyStep("unlink", "l"),
        ApplyStep("unlink", "d/e/f"),
        ApplyStep("rmdir", "d/e"),
        ApplyStep("rmdir", "d"),
        ApplyStep("unlink", "a"),
        ApplyStep("mkdir", "a", 0o700),
        ApplyStep("mkdir", "n", 0o700),
        ApplyStep("mkdir", "n/p", 0o700),
        ApplyStep("rename", "a/n", 0o644, ".s-0"),
        ApplyStep("rename", "c", 0o600, ".s-1"),
        ApplyStep("rename", "l", 0o777, ".s-2"),
        ApplyStep("rename", "n/p/q", 0o777, ".s-3"),
        ApplyStep("chmod", "n/p", 0o500),
        ApplyStep("chmod", "n", 0o755),
        ApplyStep("chmod", "m/f", 0o611),
        ApplyStep("chmod", "m", 0o711),
        ApplyStep("chmod", "a", 0o700),
    ]


def test_file_is_staged_where_directory_stays() -> None:
    made = [change(path, "add") for path in ("a/b/c/d", "a/b/x", "e/f/g", "h")]
    staged = steps.staging(made, ".s-", ["", "a", "a/b"])
    assert staged == {"a/b/c/d": "a/b/.s-0", "a/b/x": "a/b/.s-1", "e/f/g": ".s-2", "h": ".s-3"}


def test_only_new_contents_are_staged() -> None:
    others = [
        *(change("a", "delete"), change("b", "mode"), change("c", "delete", "link")),
        *(change("d", "add", "dir"), change("e", "mode", "dir"), change("f", "delete", "dir")),
    ]
    assert steps.staging(others, ".s-", [""]) == {}
    # A file is removed and made anew: the removal takes no staged file.
    again = [change("l", "delete", "link"), change("l", "add")]
    assert [one.verb for one in steps.steps(again, steps.staging(again, ".s-", [""]))] == ["unlink", "rename"]


def test_renamed_file_has_content_of_removed() -> None:
    found = [
        *(change("a", "delete", sha256="1", size=5), change("b", "delete", sha256="1", size=6)),
        *(change("c", "delete", "dir"), change("l", "delete", "link"), change("u", "delete")),
        *(change("v", "add", sha256="1", size=6), change("w", "modify", sha256="1", size=5)),
        *(change("x", "add", sha256="2", size=5), change("y", "add", sha256="", size=0)),
    ]
    assert changes.renames(found) == {"v": "b"}
    twice = [change(path, "delete", sha256="1") for path in "ab"] + [change(path, "add", sha256="1") for path in "cd"]
    assert changes.renames(twice) == {"c": "a", "d": "b"}


def test_page_has_a_row_for_each_change() -> None:
    found = [
        *(change("a\tb", "add", size=9, sha256="1"), change("old", "delete", size=9, sha256="1")),
        *(change("d", "mode", "dir"), change("l", "add", "link", target="a&b"), change("k", "delete", "link")),
        *(change("c", "modify", size=3, conflict="changed"), change(".env", "modify", refused="masked")),
    ]
    shown = page.page("T & U", found, {"c": (b"x\ny", b"x\nz")})
    assert shown.startswith('<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta http-equiv=')
    assert shown.endswith("</html>\n")
    assert "<title>T &amp; U</title>" in shown
    assert "<h1>T &amp; U</h1>" in shown
    table = shown[shown.index("<table>") : shown.index("</table>") + len("</table>")]
    assert table.split("\n") == [
        "<table>",
        "<tr><th>change</th><th>path</th><th>bytes</th><th>not applied, since</th></tr>",
        '<tr><td>+ new</td><td>a\tb (was old)</td><td>9</td><td class="why"></td></tr>',
        '<tr><td>- removed</td><td>old</td><td>9</td><td class="why"></td></tr>',
        '<tr><td>m mode</td><td>d</td><td>dir</td><td class="why"></td></tr>',
        '<tr><td>+ new</td><td>l &rarr; a&amp;b</td><td>link</td><td class="why"></td></tr>',
        '<tr><td>- removed</td><td>k</td><td>link</td><td class="why"></td></tr>',
        '<tr><td>~ changed</td><td>c</td><td>3</td><td class="why">changed</td></tr>',
        '<tr><td>~ changed</td><td>.env</td><td>0</td><td class="why">masked</td></tr>',
        "</table>",
    ]


def test_page_has_the_lines_of_each_file() -> None:
    texts = {"c": (b"x\ny", b"x\nz"), "new": (b"", b"n"), "old": (b"o", b"")}
    found = [
        *(change("c", "modify", base=was("c", 3), size=3), change("d", "add", "dir")),
        *(change("new", "add", size=1), change("old", "delete", size=1, base=was("old"))),
    ]
    shown = page.page("t", found, texts)
    files = shown[shown.index("</table>") + len("</table>\n") : shown.index("</html>")]
    assert files.split("\n") == [
        "<details open><summary>~ changed c</summary><pre>",
        '<span class="">@@ -1,2 +1,2 @@</span>',
        '<span class=""> x</span>',
        '<span class="del">-y</span>',
        NO_NEWLINE,
        '<span class="add">+z</span>',
        NO_NEWLINE,
        "</pre></details>",
        "<details open><summary>+ new new</summary><pre>",
        '<span class="">@@ -0,0 +1 @@</span>',
        '<span class="add">+n</span>',
        NO_NEWLINE,
        "</pre></details>",
        "<details open><summary>- removed old</summary><pre>",
        '<span class="">@@ -1 +0,0 @@</span>',
        '<span class="del">-o</span>',
        NO_NEWLINE,
        "</pre></details>",
        "",
    ]


GIT, NEW, END = "diff --git a/a b/a", "new file mode 100644", "\\ No newline at end of file"


@pytest.mark.parametrize(
    ("one", "old", "new", "shown"),
    [
        (change("a", "add", size=1), b"", b"x", [GIT, NEW, "--- /dev/null", "+++ b/a", "@@ -0,0 +1 @@", "+x", END]),
        (
            change("a", "delete", size=2, base=was("a", 2)),
            b"x\n",
            b"ignored",
            [GIT, "deleted file mode 100644", "--- a/a", "+++ /dev/null", "@@ -1 +0,0 @@", "-x"],
        ),
        (
            change("a", "modify", size=2, base=was("a")),
            b"x",
            b"y\n",
            [GIT, "--- a/a", "+++ b/a", "@@ -1 +1 @@", "-x", END, "+y"],
        ),
        (change("a", "add"), b"", b"", [GIT, NEW]),
        (change("a", "add", size=2), b"", b"\xff\xfe", ["# binary a: 2 bytes"]),
        (change("a", "modify", size=2, base=was("a")), b"x", b"\0\0", ["# binary a: 2 bytes"]),
        (change("a", "modify", size=1, base=was("a", 2)), b"\0\0", b"x", ["# binary a: 1 bytes"]),
        (change("a", "delete", size=2, base=was("a", 2)), b"\0\0", b"", ["# binary a: 2 bytes"]),
        (change("a", "mode", mode=0o755, base=was("a")), b"", b"", [GIT, "old mode 100644", "new mode 100755"]),
        (change("d", "add", "dir", 0o750), b"", b"", ["# add dir d 750"]),
        (change("d", "delete", "dir", 0o750), b"", b"", ["# delete dir d 750"]),
        (change("o", "add", "other", refused="no"), b"", b"", ["# o: refused: no", "# add other o 644"]),
        (change("d", "mode", "dir", conflict="c"), b"", b"", ["# d: conflict: c", "# mode dir d 644"]),
        (change("d", "mode", "dir", refused="r", conflict="c"), b"", b"", ["# d: refused: r", "# mode dir d 644"]),
        (change("a", "add", refused="r"), b"", b"", ["# a: refused: r", f"# {GIT}", f"# {NEW}"]),
    ],
)
def test_unified_diff_of_each_change(one: Change, old: bytes, new: bytes, shown: list[str]) -> None:
    assert list(unified.patch(one, old, new)) == shown


@pytest.mark.parametrize(
    ("one", "old", "new", "cut"),
    [
        (change("a", "modify", size=3, base=was("a", 3)), b"xyz", b"xyz", 0),
        (change("a", "modify", size=3, base=was("a", 4)), b"xyz", b"xyz", 3),
        (change("a", "modify", size=4, base=was("a", 2)), b"xy", b"xyz", 3),
        (change("a", "modify", size=4, base=was("a", 4)), b"wxyz", b"xyz", 4),
        (change("a", "add", size=3), b"", b"xyz", 0),
        (change("a", "add", size=4), b"", b"xyz", 3),
        (change("a", "delete", size=3, base=was("a", 3)), b"xyz", b"", 0),
        (change("a", "delete", size=4, base=was("a", 4)), b"xyz", b"", 3),
    ],
)
def test_unified_diff_says_where_it_was_cut(one: Change, old: bytes, new: bytes, cut: int) -> None:
    said = [line for line in unified.lines(one, old, new) if line.startswith("#")]
    assert said == ([f"# a: only the first {cut} bytes are compared"] if cut else [])


def test_only_contents_of_files_are_compared() -> None:
    assert [unified.has_text(change("a", action)) for action in ("add", "modify", "delete", "mode")] == [
        *(True, True, True, False)
    ]
    assert not any(unified.has_text(change("a", "add", kind)) for kind in ("dir", "link", "other"))


def test_new_mode_of_changed_file_is_told() -> None:
    one = change("a", "modify", mode=0o755, size=1, base=was("a"))
    told = "# a: mode 644 becomes 755"
    assert next(unified.hunks(one, b"x", b"y")) == told
    assert told not in list(unified.hunks(structs.replace(one, mode=0o644), b"x", b"y"))
    assert list(unified.patch(one, b"x", b"x")) == [told, GIT, "old mode 100644", "new mode 100755"]


def test_last_names_are_told_by_form() -> None:
    found = globs.last_names((".env", "a/b/ID.x", "*.pem", ".env.*", "**/k/Cfg", "*.KEY"))
    assert found == globs.LastNames(frozenset({".env", "id.x", "cfg"}), (".env.",), (".key", ".pem"))
    for name, may_be in ((".env", True), (".env.a", True), ("a.pem", True), ("pem", False), ("a.env", False)):
        assert found.may_be(name) == may_be
    assert globs.last_names(()) == globs.LastNames(frozenset(), (), ())
    for pattern in ("a*b", "*a*", "a?", "*", "a/**", "\u00e9", "?"):
        assert globs.last_names((".env", pattern)) is None


@pytest.mark.parametrize(
    ("pattern", "named", "other"),
    [
        ("**", ["a", "a/b"], [""]),
        ("a/**", ["a", "a/b", "a/b/c"], ["b", "ab", "b/a"]),
        ("**/a", ["a", "b/a", "c/b/a"], ["ba", "a/b"]),
        ("a_b", ["a_b", "c/a_b"], ["a-b", "ab"]),
        ("a+(b)|c", ["a+(b)|c"], ["aab", "c"]),
        ("a/?/*", ["a/b/c", "a/x/cd"], ["a//c", "a/bb/c", "a/b/c/d"]),
        ("\u00e9.txt", ["\u00e9.txt", "\u00c9.TXT"], ["e.txt"]),
    ],
)
def test_pattern_is_matched_with_whole_path(pattern: str, named: list[str], other: list[str]) -> None:
    match = globs.matching((pattern,))
    assert [bool(match(path)) for path in (*named, *other)] == [True] * len(named) + [False] * len(other)
    assert [bool(globs.matching(("zzz", pattern))(path)) for path in named] == [True] * len(named)
