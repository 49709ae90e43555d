"""Which changes a path names, their digest, and the questions of an apply."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.workspace import selection
from policy.workspace.changes import Change


def one(path: str, action: Any = "add", kind: Any = "file", **more: Any) -> Change:
    return Change(path, action, kind, **more)


FOUND = [
    one("a.txt"),
    one("d", kind="dir"),
    one("d/e", kind="dir"),
    one("d/e/f"),
    one("gone", "delete", "dir"),
    one("gone/x", "delete"),
    one("kind", "delete"),
    one("kind", kind="dir"),
    one("kind/inside"),
    one("masked", refused="masked"),
    one("raced", "modify", conflict="changed"),
]


def paths(changes: list[Change]) -> list[str]:
    return [one.path for one in changes]


def test_path_takes_what_is_below_and_exact_does_not() -> None:
    assert paths(selection.asked(FOUND, ["d"])) == ["d", "d/e", "d/e/f"]
    assert paths(selection.asked(FOUND, ["d"], exact=True)) == ["d"]
    assert paths(selection.asked(FOUND, [])) == paths(FOUND)
    assert selection.asked(FOUND, [], exact=True) == []
    assert paths(selection.asked(FOUND, ["a"])) == []


def test_chosen_file_brings_the_new_directories_above_it() -> None:
    assert paths(selection.chosen(FOUND, ["d/e/f"], exact=True)) == ["d", "d/e", "d/e/f"]
    assert paths(selection.chosen(FOUND, ["kind/inside"])) == ["kind", "kind", "kind/inside"]
    assert not {"masked", "raced"} & set(paths(selection.chosen(FOUND)))


@pytest.mark.parametrize(
    "change",
    [one("a"), one("b", mode=1), one("b", sha256="x"), one("b", target="x"), one("b", "delete"), one("b", kind="dir")],
)
def test_digest_tells_each_part_of_a_change(change: Change) -> None:
    assert selection.digest([change]) != selection.digest([one("b")])
    assert selection.digest([one("b", size=3)]) == selection.digest([one("b")]), "the digest has the content already"


def test_questions_are_of_what_goes_together() -> None:
    found = [paths(list(question.changes)) for question in selection.questions(FOUND)]
    assert found == [["a.txt"], ["d/e/f"], ["gone", "gone/x"], ["kind", "kind", "kind/inside"]]
    assert [paths(list(q.changes)) for q in selection.questions([one("empty", kind="dir")])] == [["empty"]]


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)


@st.composite
def trees(draw: st.DrawFn) -> list[Change]:
    """Changes as a comparison gives them: what a removed directory held is removed, what a new file is in is new."""
    found: dict[tuple[str, bool], Change] = {}
    kinds = draw(st.dictionaries(NAMES, st.sampled_from(["add", "delete", "modify", "mode"]), max_size=8))
    for path, drawn in sorted(kinds.items()):
        action = drawn
        above = [path.rsplit("/", n)[0] for n in range(path.count("/"), 0, -1)]
        if any(kinds.get(up, "mode") != "mode" for up in above):
            action = kinds[next(up for up in above if kinds.get(up, "mode") != "mode")]
            action = "add" if action == "modify" else action
        for up in above:
            if action in ("add", "delete") and kinds.get(up) not in ("modify", "mode", None):
                found[up, action != "delete"] = one(up, action, "dir")
        has_more = any(other.startswith(f"{path}/") for other in kinds)
        found[path, action != "delete"] = one(path, action, "dir" if has_more or action == "mode" else "file")
    return [found[key] for key in sorted(found, key=lambda key: (key[0].split("/"), key[1]))]


@given(trees(), st.randoms())
def test_any_answers_apply_each_change_once_and_leave_no_half(found: list[Change], chance: Any) -> None:
    questions = selection.questions(found)
    asked = [(change.path, change.action) for question in questions for change in question.changes]
    assert len(asked) == len(set(asked))
    yes = [question for question in questions if chance.random() < 0.5]
    wanted = list(dict.fromkeys(change.path for question in yes for change in question.changes))
    chosen = selection.chosen(found, wanted, exact=True) if wanted else []
    taken = {(change.path, change.action) for change in chosen}
    for question in questions:
        inside = {(change.path, change.action) for change in question.changes}
        assert inside <= taken or not inside & taken or question not in yes
    for change in chosen:
        if change.action == "delete" and change.kind == "dir":
            below = {(o.path, o.action) for o in found if o.action == "delete" and o.path.startswith(f"{change.path}/")}
            assert below <= taken, "a directory is removed with all that was removed in it"
    everything = list(dict.fromkeys(path for path, _ in asked))
    all_of_it = selection.chosen(found, everything, exact=True) if everything else []
    assert selection.digest(all_of_it) == selection.digest(selection.chosen(found))
