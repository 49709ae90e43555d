"""Git's own files: the listed ones may change, with the content that their names promise."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy import data
from policy.workspace import changes, git, selection
from policy.workspace.entries import LowerEntry, LowerView, UpperEntry
from tests.unit.policy.workspace.test_changes import TERMS, compared, file, lower, was

OBJECT = "objects/aa/" + "b" * 38
PACK = "objects/pack/pack-" + "c" * 40


FILES = data.workspace_files()
LISTS = (tuple(FILES.git_shared), tuple(FILES.git_own))


def one(path: str) -> git.GitDirectories:
    return git.GitDirectories(frozenset({"bare"}), "", {path: ""}, *LISTS)


@pytest.mark.parametrize(
    "path",
    [
        *("HEAD", "index", "refs/heads/a", "refs/tags/v1", "refs/stash", "packed-refs", "logs/HEAD"),
        *("logs/refs/heads/a", "ORIG_HEAD", "COMMIT_EDITMSG", OBJECT, f"{PACK}.pack", f"{PACK}.idx"),
    ],
)
@pytest.mark.parametrize("top", [".git", "sub/.git", "bare"])
def test_listed_file_may_change(top: str, path: str) -> None:
    assert one(f"{top}/{path}").refusal(f"{top}/{path}", "file", "add") == ""


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("refs/replace/" + "a" * 40, "replacement"),
        ("refs/Replace/" + "a" * 40, "replacement"),
        ("refs/replace", "replacement"),
        ("info/grafts", "of git only"),
        ("info/attributes", "of git only"),
        ("info/exclude", "of git only"),
        ("shallow", "history"),
        ("worktrees/other/HEAD", "another worktree"),
        ("worktrees/other/index", "another worktree"),
        ("modules/m/HEAD", "a submodule"),
        ("objects/info/alternates", "trusts"),
        ("objects/info/commit-graph", "trusts"),
        ("objects/pack/multi-pack-index", "no object"),
        (f"{PACK}.rev", "no object"),
        (f"{PACK}.keep", "no object"),
        ("objects/aa/short", "no object"),
        ("sharedindex." + "a" * 40, "of git only"),
        ("rr-cache/a/postimage", "of git only"),
        ("hooks/pre-commit", "of git only"),
        ("config", "of git only"),
        ("index.lock", "of git only"),
        ("refs/heads/main.lock", "a lock"),
        ("refs/heads/a.LOCK/b", "a lock"),
        ("logs/refs/heads/main.lock", "a lock"),
        ("head", "of git only"),
        ("description", "of git only"),
    ],
)
@pytest.mark.parametrize("top", [".git", "bare"])
def test_other_file_is_refused_by_name(top: str, path: str, reason: str) -> None:
    assert reason in one(f"{top}/{path}").refusal(f"{top}/{path}", "file", "add")
    # Control: outside of git's directory it is a file as any other.
    assert one(path).refusal(f"src/{path}", "file", "add") == ""


@pytest.mark.parametrize("path", ["HEAD", "index", "refs/heads/a", "packed-refs", OBJECT, f"{PACK}.pack"])
def test_content_that_was_not_checked_is_refused(path: str) -> None:
    unchecked = git.GitDirectories(frozenset(), "", {}, *LISTS)
    assert "not checked" in unchecked.refusal(f".git/{path}", "file", "add")


@pytest.mark.parametrize(("path", "action"), [(OBJECT, "modify"), (OBJECT, "mode"), (OBJECT, "delete")])
def test_object_that_exists_stays(path: str, action: str) -> None:
    assert "does not change" in one(f".git/{path}").refusal(f".git/{path}", "file", action)


@pytest.mark.parametrize("path", ["HEAD", "refs", "objects", "packed-refs"])
def test_removal_that_breaks_repository_is_refused(path: str) -> None:
    assert one("").refusal(f".git/{path}", "dir" if path in ("refs", "objects") else "file", "delete")
    # Control: a branch is removed.
    assert one("").refusal(".git/refs/heads/a", "file", "delete") == ""


def test_link_in_directory_of_git_is_refused() -> None:
    assert "link" in one("").refusal(".git/refs/heads", "link", "add")


def linked(path: str) -> git.GitDirectories:
    return git.GitDirectories(frozenset(), "mine", {path: ""}, *LISTS)


@pytest.mark.parametrize(
    ("path", "applied"),
    [
        ("worktrees/mine/HEAD", True),
        ("worktrees/mine/index", True),
        ("worktrees/mine/logs/HEAD", True),
        ("worktrees/mine/COMMIT_EDITMSG", True),
        ("worktrees/mine/refs/bisect/bad", True),
        ("refs/heads/a", True),
        ("logs/refs/heads/a", True),
        (OBJECT, True),
        ("packed-refs", True),
        ("HEAD", False),
        ("index", False),
        ("logs/HEAD", False),
        ("ORIG_HEAD", False),
        ("config", False),
        ("hooks/pre-commit", False),
        ("worktrees/mine/gitdir", False),
        ("worktrees/mine/commondir", False),
        ("worktrees/mine/config.worktree", False),
        ("worktrees/mine/locked", False),
        ("worktrees/mine/objects/aa/" + "b" * 38, False),
        ("worktrees/mine/refs/replace/a", False),
        ("worktrees/other/HEAD", False),
        ("worktrees/other/index", False),
        ("worktrees/mine2/HEAD", False),
        ("worktrees/MINE/HEAD", False),
    ],
)
def test_linked_worktree_changes_its_own_and_shared_files(path: str, applied: bool) -> None:
    assert (linked(f".git/{path}").refusal(f".git/{path}", "file", "add") == "") == applied


@pytest.mark.parametrize(
    ("content", "applied"),
    [
        (b"a" * 40 + b"\n", True),
        (b"a" * 64, True),
        (b"ref: refs/heads/main\n", True),
        (b"ref: refs/heads/../../x\n", False),
        (b"ref: refs/replace/" + b"a" * 40, False),
        (b"ref: /etc/passwd", False),
        (b"ref: HEAD", False),
        (b"a" * 39, False),
        (b"", False),
        (b"gitdir: /x", False),
    ],
)
def test_reference_is_digest_or_name(content: bytes, applied: bool) -> None:
    assert (git.reference_refusal(content) == "") == applied


def test_packed_references_keep_their_replacements() -> None:
    line = b"a" * 40 + b" refs/replace/" + b"b" * 40 + b"\n"
    head = b"a" * 40 + b" refs/heads/main\n"
    assert git.packed_refusal(head, b"") == ""
    assert git.packed_refusal(head + line, line) == ""
    for new, old in ((line, b""), (b"", line), (line.replace(b"a", b"c"), line), (line.upper(), b"")):
        assert "replacement" in git.packed_refusal(new, old)


@pytest.mark.parametrize(
    ("listed", "applied"),
    [
        (b"H 100644 e69d 0\ta\0H 100644 e69d 0\tsrc/b\0H 100644 e69d 0\t.gitignore\0H 100644 e69d 0\tx.git/a\0", True),
        (b"", True),
        (b"H 100644 e69d 0\t.git/hooks/post-checkout\0", False),
        (b"H 100644 e69d 0\ta\0H 100644 e69d 0\tsub/.GIT/config\0", False),
        (b"H 100644 e69d 0\t.g\xe2\x80\x8cit/config\0", False),
        (b"H 100644 e69d 0\tgit~1/config\0", False),
        (b"H 100644 e69d 0\t.git. /config\0", False),
        (b"H 100644 e69d 0\t.git::$INDEX_ALLOCATION/config\0", False),
        (b"H 100644 e69d 0\t../x\0", False),
        (b"H 100644 e69d 0\t/etc/passwd\0", False),
        (b"H 100644 e69d 0\ta//b\0", False),
    ],
)
def test_index_with_path_of_git_is_refused(listed: bytes, applied: bool) -> None:
    assert (git.index_refusal(listed) == "") == applied


def test_index_hides_no_more_changes_than_before() -> None:
    """Control: those that the host's index hides, and a file that is none of them."""
    for raw in (b"h 0 0 0\ta\0", b"S 0 0 0\ta\0", b"s 0 0 0\ta\0", b"H 0 0 0\tb\0S 0 0 0\ta\0"):
        assert git.index_refusal(raw) == ("protected: it hides changes of `a` (assume-unchanged or skip-worktree)")
        assert git.index_refusal(raw, raw) == ""
        assert "`a`" in git.index_refusal(raw, b"S 0 0 0\tb\0")
    assert git.index_refusal(b"H 0 0 0\ta\0M 0 0 0\tb\0", b"S 0 0 0\ta\0") == ""


