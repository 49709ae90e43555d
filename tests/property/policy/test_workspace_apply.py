"""Applying the changes of a workspace makes the directory what the agent saw.

A model of a directory stands in for the file system: each step is done as the system call would do it, or fails.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from policy.workspace import changes, steps
from policy.workspace.changes import Change, Terms
from policy.workspace.entries import AppliedRecord, LowerEntry, LowerView, UpperEntry

STARTED = 1_000
NAMES = ("a", "b", "b-c", "b0")
PATHS = tuple("/".join(parts) for one in NAMES for two in NAMES for parts in ((one,), (one, two), (one, two, "z")))


class Node(NamedTuple):
    """One path of the model; ``content`` is a file's digest or a link's target."""

    kind: str
    mode: int
    content: str = ""


Tree = dict[str, Node]
nodes = st.one_of(
    st.builds(Node, st.just("file"), st.sampled_from([0o644, 0o755]), st.sampled_from("xy")),
    st.builds(Node, st.just("dir"), st.sampled_from([0o755, 0o700]), st.just("")),
    st.builds(Node, st.just("link"), st.just(0o777), st.sampled_from("xy")),
)


def tree(wanted: Tree) -> Tree:
    """The tree of the paths whose parents are directories."""
    found: Tree = {}
    for path in sorted(wanted, key=lambda one: one.split("/")):
        above = path.rpartition("/")[0]
        if not above or (above in found and found[above].kind == "dir"):
            found[path] = wanted[path]
    return found


trees = st.dictionaries(st.sampled_from(PATHS), nodes, max_size=12).map(tree)


def is_dir(of: Tree, path: str) -> bool:
    return not path or (path in of and of[path].kind == "dir")


def upper(old: Tree, new: Tree, opaque: set[str]) -> list[UpperEntry]:
    """Return the upper layer that overlayfs has when ``old`` has become ``new``."""
    hidden = {
        path for path in old if any(above in opaque or not is_dir(new, above) for above in changes.ancestors(path))
    }
    found = [UpperEntry(path, "gone") for path in old if path not in new and path not in hidden]
    for path, one in new.items():
        mine = path in opaque and is_dir(old, path)
        if mine or path in hidden or old.get(path) != one:
            digest, target = ("", one.content) if one.kind == "link" else (one.content, "")
            size = 1 if one.kind == "file" else 0
            found.append(UpperEntry(path, one.kind, one.mode, size, opaque=mine, sha256=digest, target=target))  # type: ignore[arg-type]
    return found


def view(old: Tree) -> LowerView:
    entries = {}
    names: dict[str, tuple[str, ...]] = {}
    for path, one in old.items():
        digest, target = ("", one.content) if one.kind == "link" else (one.content, "")
        size = 1 if one.kind == "file" else 0
        entries[path] = LowerEntry(path, one.kind, one.mode, size, sha256=digest, target=target)  # type: ignore[arg-type]
        above, _, name = path.rpartition("/")
        names[above] = (*names.get(above, ()), name)
    return LowerView(entries, names)


def applied(old: Tree, found: tuple[Change, ...]) -> Tree:
    """Do each step on a copy of the tree."""
    done = dict(old)
    removed = {one.path for one in found if one.action == "delete"}
    staying = [path for path, one in old.items() if one.kind == "dir" and path not in removed]
    staged = steps.staging(found, ".s-", ["", *staying])
    by_path = {one.path: one for one in found if one.action in ("add", "modify")}
    for one in steps.steps(found, staged):
        above = one.path.rpartition("/")[0]
        assert is_dir(done, above)
        match one.verb:
            case "unlink":
                assert done.pop(one.path).kind != "dir"
            case "rmdir":
                assert done.pop(one.path).kind == "dir"
                assert not [path for path in done if path.startswith(one.path + "/")]
            case "mkdir":
                assert one.path not in done
                done[one.path] = Node("dir", one.mode)
            case "rename":
                beside = one.staged.rpartition("/")[0]
                assert not beside or beside in staying
                assert one.path not in done or done[one.path].kind != "dir"
                change = by_path[one.path]
                done[one.path] = Node(change.kind, one.mode, change.sha256 or change.target)
            case "chmod":
                done[one.path] = done[one.path]._replace(mode=one.mode)
    return done


@given(trees, trees, st.sets(st.sampled_from(PATHS), max_size=3))
def test_applied_changes_give_what_the_agent_saw(old: Tree, new: Tree, opaque: set[str]) -> None:
    opaque = {path for path in opaque if is_dir(old, path) and is_dir(new, path)}
    found = changes.compare(upper(old, new, opaque), view(old), terms=Terms((), ()), started_ns=STARTED)
    assert all(one.is_applicable() for one in found)
    assert applied(old, found) == new
    # Opaque directories are compared path by path: without them the changes are the same.
    kinds = {(one.action, one.path) for one in found}
    plain = changes.compare(upper(old, new, set()), view(old), terms=Terms((), ()), started_ns=STARTED)
    assert {(one.action, one.path) for one in plain} == kinds


@given(trees, trees, st.sets(st.sampled_from(NAMES), max_size=2))
def test_what_can_be_applied_is_applied_alone(old: Tree, new: Tree, protected: set[str]) -> None:
    """Changes beside refused ones can still be done in order, and a protected path stays as it was."""
    terms = Terms((), tuple(sorted(protected)))
    found = changes.compare(upper(old, new, set()), view(old), terms=terms, started_ns=STARTED)
    able = tuple(one for one in found if one.is_applicable())
    after = applied(old, able)
    for path in {*old, *new}:
        if path.rpartition("/")[2] in protected:
            assert after.get(path) == old.get(path)
        assert after.get(path) in (old.get(path), new.get(path))


def later(old: Tree) -> LowerView:
    """The view of a tree in which everything is newer than the session."""
    found = view(old)
    entries = {
        path: structs.replace(one, changed_ns=STARTED, modified_ns=STARTED) for path, one in found.entries.items()
    }
    dirs = ["", *(path for path, one in old.items() if one.kind == "dir")]
    return LowerView(entries, {path: found.names.get(path, ()) for path in dirs}, dict.fromkeys(dirs, STARTED))


@given(trees, trees, trees, st.sampled_from(PATHS), nodes)
def test_only_foreign_change_is_conflict_after_apply(old: Tree, mid: Tree, new: Tree, path: str, node: Node) -> None:
    """The session goes on from ``mid``, which was applied, to ``new``. Control: the host writes one path between."""
    first = changes.compare(upper(old, mid, set()), view(old), terms=Terms((), ()), started_ns=STARTED)
    known = {one.path for one in first if one.kind != "dir"}
    own = steps.record_after(AppliedRecord(), first, view(old), STARTED)
    written = {one: found for one, found in mid.items() if one in known}
    terms = Terms((), ())
    found = changes.compare(upper(old, new, set()), later(mid), terms=terms, started_ns=STARTED, own=own)
    # What was not applied is as new here as what the host changes.
    assert {one.path for one in found if one.conflict} <= {one for one in mid if one not in written}
    if path in written and node.kind != "dir" and node != mid[path]:
        foreign = changes.compare(
            upper(old, new, set()), later({**mid, path: node}), terms=terms, started_ns=STARTED, own=own
        )
        assert all(one.conflict for one in foreign if one.path == path and one.base is not None)
