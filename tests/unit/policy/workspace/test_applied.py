"""Judge what applies of a workspace wrote as no change of the host, and each other change as one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from policy.workspace import applied, changes, steps
from policy.workspace.changes import Change, Terms
from policy.workspace.entries import AppliedPath, AppliedRecord, LowerEntry, LowerView, UpperEntry

STARTED = 1_000
LATER = STARTED + 5
FILE = AppliedPath("file", 0o644, 3, "a")
LINK = AppliedPath("link", 0o777, target="x")


def file(path: str, sha256: str = "a", **more: Any) -> LowerEntry:
    return LowerEntry(path, "file", more.pop("mode", 0o644), more.pop("size", 3), sha256=sha256, **more)


@pytest.mark.parametrize(
    ("own", "base", "same"),
    [
        (FILE, file("p"), True),
        (FILE, file("p", changed_ns=LATER, inode=7), True),
        (FILE, file("p", "b"), False),
        (FILE, file("p", ""), False),
        (FILE, file("p", size=4), False),
        (FILE, file("p", mode=0o600), False),
        (FILE, file("p", mode=0o4644), False),
        (FILE, LowerEntry("p", "link", 0o777, target="x"), False),
        (structs.replace(FILE, sha256=""), file("p", ""), False),
        (LINK, LowerEntry("p", "link", 0o777, 1, target="x"), True),
        (LINK, LowerEntry("p", "link", 0o777, 1, target="y"), False),
        (AppliedPath("dir", 0o755), LowerEntry("p", "dir", 0o755), False),
        (AppliedPath("other"), LowerEntry("p", "other"), False),
    ],
)
def test_content_and_mode_decide(own: AppliedPath, base: LowerEntry, same: bool) -> None:
    assert applied.is_own(AppliedRecord({"p": own}), "p", base) == same
    assert not applied.is_own(AppliedRecord({"q": own}), "p", base)


def test_index_is_known_by_its_entries() -> None:
    """git writes it anew when it looks at the files. Control: with other entries, or without any."""
    record = AppliedRecord({"p": structs.replace(FILE, entries="e")})
    assert applied.is_own(record, "p", file("p", "b", size=9, mode=0o664), "e")
    assert not applied.is_own(record, "p", file("p", "b", size=9), "f")
    assert not applied.is_own(record, "p", file("p", "b", size=9))
    assert not applied.is_own(AppliedRecord({"p": FILE}), "p", file("p", "b", size=9))
    view = LowerView({}, {}, indexes={"i": ("e", "f")})
    after = steps.record_after(record, [change("i", "modify")], view, STARTED)
    assert after.paths["i"].entries == "f"
    assert after.paths["p"].entries == "e"
    upper = [UpperEntry("i", "file", 0o644, 9, sha256="z")]
    for entries in ("f", "g"):
        view = LowerView({"i": file("i", "h", changed_ns=LATER)}, {"": ("i",)}, indexes={"i": (entries, "z")})
        assert compared(upper, view, after)["i"].is_applicable() == (entries == "f")


def test_names_decide_without_their_order() -> None:
    record = AppliedRecord(names={"d": applied.names_digest(["a", "b"])})
    assert applied.has_names(record, "d", ("b", "a"))
    assert not applied.has_names(record, "d", ("a",))
    assert not applied.has_names(record, "d", ("a", "b", "c"))
    assert not applied.has_names(record, "e", ("a", "b"))
    assert not applied.has_names(record, "e", ())


def change(path: str, action: Any, kind: Any = "file", **more: Any) -> Change:
    return Change(path, action, kind, more.pop("mode", 0o644), more.pop("size", 3), more.pop("sha256", "a"), **more)


def test_record_has_what_was_written() -> None:
    before = AppliedRecord({"gone": FILE, "kept": FILE, "f": LINK})
    chosen = [
        change("f", "modify", sha256="b", mode=0o4755),
        change("gone", "delete"),
        change("l", "add", "link", sha256="", target="f"),
        change("m", "mode", mode=0o600),
        change("d", "add", "dir"),
    ]
    view = LowerView({}, {"": ("f", "gone", "kept", "m")}, {"": STARTED - 1})
    after = steps.record_after(before, chosen, view, STARTED)
    assert after.paths == {
        "f": AppliedPath("file", 0o755, 3, "b"),
        "kept": FILE,
        "l": AppliedPath("link", 0o644, 3, target="f"),
        "m": AppliedPath("file", 0o600, 3, "a"),
    }
    assert after.names == {
        "": applied.names_digest(["f", "kept", "m", "l", "d"]),
        "d": applied.names_digest([]),
    }


def test_names_are_noted_where_host_changed_none() -> None:
    chosen = [change("d/new", "add"), change("e/f", "modify")]
    view = LowerView({}, {"d": ("x",), "e": ("f",)}, {"d": STARTED - 1, "e": STARTED - 1})
    whole = applied.names_digest(["x", "new"])
    assert steps.record_after(AppliedRecord(), chosen, view, STARTED).names == {"d": whole}
    newer = structs.replace(view, changed_ns={"d": STARTED})
    assert steps.record_after(AppliedRecord(), chosen, newer, STARTED).names == {}
    # An apply before changed it: as long as it has the names of then.
    had = AppliedRecord(names={"d": applied.names_digest(["x"])})
    assert steps.record_after(had, chosen, newer, STARTED).names == {"d": whole}
    other = AppliedRecord(names={"d": applied.names_digest(["x", "y"])})
    assert steps.record_after(other, chosen, newer, STARTED).names == {}


def test_path_of_another_kind_keeps_its_name() -> None:
    """A file in the place of a directory: its removal comes first."""
    chosen = [change("d/a", "delete"), change("d", "delete", "dir"), change("d", "add")]
    view = LowerView({}, {"": ("d",), "d": ("a",)}, {"": 0, "d": 0})
    found = steps.record_after(AppliedRecord({"d/a": FILE}, {"d": "x"}), chosen, view, STARTED)
    assert found.names[""] == applied.names_digest(["d"])
    assert found.paths == {"d": FILE}


def compared(upper: list[UpperEntry], view: LowerView, own: AppliedRecord) -> dict[str, Change]:
    found = changes.compare(upper, view, terms=Terms((), ()), started_ns=STARTED, own=own)
    return {one.path: one for one in found}


def test_applied_path_is_no_conflict() -> None:
    """Control: without the record, and with another content, it is one."""
    upper = [UpperEntry("p", "file", 0o644, 9, sha256="z"), UpperEntry("q", "gone")]
    view = LowerView(
        {one.path: one for one in (file("p", changed_ns=LATER), file("q", changed_ns=LATER))}, {"": ("p", "q")}
    )
    own = AppliedRecord({"p": FILE, "q": FILE})
    assert all(one.is_applicable() for one in compared(upper, view, own).values())
    assert all(one.conflict for one in compared(upper, view, AppliedRecord()).values())
    other = AppliedRecord({"p": structs.replace(FILE, sha256="b"), "q": FILE})
    assert [path for path, one in compared(upper, view, other).items() if one.conflict] == ["p"]


def test_directory_that_was_moved_is_conflict_with_record() -> None:
    """The applied file is in another directory of that name: it may have come from elsewhere."""
    upper = [UpperEntry("d", "dir", 0o755, copied=True), UpperEntry("d/p", "file", 0o644, 9, sha256="z")]
    moved = LowerEntry("d", "dir", 0o755, changed_ns=LATER, modified_ns=LATER - 1)
    view = LowerView({"d": moved, "d/p": file("d/p", changed_ns=LATER)}, {"": ("d",), "d": ("p",)})
    assert compared(upper, view, AppliedRecord({"d/p": FILE}))["d/p"].conflict


def test_renamed_copy_is_no_conflict_where_names_are_known() -> None:
    """Control: a name less in the directory is one that the host removed."""
    upper = [UpperEntry("new", "file", 0o644, 9, copied=True, sha256="z")]
    own = AppliedRecord(names={"": applied.names_digest(["a"])})
    view = LowerView({}, {"": ("a",)}, {"": LATER})
    assert compared(upper, view, own)["new"].is_applicable()
    assert compared(upper, view, AppliedRecord())["new"].conflict
    assert compared(upper, structs.replace(view, names={"": ()}), own)["new"].conflict


def test_copy_in_directory_of_agent_is_no_conflict() -> None:
    """Control: in a directory that the host had, and removed."""
    for copied in (False, True):
        upper = [
            UpperEntry("d", "dir", 0o755, copied=copied),
            UpperEntry("d/a", "file", 0o644, 9, copied=True, sha256="z"),
        ]
        found = compared(upper, LowerView({}, {"": ()}, {"": LATER}), AppliedRecord())
        assert bool(found["d/a"].conflict) == copied