@pytest.mark.parametrize(
    ("raw", "monitored"),
    [
        (b"DIRC" + bytes(40) + b"FSMN\0\0\0\x30\0\0\0\2token", True),
        (b"FSMN\n\n\n\n\0\0\0\1", True),
        (b"FSMN\0\0\0\x30\0\0\0\3", False),
        (b"a/FSMN.txt\0\0\0\0\0\0", False),
        (b"", False),
    ],
)
def test_index_of_monitor_is_found(raw: bytes, monitored: bool) -> None:
    assert (git.MONITORED.search(raw) is not None) == monitored


def test_packed_references_keep_held_branches() -> None:
    one, other = (b"a" * 40 + b" refs/heads/x\n"), (b"b" * 40 + b" refs/heads/x\n")
    more = b"# pack-refs with: peeled\n" + one + b"^" + b"c" * 40 + b"\n" + b"d" * 40 + b" refs/heads/y\n"
    assert git.packed_refusal(more, one, ["refs/heads/x"]) == ""
    assert git.packed_refusal(other, one) == ""
    for new, old in ((other, one), (b"", one), (one, b"")):
        assert "it moves `refs/heads/x`" in git.packed_refusal(new, old, ["refs/heads/x"])


def test_target_of_reference() -> None:
    assert git.target(b"ref: refs/heads/a\n") == "refs/heads/a"
    assert git.target(b"a" * 40) == git.target(b"") == ""


