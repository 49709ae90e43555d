"""Which changes of a workspace are refused or in conflict, at the edges of each reason."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy import data
from policy.workspace import changes, globs
from policy.workspace.changes import Change, Terms
from policy.workspace.entries import LowerEntry, LowerView, UpperEntry

FILES = data.workspace_files()
TERMS = Terms(tuple(FILES.mask), tuple(FILES.protect), tuple(FILES.git_shared), tuple(FILES.git_own))
STARTED = 1_000


def view(*entries: LowerEntry, **names: tuple[str, ...]) -> LowerView:
    """A directory with these entries and, by directory, these names."""
    return LowerView({one.path: one for one in entries}, dict(names))


def compared(*upper: UpperEntry, lower: LowerView | None = None) -> dict[tuple[str, str], Change]:
    """The changes by action and path."""
    found = changes.compare(upper, lower or view(), terms=TERMS, started_ns=STARTED)
    return {(one.action, one.path): one for one in found}


def new(path: str, sha256: str = "a", mode: int = 0o644) -> UpperEntry:
    return UpperEntry(path, "file", mode, 1, sha256=sha256)


def old(path: str, sha256: str = "a", mode: int = 0o644, names: int = 1) -> LowerEntry:
    return LowerEntry(path, "file", mode, 1, names, sha256=sha256)


def test_names_of_one_directory_are_twins() -> None:
    found = compared(new("a/b/File"), new("a/b/file"), new("a/FILE"), new("file"), new("b/file"))
    refused = {path for (_, path), one in found.items() if one.refused}
    assert refused == {"a/b/File", "a/b/file"}
    assert "`a/b" not in found["add", "a/b/File"].refused
    assert "`file`" in found["add", "a/b/File"].refused


def test_new_name_in_case_of_removed_is_applied() -> None:
    lower = view(old("d/README"), d=("README", "other"))
    found = compared(UpperEntry("d/README", "gone"), new("d/readme"), lower=lower)
    assert all(one.is_applicable() for one in found.values())
    # Control: the name is still there.
    assert "`README`" in compared(new("d/readme"), lower=lower)["add", "d/readme"].refused


def test_twin_hinders_no_change_of_an_old_name() -> None:
    lower = view(old("a"), **{"": ("a", "A")})
    assert compared(new("a", "b"), lower=lower)["modify", "a"].is_applicable()


def test_changes_are_ordered_by_components() -> None:
    found = compared(UpperEntry("d", "dir", 0o755), new("d/a"), new("d-x"), new("d0"))
    assert [path for _, path in found] == ["d", "d/a", "d-x", "d0"]


def test_removal_takes_all_below_none_beside() -> None:
    paths = ("d", "d/a", "d/z", "d-x", "d.y", "d0", "e")
    lower = view(*(LowerEntry(path, "dir" if path == "d" else "file", 0o755) for path in paths))
    assert [path for _, path in compared(UpperEntry("d", "gone"), lower=lower)] == ["d", "d/a", "d/z"]


def test_removed_git_directory_is_protected() -> None:
    lower = view(LowerEntry("sub/.git", "dir", 0o755), LowerEntry("sub/.gitx", "dir", 0o755))
    found = compared(UpperEntry("sub/.git", "gone"), UpperEntry("sub/.gitx", "gone"), lower=lower)
    assert "another repository" in found["delete", "sub/.git"].refused
    assert found["delete", "sub/.gitx"].is_applicable()


def test_new_git_directory_is_no_link_elsewhere() -> None:
    assert compared(UpperEntry("sub/.git", "dir", 0o755))["add", "sub/.git"].is_applicable()
    assert "another repository" in compared(new("sub/.git"))["add", "sub/.git"].refused


def test_what_cannot_be_made_can_be_removed() -> None:
    """A removal brings nothing in: the name of an apply, a link that leads out and a setuid file may go."""
    lower = view(
        old("d/.covenant-1-0"),
        LowerEntry("l", "link", target="/etc/passwd"),
        LowerEntry("s", "file", 0o4755, 1, sha256="a"),
        LowerEntry("u", "file", 0o644, 1),
    )
    found = compared(*(UpperEntry(path, "gone") for path in lower.entries), lower=lower)
    assert len(found) == 4
    assert all(one.is_applicable() for one in found.values())
    made = compared(
        new("d/.covenant-1-0"), UpperEntry("l", "link", target="/etc/passwd"), new("s", mode=0o4755), new("u", "")
    )
    assert not any(one.is_applicable() for one in made.values())


@pytest.mark.parametrize(
    ("entry", "applied"),
    [
        (UpperEntry("d", "dir", 0o1777), True),
        (UpperEntry("d", "dir", 0o2777), False),
        (UpperEntry("d", "dir", 0o4777), False),
        (new("f", mode=0o777), True),
        (new("f", mode=0o1644), False),
        (new("f", mode=0o2644), False),
        (new("f", mode=0o4644), False),
    ],
)
def test_special_bits_are_refused(entry: UpperEntry, applied: bool) -> None:
    (found,) = compared(entry).values()
    assert found.is_applicable() == applied
    assert applied or "setuid" in found.refused


def test_mode_alone_is_a_change() -> None:
    lower = view(old("f"), LowerEntry("d", "dir", 0o755), old("s", mode=0o4755))
    same = (new("f"), UpperEntry("d", "dir", 0o755))
    assert compared(*same, lower=lower) == {}
    found = compared(new("f", mode=0o600), UpperEntry("d", "dir", 0o700), new("s", mode=0o755), lower=lower)
    assert list(found) == [("mode", "d"), ("mode", "f"), ("mode", "s")]
    assert all(one.is_applicable() for one in found.values())
    assert "setuid" in compared(new("f", mode=0o4644), lower=lower)["mode", "f"].refused


def test_size_or_digest_alone_is_a_change() -> None:
    lower = view(old("a"), old("b"), old("c"))
    longer = UpperEntry("a", "file", 0o644, 2, sha256="a")
    assert list(compared(longer, new("b", "z"), new("c"), lower=lower)) == [("modify", "a"), ("modify", "b")]


def test_file_with_another_name_is_not_changed() -> None:
    lower = view(old("one"), old("two", names=2), LowerEntry("d", "dir", 0o755, names=3))
    upper = (new("one", "b"), new("two", "b"), UpperEntry("d", "dir", 0o700))
    found = compared(*upper, lower=lower)
    assert [one.is_applicable() for one in found.values()] == [True, True, False]
    assert "another name" in found["modify", "two"].refused
    removed = compared(UpperEntry("two", "gone"), UpperEntry("d", "gone"), lower=lower)
    assert [one.is_applicable() for one in removed.values()] == [True, False]


def test_link_that_stays_the_same_is_no_change() -> None:
    lower = view(LowerEntry("l", "link", 0o777, target="a"))
    assert compared(UpperEntry("l", "link", 0o777, target="a"), lower=lower) == {}
    found = compared(UpperEntry("l", "link", 0o777, target="b"), lower=lower)
    assert [one.target for one in found.values()] == ["b"]


@pytest.mark.parametrize(
    ("path", "target", "out"),
    [
        ("l", "..", True),
        ("l", "a/..", True),
        ("d/l", "..", False),
        ("d/l", "../..", True),
        ("d/l", ".././..", True),
        ("d/l", "..//..", True),
        ("d/e/l", "../../a", False),
        ("d/e/l", "../../../a", True),
        ("d/l", "..a/b", False),
        ("d/l", "/a", True),
        ("d/l", "", False),
    ],
)
def test_link_leads_out(path: str, target: str, out: bool) -> None:
    (found,) = compared(UpperEntry(path, "link", 0o777, target=target)).values()
    assert (found.refused == "it leads out of the directory") == out
    assert found.is_applicable() != out


@pytest.mark.parametrize("ch", ["\x00", "\x7f", "\u200d", "\ud800", "\ue000", "\u0378", "\u2028", "\u2029"])
def test_character_that_is_not_shown_is_refused(ch: str) -> None:
    assert "not shown" in compared(new(f"a{ch}"))["add", f"a{ch}"].refused
    (found,) = compared(UpperEntry("l", "link", target=f"a{ch}")).values()
    assert "not shown" in found.refused
    assert compared(new("a \u00e9\u4e2d"))["add", "a \u00e9\u4e2d"].is_applicable()


def test_changed_config_of_repository_is_refused() -> None:
    """Git reads `config` anew for each command, and the other names only say that it is a repository."""
    names = ("HEAD", "objects", "refs", "config")
    lower = structs.replace(view(*(old(f"b/{name}") for name in names), b=names), findings={"b/HEAD": ""})
    found = compared(*(new(f"b/{name}", "z") for name in ("HEAD", "config")), lower=lower)
    assert found["modify", "b/HEAD"].is_applicable()
    assert "repository" in found["modify", "b/config"].refused
    removed = compared(UpperEntry("b/config", "gone"), lower=lower)
    assert "of git only" in removed["delete", "b/config"].refused
    # Case does not save it, and other names beside it do not count.
    upper = [new(f"c/{name}") for name in ("head", "Objects", "REFS", "other")]
    assert "repository" in compared(*upper, new("c/CONFIG"))["add", "c/CONFIG"].refused
    assert "repository" not in compared(*upper, new("c/settings"))["add", "c/settings"].refused
    assert compared(*upper[1:], new("c/settings"))["add", "c/settings"].is_applicable()


def test_git_directory_is_no_bare_repository() -> None:
    upper = [new(f"m/.git/{name}") for name in ("HEAD", "objects", "refs")]
    lower = structs.replace(view(**{"m/.git": ("config",)}), findings={"m/.git/HEAD": ""})
    found = compared(*upper, lower=lower)
    assert all(one.is_applicable() for one in found.values())


def test_refused_change_keeps_its_own_reason() -> None:
    found = compared(
        *(UpperEntry("l", "other"), new("l/.env"), new("l/a")), UpperEntry("l/d", "dir", 0o755), new("l/d/b")
    )
    assert "neither" in found["add", "l"].refused
    assert "masked" in found["add", "l/.env"].refused
    assert [found["add", path].refused for path in ("l/a", "l/d", "l/d/b")] == [
        *("`l` is not applied", "`l` is not applied", "`l/d` is not applied")
    ]


def test_removal_waits_for_each_that_stays_below() -> None:
    lower = view(
        *(LowerEntry(path, "dir", 0o755) for path in ("d", "d/e", "x")),
        *(old("d/e/.env"), old("d/e/a"), old("x/a"), old("y", names=2)),
    )
    found = compared(UpperEntry("d", "gone"), UpperEntry("x", "gone"), lower=lower)
    assert found["delete", "d"].refused == found["delete", "d/e"].refused == "`d/e/.env` stays"
    assert "masked" in found["delete", "d/e/.env"].refused
    assert found["delete", "d/e/a"].is_applicable()
    assert found["delete", "x"].is_applicable()
    # A removed file that stays hinders what would replace it, and a changed one beside it goes on.
    found = compared(UpperEntry("y", "dir", 0o755), new("y/a"), new("x/a", "b"), lower=lower)
    assert not found["add", "y"].is_applicable()
    assert "`y` is not applied" in found["add", "y/a"].refused
    assert found["modify", "x/a"].is_applicable()


def test_removals_below_what_is_not_replaced_stay() -> None:
    lower = view(*(LowerEntry(path, "dir", 0o755) for path in ("d", "d/e")), old("d/e/a"), old("da"))
    found = compared(UpperEntry("d", "other"), UpperEntry("da", "gone"), lower=lower)
    assert found["delete", "d"].refused == "what replaces `d` is not applied"
    assert found["delete", "d/e"].refused == found["delete", "d/e/a"].refused == "`d` is not applied"
    assert found["delete", "da"].is_applicable()


def test_directory_renamed_by_host_is_conflict() -> None:
    """A rename of a directory changes its status time alone; new names in it change both of its times."""
    for changed, modified, moved in (
        (STARTED - 1, STARTED - 2, False),
        (STARTED, STARTED - 1, True),
        (STARTED, STARTED, False),
        (STARTED + 1, STARTED, True),
    ):
        above = LowerEntry("d", "dir", 0o755, changed_ns=changed, modified_ns=modified)
        lower = view(above, LowerEntry("d/e", "dir", 0o755), old("d/e/a"), old("a"))
        found = compared(new("d/e/a", "z"), UpperEntry("d", "dir", 0o700), new("a", "z"), lower=lower)
        assert bool(found["modify", "d/e/a"].conflict) == bool(found["mode", "d"].conflict) == moved
        assert found["modify", "a"].is_applicable()


def test_copied_file_is_judged_by_its_directory() -> None:
    copied = structs.replace(new("d/e/a"), copied=True)
    for times, conflict in (({"d/e": STARTED}, True), ({"d/e": STARTED - 1, "d": STARTED}, False), ({}, True)):
        lower = structs.replace(view(), changed_ns=times)
        assert bool(compared(copied, lower=lower)["add", "d/e/a"].conflict) == conflict
    # Control: a file that the agent made is no copy.
    lower = structs.replace(view(), changed_ns={"d/e": STARTED})
    assert compared(new("d/e/a"), lower=lower)["add", "d/e/a"].is_applicable()


def test_protected_directory_is_refused_as_link() -> None:
    terms = Terms((), ("a/b/c", "*.sh"))
    for kind, refused in (("link", True), ("dir", False), ("file", False)):
        for path in ("a", "a/b"):
            entry = UpperEntry(path, kind, 0o755, sha256="a", target="x" if kind == "link" else "")  # type: ignore[arg-type]
            (found,) = changes.compare([entry], view(), terms=terms, started_ns=STARTED)
            assert ("protected" in found.refused) == refused
    assert globs.with_directories(("a/b/c", "**/d/**", "a", "e")) == ("a/b/c", "**/d/**", "a", "e", "**/d", "a/b")
