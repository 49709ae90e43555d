"""The changes of a workspace, and why one of them is not applied."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from msgspec import structs

from policy import data
from policy.workspace import changes, page, steps, unified
from policy.workspace.changes import Change, Terms
from policy.workspace.entries import LowerEntry, LowerView, UpperEntry

FILES = data.workspace_files()
TERMS = Terms(tuple(FILES.mask), tuple(FILES.protect), tuple(FILES.git_shared), tuple(FILES.git_own))
STARTED = 1_000


def lower(*entries: LowerEntry, names: dict[str, tuple[str, ...]] | None = None) -> LowerView:
    """A directory with these entries, and with these names beside them."""
    found: dict[str, set[str]] = {}
    for one in entries:
        above, _, name = one.path.rpartition("/")
        found.setdefault(above, set()).add(name)
    whole = {above: tuple(sorted(inside)) for above, inside in found.items()}
    return LowerView({one.path: one for one in entries}, {**whole, **(names or {})})


def compared(upper: list[UpperEntry], view: LowerView) -> list[Change]:
    return list(changes.compare(upper, view, terms=TERMS, started_ns=STARTED))


def rows(upper: list[UpperEntry], view: LowerView) -> list[tuple[str, str]]:
    return [(one.action, one.path) for one in compared(upper, view)]


def file(path: str, sha256: str = "a", **more: Any) -> UpperEntry:
    return UpperEntry(path, "file", more.pop("mode", 0o644), more.pop("size", 1), sha256=sha256, **more)


def was(path: str, sha256: str = "a", kind: Any = "file", **more: Any) -> LowerEntry:
    return LowerEntry(path, kind, more.pop("mode", 0o644), more.pop("size", 1), sha256=sha256, **more)


def test_each_kind_of_change() -> None:
    view = lower(was("same"), was("content"), was("mode"), was("gone"), was("l", "", "link", target="x"))
    upper = [
        *(file("same"), file("content", "b"), file("mode", mode=0o755), file("new"), UpperEntry("gone", "gone")),
        UpperEntry("l", "link", target="y"),
    ]
    assert rows(upper, view) == [
        ("modify", "content"),
        ("delete", "gone"),
        ("modify", "l"),
        ("mode", "mode"),
        ("add", "new"),
    ]
    assert all(one.is_applicable() for one in compared(upper, view))


def test_path_that_was_never_there_and_is_gone_is_no_change() -> None:
    assert rows([UpperEntry("x", "gone")], lower()) == []


def test_removed_directory_is_each_path_of_it() -> None:
    view = lower(was("d", kind="dir"), was("d/a"), was("d/e", kind="dir"), was("d/e/f"), was("da"))
    assert rows([UpperEntry("d", "gone")], view) == [("delete", p) for p in ("d", "d/a", "d/e", "d/e/f")]


def test_opaque_directory_hides_what_was_below() -> None:
    view = lower(was("d", kind="dir", mode=0o755), was("d/a"), was("d/b"))
    upper = [UpperEntry("d", "dir", 0o755, opaque=True), file("d/b", "z"), file("d/c")]
    assert sorted(rows(upper, view)) == sorted(
        [("delete", "d/a"), ("delete", "d/b"), ("modify", "d/b"), ("add", "d/c")]
    ) or (sorted(rows(upper, view)) == sorted([("delete", "d/a"), ("modify", "d/b"), ("add", "d/c")]))


def test_another_kind_is_removed_and_made() -> None:
    view = lower(was("x"), was("d", kind="dir"), was("d/a"))
    upper = [UpperEntry("x", "dir", 0o755), file("x/y"), UpperEntry("d", "link", target="ok")]
    assert rows(upper, view) == [
        ("delete", "d"),
        ("add", "d"),
        ("delete", "d/a"),
        ("delete", "x"),
        ("add", "x"),
        ("add", "x/y"),
    ]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (file(".env", "b"), "masked"),
        (file(".git/config", "b"), "protected"),
        (UpperEntry(".git", "link", target="/evil"), "protected"),
        (file("sub/.git"), "protected"),
        (file("sub/.GIT"), "protected"),
        (UpperEntry("dev", "other"), "neither"),
        (file("tool", mode=0o4755), "setuid"),
        (file("tool", mode=0o2755), "setuid"),
        (UpperEntry("d", "dir", 0o2755), "setuid"),
        (file("a\x1bb"), "not shown"),
        (file("a\u202eb"), "not shown"),
        (UpperEntry("l", "link", target="a\nb"), "not shown"),
        (UpperEntry("l", "link", target="/etc/passwd"), "leads out"),
        (UpperEntry("d/l", "link", target="../../x"), "leads out"),
        (UpperEntry("d/l", "link", target="k/../../.."), "leads out"),
        (file("d/.covenant-1-0"), "of an apply"),
        (file("readme"), "only in case"),
        (file("re\u0301sume\u0301"), "only in case"),
        (file("bare/config"), "repository"),
        (file("linked", "b"), "another name"),
    ],
)
def test_change_is_refused_by_name(entry: UpperEntry, says: str) -> None:
    view = lower(
        *(was("README"), was("r\u00e9sum\u00e9"), was("linked", names=2), was(".env"), was(".git", kind="dir")),
        names={"bare": ("HEAD", "objects", "refs")},
    )
    found = [one for one in compared([entry], view) if one.path == entry.path and one.action != "delete"]
    assert found
    assert all(says in one.refused for one in found)
    # Control: the same change under another name.
    assert compared([file("other", "b")], view)[0].is_applicable()


@pytest.mark.parametrize("target", ["a", "./a", "../a", "../a/b", ".."])
def test_link_that_stays_inside_is_applied(target: str) -> None:
    (found,) = compared([UpperEntry("d/l", "link", target=target)], lower(was("d", kind="dir")))
    assert found.is_applicable()


def test_change_that_needs_a_refused_one_is_refused() -> None:
    view = lower(was("README"), was("d", kind="dir"), was("d/.git", kind="dir"), was("d/.git/config"), was("d/a"))
    upper = [UpperEntry("readme", "dir", 0o755), file("readme/x"), UpperEntry("d", "link", target="ok"), file("ok")]
    found = {(one.action, one.path): one for one in compared(upper, view)}
    assert "not applied" in found["add", "readme/x"].refused
    assert "stays" in found["delete", "d"].refused
    assert "stays" in found["add", "d"].refused
    assert found["add", "ok"].is_applicable()


def test_path_that_host_changed_is_a_conflict() -> None:
    view = lower(was("a", changed_ns=STARTED), was("b", changed_ns=STARTED - 1), was("c", changed_ns=STARTED + 5))
    found = compared([file("a", "z"), file("b", "z"), UpperEntry("c", "gone")], view)
    assert [bool(one.conflict) for one in found] == [True, False, True]


def test_path_that_host_removed_is_a_conflict() -> None:
    upper = [file("a", copied=True), file("b")]
    view = structs.replace(lower(), changed_ns={"": STARTED})
    assert [bool(one.conflict) for one in compared(upper, view)] == [True, False]
    # Control: the host did not change the directory, so the agent renamed the file.
    view = structs.replace(lower(), changed_ns={"": STARTED - 1})
    assert [bool(one.conflict) for one in compared(upper, view)] == [False, False]
    # The directory itself is gone.
    inside = [UpperEntry("d", "dir", 0o755, copied=True), file("d/a", copied=True)]
    found = compared(inside, structs.replace(lower(), changed_ns={"": STARTED}))
    assert found[0].conflict
    assert not any(one.is_applicable() for one in found)


def test_path_in_directory_that_host_moved_is_a_conflict() -> None:
    """The agent never saw the files that came with the directory, which are older than the session."""
    upper = [UpperEntry("d", "dir", 0o755), file("d/a", "z"), file("d/new"), UpperEntry("gone", "gone")]
    for changed, modified, conflict in ((STARTED, STARTED - 5, True), (STARTED, STARTED, False)):
        times = {"changed_ns": changed, "modified_ns": modified}
        directories = [was(one, "", "dir", mode=0o755, **times) for one in ("d", "gone")]
        found = {one.path: one for one in compared(upper, lower(*directories, was("d/a"), was("gone/b")))}
        assert [bool(found[path].conflict) for path in ("d/a", "gone", "gone/b")] == [conflict] * 3
        assert found["d/new"].is_applicable()


@pytest.mark.parametrize("by", [UpperEntry("x", "other"), UpperEntry("x", "link", target="/etc")])
def test_path_stays_when_what_replaces_it_is_refused(by: UpperEntry) -> None:
    view = lower(was("x", "", "dir"), was("x/a"), was("y"))
    found = compared([by, UpperEntry("y", "gone")], view)
    assert [one.path for one in found if one.is_applicable()] == ["y"]
    # Control: by a link that is applied.
    found = compared([UpperEntry("x", "link", target="z"), UpperEntry("y", "gone")], view)
    assert all(one.is_applicable() for one in found)


def test_bare_repository_in_two_steps_is_refused() -> None:
    """One apply brings some of its names, the next one the rest: neither is a repository by itself."""
    names = ("HEAD", "config", "objects", "refs")
    made = {name: UpperEntry(f"b/{name}", "dir", 0o755) for name in ("objects", "refs")}
    made |= {name: file(f"b/{name}") for name in ("HEAD", "config")}
    for first in names:
        there = tuple(name for name in names if name != first)
        view = structs.replace(lower(was("b", "", "dir", mode=0o755), names={"b": there}), findings={"b/HEAD": ""})
        assert "repository" in compared([made[first]], view)[0].refused
        # Control: without one more of them it is none.
        assert compared([made[first]], structs.replace(view, names={"b": there[1:]}))[0].is_applicable()


@pytest.mark.parametrize("path", [".vscode", ".git/info", ".git/modules", ".github", "sub/.claude", ".config"])
def test_link_above_protected_paths_is_refused(path: str) -> None:
    """Programs of the host would find the files of another directory there."""
    view = lower(was(".git", "", "dir"), was("sub", "", "dir"))
    assert "protected" in compared([UpperEntry(path, "link", target="ok")], view)[0].refused
    # Control: a link of another name. In git's directory there is none.
    more = compared([UpperEntry(path + "-more", "link", target="ok")], view)[0]
    assert more.is_applicable() != path.startswith(".git/")


@pytest.mark.parametrize(
    "path",
    [
        *(".git/commondir", "any/commondir", ".git/rebase-merge/git-rebase-todo", ".git/remotes/origin"),
        *(".vscode/mcp.json", "a.code-workspace", ".zed/settings.json", ".githooks/pre-commit", "lefthook.yaml"),
        *(".bashrc", ".ssh/authorized_keys", ".gitconfig", ".mise.local.toml", ".windsurf/mcp.json"),
    ],
)
def test_more_files_that_start_programs_are_protected(path: str) -> None:
    assert "protected" in compared([file(path)], lower())[0].refused


def test_file_that_was_not_read_is_refused() -> None:
    view = lower(was("a", ""), was("b", ""))
    found = compared([file("a", ""), file("b", "z"), file("new", "")], view)
    assert [one.refused for one in found] == ["it is larger than a workspace can hold", "", found[0].refused]


def test_steps_can_be_done_in_their_order() -> None:
    view = lower(was("x"), was("d", kind="dir"), was("d/a"), was("m", kind="dir", mode=0o755))
    upper = [
        *(
            UpperEntry("x", "dir", 0o500),
            file("x/y"),
            UpperEntry("d", "gone"),
            file("d2/z"),
            UpperEntry("d2", "dir", 0o755),
        ),
        UpperEntry("m", "dir", 0o700),
    ]
    found = compared(upper, view)
    staged = steps.staging(found, ".s-", ["", "m"])
    assert staged == {"d2/z": ".s-0", "x/y": ".s-1"}
    done = [(one.verb, one.path) for one in steps.steps(found, staged)]
    assert done == [
        *(("unlink", "x"), ("unlink", "d/a"), ("rmdir", "d")),
        *(("mkdir", "d2"), ("mkdir", "x"), ("rename", "d2/z"), ("rename", "x/y")),
        *(("chmod", "x"), ("chmod", "m"), ("chmod", "d2")),
    ]


def test_unified_diff_of_text_and_binary() -> None:
    change = Change("a", "modify", "file", 0o644, 3, "b", base=was("a"))
    assert list(unified.lines(change, b"x\ny\n", b"x\nz\n"))[-3:] == [" x", "-y", "+z"]
    assert list(unified.lines(change, b"\0", b"z")) == ["# binary a: 3 bytes"]
    assert list(unified.lines(Change("l", "add", "link", target="t"), b"", b""))[-2] == "+t"


def test_new_file_with_content_of_removed_one_is_renamed() -> None:
    view = lower(was("a", "1"), was("b", "1"), was("c", "2"), was("d", ""))
    upper = [
        *(UpperEntry(path, "gone") for path in "abcd"),
        file("x", "1"),
        file("y", "1"),
        file("z", "1"),
        file("v", "2"),
    ]
    assert changes.renames(compared(upper, view)) == {"v": "c", "x": "a", "y": "b"}


def test_page_needs_nothing_and_shows_text_as_text() -> None:
    found = compared([file("<b>", "1", size=9), UpperEntry("l", "link", target="<i>"), file(".env", "2")], lower())
    shown = page.page("<title>", found, {"<b>": (b"", b"<script>\x1b[2J\xe2\x80\xae")})
    assert "&lt;script&gt;\\u{1b}[2J\\u{202e}" in shown
    assert not re.search(r"<(script|img|link|iframe|object)|https?:|url\(|@import| on\w+=", shown)
    assert "default-src 'none'" in shown
    assert "masked" in shown
    assert shown.count("<b>") == shown.count("<i>") == 0


def test_unified_diff_tells_what_it_does_not_show() -> None:
    change = Change("a", "modify", "file", 0o777, 5, "b", base=was("a", size=5))
    assert list(unified.hunks(change, b"xy", b"xy")) == [
        "# a: mode 644 becomes 777",
        "# a: only the first 2 bytes are compared",
    ]
    # Control: of a file that is shown whole nothing is said.
    assert list(unified.hunks(structs.replace(change, mode=0o644), b"xyxyx", b"xyxyx")) == []


def test_many_changes_are_compared_in_seconds() -> None:
    """An agent makes and removes as many as it likes: the time must not grow with the square of their number."""
    count = 20_000
    view = lower(*(was(f"r{number}", "", "dir") for number in range(count)))
    upper = [*(file(f"f{number}") for number in range(count)), *(UpperEntry(path, "gone") for path in view.entries)]
    before = time.process_time()
    found = compared(upper, view)
    made = [structs.replace(one, action="add", kind="dir") for one in found if one.action == "add"]
    assert len(steps.steps(made, {})) == 2 * count
    assert time.process_time() - before < 20
    assert len(found) == 2 * count
    assert all(one.is_applicable() for one in found)