def test_references_stay_without_packed_ones() -> None:
    """git pack-refs moves them there. Control: with them they go, and those of another repository do."""
    upper = [UpperEntry(".git/packed-refs", "file", 0o644, 9, sha256="n")]
    paths = (".git/refs/heads/a", "sub/.git/refs/heads/a")
    upper += [UpperEntry(path, "gone") for path in paths]
    entries = {path: LowerEntry(path, "file", 0o644, 41) for path in paths}
    for reason in ("", "protected: no"):
        view = LowerView(entries, {}, findings={".git/packed-refs": reason})
        found = {one.path: one.refused for one in changes.compare(upper, view, terms=TERMS, started_ns=10)}
        assert found[".git/refs/heads/a"] == ("`.git/packed-refs` is not applied" if reason else "")
        assert found["sub/.git/refs/heads/a"] == ""


def test_held_branch_is_neither_changed_nor_removed() -> None:
    """Control: another branch."""
    held, free = ".git/refs/heads/held", ".git/refs/heads/free"
    entries = {path: LowerEntry(path, "file", 0o644, 41, sha256="o") for path in (held, free)}
    view = LowerView(entries, {}, findings={held: git.held_refusal("w"), free: ""})
    for one in (UpperEntry("", "gone"), UpperEntry("", "file", 0o644, 41, sha256="n")):
        upper = [structs.replace(one, path=held), structs.replace(one, path=free)]
        found = {done.path: done.refused for done in changes.compare(upper, view, terms=TERMS, started_ns=10)}
        assert found == {free: "", held: git.held_refusal("w")}
    whole = [UpperEntry(".git/refs/heads", "gone")]
    entries = {".git/refs/heads": LowerEntry(".git/refs/heads", "dir", 0o755), **entries}
    view = LowerView(entries, {}, findings=view.findings)
    found = {done.path: done.refused for done in changes.compare(whole, view, terms=TERMS, started_ns=10)}
    assert found[held] == git.held_refusal("w")
    assert "stays" in found[".git/refs/heads"]
    assert "`w`" in git.held_refusal("w")
    assert "main worktree" in git.held_refusal("")


def test_references_go_with_their_objects() -> None:
    """A branch whose commit is not applied would break the repository."""
    upper = [file(f".git/{OBJECT}"), file(".git/refs/heads/a"), file("src"), file("other/.git/refs/heads/a")]
    names = [f".git/{OBJECT}", ".git/refs/heads/a", "other/.git/refs/heads/a"]
    view = LowerView({}, {}, findings=dict.fromkeys(names, ""))
    assert all(change.is_applicable() for change in compared(upper, view)), "control"
    view.findings[names[0]] = "protected: no"
    assert [change.path for change in compared(upper, view) if change.is_applicable()] == [
        "other/.git/refs/heads/a",
        "src",
    ]


def test_object_of_bare_repository_stays() -> None:
    """Its directory has no name that says so."""
    names: dict[str, tuple[str, ...]] = {"remote": ("HEAD", "objects", "refs", "config")}
    inside = [was(f"remote/{OBJECT}", "a"), was("remote/refs/replace/x", "a")]
    upper = [UpperEntry("remote/objects", "dir", 0o755), file(f"remote/{OBJECT}", "b")]
    (change,) = [one for one in compared(upper, lower(*inside, names=names)) if one.path.endswith("b")]
    assert "does not change" in change.refused
    # Control: in another directory.
    (change,) = [one for one in compared(upper, lower(*inside)) if one.path.endswith("b")]
    assert change.is_applicable()


def test_objects_of_same_repository_go_with_reference() -> None:
    new = [f".git/{OBJECT}", f"sub/.git/{OBJECT}", f".git/{PACK}.pack", f".git/{PACK}.idx", "src/objects/a"]
    assert git.needed([".git/refs/heads/a"], new) == {f".git/{OBJECT}", f".git/{PACK}.pack", f".git/{PACK}.idx"}
    assert git.needed(["sub/.git/index"], new) == {f"sub/.git/{OBJECT}"}
    assert git.needed(["src/a", new[0]], new) == set()


def test_reference_that_is_chosen_alone_takes_its_objects() -> None:
    upper = [file(f".git/{OBJECT}"), UpperEntry(".git/objects/aa", "dir", 0o755), file(".git/refs/heads/a"), file("b")]
    view = LowerView({}, {}, findings={f".git/{OBJECT}": "", ".git/refs/heads/a": ""})
    found = compared(upper, view)
    chosen = [one.path for one in selection.chosen(found, [".git/refs/heads/a"])]
    assert chosen == [".git/objects/aa", f".git/{OBJECT}", ".git/refs/heads/a"]
    assert [one.path for one in selection.chosen(found, ["b"])] == ["b"], "control"


def test_part_that_is_apart_is_refused_by_name() -> None:
    terms = structs.replace(TERMS, apart={"sub": "checkout", "disk": "mount"})
    view = lower(was("sub/a"), was("sub", kind="dir"), was("disk", kind="dir"))
    upper = [file("sub/a", "z"), file("sub/deep/b"), UpperEntry("disk", "gone"), file("subway"), file("disk2/a")]
    found = {one.path: one for one in changes.compare(upper, view, terms=terms, started_ns=10)}
    assert {path: one.refused.partition(" (")[0] for path, one in found.items()} == {
        "sub/a": "it is of another checkout of git",
        "sub/deep/b": "it is of another checkout of git",
        "disk": "it is of another file system on the host",
        "subway": "",
        "disk2/a": "",
    }
