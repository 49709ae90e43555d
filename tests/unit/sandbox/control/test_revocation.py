"""Check the runs that a revocation ends, by labels alone: dependent runs and all below them. No run is started."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.signing import authority, trust
from sandbox.control import revocation, tree_kill
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.cgroup import kill as cgroup_kill
from sandbox.network import disconnect
from sandbox.rundir import directory as rundir_directory
from sandbox.rundir import label as rundir_label
from sandbox.rundir import lock, marks, registry
from sandbox.storage import atomic_file
from sandbox.storage.trust_state import State
from tests import signing_kit as kit

op = kit.operator
ROOT = kit.root(op(1), op(2))
REVOKES_1 = kit.root(op(2), revoked=kit.revoked(keys=[kit.revoked_key(1)]))
REASON = "the key of `op1`, who signed, was revoked: stolen"


def _authority(run_id: str, signer: int) -> authority.Authority:
    trusted = kit.verify(kit.signed(signer), ROOT)
    return authority.Authority.of(run_id, trusted, trusted.signers)


@contextlib.contextmanager
def live(runs: Path, run_id: str, signers: Sequence[int], *ancestors: str, **more: str) -> Iterator[Path]:
    """Make a run's directory; ``signers`` are those of the whole line, from the first ancestor down to the run."""
    line = [_authority(name, who) for name, who in zip((*ancestors, run_id), signers, strict=bool(signers))]
    label = {
        "agent_id": f"agent-{run_id}",
        "parent": ancestors[-1] if ancestors else "",
        "ancestors": " ".join(ancestors),
        "depth": str(len(ancestors)),
        revocation.AUTHORITY: authority.encode(line) if line else "",
        **more,
    }
    with rundir_directory.RunDirectory(runs / run_id, label) as directory:
        yield directory.path


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the waits for shims to zero: no shim is there to end its run."""
    monkeypatch.setattr(tree_kill, "STARTING_SECONDS", 0.0)


def enforced(runs: Path, root: trust.TrustRoot = REVOKES_1) -> tuple[revocation.Enforced, list[Mapping[str, Any]]]:
    rows: list[Mapping[str, Any]] = []
    return revocation.enforce(runs, root, write=rows.append), rows


@pytest.mark.usefixtures("at_once")
def test_run_goes_with_all_below_it_and_no_other(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for run_id, signers, above in (
            ("root", (2,), ()),
            ("bad", (2, 1), ("root",)),
            ("below", (2, 1, 2), ("root", "bad")),
            ("good", (2, 2), ("root",)),
            ("other", (2,), ()),
        ):
            stack.enter_context(live(tmp_path, run_id, signers, *above))
        done, rows = enforced(tmp_path)
        assert [(one.run_id, one.because, one.reason) for one in done.ended] == [
            ("bad", "bad", REASON),
            ("below", "bad", REASON),
        ]
        assert rows == [{"version": 1, "runs": [one.row() for one in done.ended]}]
        marked = {one.run_id for one in registry.live(tmp_path) if marks.revoked_of(one.path)}
        assert marked == {"bad", "below"}
        # They are being ended already: a second call repeats it and writes no row.
        assert enforced(tmp_path) == (done, [])


@pytest.mark.usefixtures("at_once")
def test_whoever_was_adopted_still_rests_on_dead_run_that_started_it(tmp_path: Path) -> None:
    with live(tmp_path, "orphan", (1, 2), "gone"), live(tmp_path, "child", (1, 2, 2), "gone", "orphan"):
        done, _ = enforced(tmp_path)
        assert [(one.run_id, one.because) for one in done.ended] == [("orphan", "gone"), ("child", "gone")]


@pytest.mark.usefixtures("at_once")
def test_key_that_was_only_taken_out_ends_nothing_nor_does_root_that_revokes_nothing(tmp_path: Path) -> None:
    with live(tmp_path, "one", (1,)), live(tmp_path, "unsigned", ()):
        assert enforced(tmp_path, kit.root(op(2))) == (revocation.NOTHING, [])
        assert enforced(tmp_path, ROOT) == (revocation.NOTHING, [])
    assert enforced(tmp_path / "none") == (revocation.NOTHING, [])


@pytest.mark.usefixtures("at_once")
def test_self_test_holds_no_agent_and_label_that_cannot_be_judged_is_not_spared(tmp_path: Path) -> None:
    damaged = {revocation.AUTHORITY: '{"line":1}'}
    with (
        live(tmp_path, "canary", (1,), **{rundir_label.SELF_TEST: "1"}),
        live(tmp_path, "damaged", (2,), **damaged),
    ):
        done, _ = enforced(tmp_path)
        assert [one.run_id for one in done.ended] == ["damaged"]
        assert "cannot be read" in done.ended[0].reason


@pytest.mark.usefixtures("at_once")
def test_log_that_takes_no_row_and_mark_that_cannot_be_made_keep_nobody_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cgroup_kill, "stop", lambda leaves: asked.append("stop"))

    def cut(links: object) -> list[str]:
        asked.append("cut")
        return []

    monkeypatch.setattr(disconnect, "cut", cut)
    monkeypatch.setattr(cgroup_kill, "kill", lambda leaves: asked.append("kill"))

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(marks, "mark_revoked", full)
    with live(tmp_path, "one", (1,)):
        done = revocation.enforce(tmp_path, REVOKES_1, write=full)
        assert [one.run_id for one in done.ended] == ["one"]
        assert "the log: No space left on device" in done.failed
        assert "a mark: No space left on device" in done.failed
        assert asked[0] == "stop"
        assert set(asked) == {"stop", "cut", "kill"}


def test_run_of_which_gates_alone_are_up_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sandbox is about to be started, in a cgroup where no process was killed."""
    waited: list[str] = []
    monkeypatch.setattr(cgroup_kill, "stop", lambda leaves: None)
    monkeypatch.setattr(cgroup_kill, "kill", lambda leaves: None)
    monkeypatch.setattr(tree_kill, "outwait", lambda entries: waited.extend(one.run_id for one in entries))
    runs = tmp_path / "runs"
    runs.mkdir()
    with live(runs, "starting", (1,)) as starting, live(runs, "running", (1,)) as running:
        for path, inside in ((starting, "gates.pids"), (running, "pids")):
            places = {name: path / f"{path.name}-{name}" for name in ("pids", "gates.pids")}
            for name, place in places.items():
                place.mkdir()
                (place / "cgroup.procs").write_text("4\n" if name == inside else "")
            (path / "cgroups.json").write_text(json.dumps({name: str(place) for name, place in places.items()}))
        done, _ = enforced(runs)
        assert {one.run_id for one in done.ended} == {"starting", "running"}
        assert waited == ["starting"]


def _noted(path: Path, *, listed: bool) -> None:
    """Make a run with a cgroup whose process list cannot be read."""
    place = path / path.name
    place.mkdir()
    (place / "cgroup.procs").write_text("") if listed else (place / "cgroup.procs").mkdir()
    (path / "cgroups.json").write_text(json.dumps({"pids": str(place)}))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("what", ["its list", "where it lies", "its network"])
def test_one_that_cannot_be_looked_at_hears_of_and_keeps_no_other_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    killed, kill = list[str](), cgroup_kill.kill

    def kill_soon(leaves: Sequence[cgroup.Leaf]) -> None:
        killed.extend(leaf.name for leaf in leaves)
        kill(leaves, deadline_seconds=0.02)

    monkeypatch.setattr(cgroup_kill, "kill", kill_soon)
    monkeypatch.setattr(disconnect, "cut", lambda links: [])
    runs = tmp_path / "runs"
    runs.mkdir()
    with live(runs, "hidden", (1,)) as hidden, live(runs, "plain", (1,)) as plain:
        _noted(plain, listed=True)
        _noted(hidden, listed=what != "its list")
        if what == "where it lies":
            (hidden / "cgroups.json").unlink()
            (hidden / "cgroups.json").mkdir()
        if what == "its network":
            (hidden / "network.json").mkdir()
        done, _ = enforced(runs)
        assert {one.run_id for one in done.ended} == {"hidden", "plain"}
        assert "plain" in killed
        said = {
            "its list": "processes: something survives SIGKILL in the cgroups hidden (who is in cgroup",
            "where it lies": "the cgroups of run hidden: Is a directory",
            "its network": "the network of run hidden: Is a directory",
        }
        assert any(one.startswith(said[what]) for one in done.failed), done.failed


def _never(fields: object) -> None:
    pytest.fail("a row is written")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the steps of an enforcement in order; none of them reaches the kernel."""
    done: list[str] = []
    mark = marks.mark_revoked

    def noted(what: str) -> Callable[..., list[str]]:
        def note(*arguments: object) -> list[str]:
            done.append(what)
            return []

        return note

    def mark_it(path: Path, reason: str, **like: Any) -> None:
        done.append("mark")
        mark(path, reason, **like)

    monkeypatch.setattr(cgroup_kill, "stop", noted("stop"))
    monkeypatch.setattr(cgroup_kill, "kill", noted("kill"))
    monkeypatch.setattr(disconnect, "cut", noted("cut"))
    monkeypatch.setattr(marks, "mark_revoked", mark_it)
    monkeypatch.setattr(tree_kill, "outwait", lambda entries: None)
    return done


# Agents, their marks, their gates; then the search for processes made before the marks were set.
STOPPED = ["stop", "mark", "mark", "stop", "stop"]


def test_all_stand_then_they_are_marked_then_row_then_they_are_cut_and_killed(tmp_path: Path, asked: list[str]) -> None:
    with live(tmp_path, "one", (1,)), live(tmp_path, "two", (1,)):
        revocation.enforce(tmp_path, REVOKES_1, write=lambda fields: asked.append("row"))
    assert asked[:6] == [*STOPPED, "row"]
    assert sorted(asked[6:]) == ["cut", "kill"]


def test_all_stand_before_root_is_written_and_so_does_what_was_shown_meanwhile(
    tmp_path: Path, asked: list[str]
) -> None:
    rows: list[Mapping[str, Any]] = []

    def write(fields: Mapping[str, Any]) -> None:
        asked.append("row")
        rows.append(fields)

    with contextlib.ExitStack() as stack:
        stack.enter_context(live(tmp_path, "one", (1,)))
        stack.enter_context(live(tmp_path, "two", (1,)))

        def install() -> None:
            asked.append("root")
            assert atomic_file.held(tmp_path / ".ending")  # no shim takes its turn at the log
            stack.enter_context(live(tmp_path, "between", (1,)))

        done = revocation.enforce(tmp_path, REVOKES_1, write=write, install=install)
    assert asked[:11] == [*STOPPED, "root", "stop", "mark", "stop", "stop", "row"]
    assert sorted(asked[11:]) == ["cut", "kill"]
    assert [one.run_id for one in done.ended] == ["one", "two", "between"]
    assert rows == [{"version": 1, "runs": [one.row() for one in done.ended]}]
    assert (done.refused, done.failed) == (None, ())


@pytest.mark.usefixtures("asked")
def test_root_that_cannot_be_installed_ends_them_all_same(tmp_path: Path) -> None:
    def install() -> None:
        raise errors.TrustError("the disk is full")

    with live(tmp_path, "other", (2,)):
        with pytest.raises(errors.TrustError, match="the disk is full"):
            revocation.enforce(tmp_path, REVOKES_1, write=_never, install=install)
        with pytest.raises(errors.TrustError, match="the disk is full"):
            revocation.enforce(tmp_path / "none", REVOKES_1, write=_never, install=install)
        rows: list[Mapping[str, Any]] = []
        with live(tmp_path, "one", (1,)) as path:
            done = revocation.enforce(tmp_path, REVOKES_1, write=rows.append, install=install)
            assert marks.revoked_of(path) == REASON
    assert [one.run_id for one in done.ended] == ["one"]
    assert isinstance(done.refused, errors.TrustError)
    assert rows == [{"version": 1, "runs": [done.ended[0].row()]}]


@pytest.mark.parametrize("look", [1, 2])
def test_list_of_runs_that_cannot_be_read_keeps_no_root_from_holding(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    seen, looks = registry.seen, iter(range(1, 3))

    def seen_or_not(runs: Path) -> list[registry.Entry]:
        if next(looks) == look:
            raise OSError(24, "Too many open files")
        return seen(runs)

    monkeypatch.setattr(registry, "seen", seen_or_not)
    with live(tmp_path, "one", (1,)):
        done = revocation.enforce(
            tmp_path, REVOKES_1, write=lambda fields: asked.append("row"), install=lambda: asked.append("root")
        )
    assert [one.run_id for one in done.ended] == ["one"]
    assert done.failed == ("the live runs: Too many open files",)
    assert asked.index("root") == (0 if look == 1 else 4)
    assert asked.count("row") == (1 if look == 1 else 0)
    assert {"stop", "mark", "cut", "kill"} <= set(asked)


@pytest.mark.usefixtures("asked")
def test_those_whom_no_row_names_yet_are_named_by_whoever_comes_next(tmp_path: Path) -> None:
    """A mark does not prove a row: the process that set it may have been killed, or its log full."""

    class KilledError(BaseException):
        pass

    def killed() -> None:
        raise KilledError

    def full(fields: object) -> None:
        raise errors.LedgerError("the log is full")

    with live(tmp_path, "one", (1,)) as one, live(tmp_path, "two", (1,)):
        with pytest.raises(KilledError):
            revocation.enforce(tmp_path, REVOKES_1, write=_never, install=killed)
        assert marks.revoked_of(one) == REASON
        assert revocation.enforce(tmp_path, REVOKES_1, write=full).failed == ("the log: the log is full",)
        with live(tmp_path, "later", (1,)):
            done, rows = enforced(tmp_path)
            assert rows == [{"version": 1, "runs": [one.row() for one in done.ended]}]
            assert {one.run_id for one in done.ended} == {"one", "two", "later"}
            assert enforced(tmp_path) == (done, [])


@pytest.mark.usefixtures("asked")
def test_one_that_went_by_itself_meanwhile_is_named_as_well(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(live(tmp_path, "gone", (1,)))
        rows: list[Mapping[str, Any]] = []
        done = revocation.enforce(tmp_path, REVOKES_1, write=rows.append, install=stack.close)
    assert [one["run_id"] for one in rows[0]["runs"]] == ["gone"]
    assert [one.run_id for one in done.ended] == ["gone"]


def test_keepers_wait_until_what_is_revoked_is_gone_and_not_for_whoever_starts_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: dict[str, bool] = {}

    def seen(when: str) -> Callable[..., None]:
        def see(*arguments: object) -> None:
            first[when] = atomic_file.held(tmp_path / ".ending")

        return see

    monkeypatch.setattr(cgroup_kill, "kill", seen("killing"))
    monkeypatch.setattr(tree_kill, "outwait", seen("outwaiting"))
    with live(tmp_path, "one", (1,)):
        enforced(tmp_path)
    assert first == {"killing": True, "outwaiting": False}


@pytest.mark.parametrize(
    "mark",
    [
        lambda path: marks.mark_revoked(path, "it leaks"),
        lambda path: marks.mark_stopped(path, "a", "b"),
    ],
    ids=["revoked", "with its tree"],
)
def test_keeper_gives_way_where_its_run_is_marked_and_another_is_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: Callable[[Path], None]
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    looks: list[float] = []
    with tree_kill.sweep_lock(tmp_path):
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
        tree_kill.wait_for_sweep(path)  # it is not marked: it ends for another reason
        mark(path)
        with monkeypatch.context() as patch:
            patch.setattr(tree_kill, "SWEEP_SECONDS", 0.0)
            tree_kill.wait_for_sweep(path)  # the process that sweeps takes too long
        with contextlib.ExitStack() as other:
            other.enter_context(tree_kill.sweep_lock(tmp_path))  # a second sweep runs without the lock
    fd = os.open(tmp_path / ".ending", os.O_RDWR)
    assert atomic_file.take(fd, 0.0)

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            os.close(fd)

    monkeypatch.setattr(tree_kill, "SWEEP_SECONDS", 3600.0)
    monkeypatch.setattr(time, "sleep", sleep)
    tree_kill.wait_for_sweep(path)
    assert len(looks) == 3
    tree_kill.wait_for_sweep(path)  # no process sweeps: a killed command delays no shim
    tree_kill.wait_for_sweep(tmp_path / "gone")


def test_whoever_comes_late_finds_root_or_mark(tmp_path: Path) -> None:
    state_path = tmp_path / "state"
    state_path.mkdir(mode=0o700)
    with State(state_path) as state:
        state.init_root(kit.root_bytes(kit.root_document(op(1)), 1), kit.NOW)
        above = tmp_path / "above"
        above.mkdir()
        revocation.refuse(state, 1, [above])
        revocation.refuse(state, None, [above, tmp_path / "gone"])
        with pytest.raises(errors.TrustError, match="version 2, 1 holds now"):
            revocation.refuse(state, 2, [])
        marks.mark_revoked(above, "it leaks")
        marks.mark_revoked(above, "a second reason")
        with pytest.raises(errors.RevokedError, match="above this one, is being ended: it leaks"):
            revocation.refuse(state, 1, [above])


def test_whoever_was_asked_for_by_run_gone_for_it_does_not_start(tmp_path: Path) -> None:
    """Its parent's mark was removed with the directory, but the run's own label has its authority."""
    line = authority.encode([_authority("above", 1), _authority("child", 2)])
    (tmp_path / "state").mkdir(mode=0o700)
    with State(tmp_path / "state") as state:
        state.init_root(kit.root_bytes(kit.root_document(op(1), op(2)), 1), kit.NOW)
        revocation.refuse(state, 1, [tmp_path / "above"], line)
        later = kit.root_document(op(2), version=2, revoked=kit.revoked(keys=[kit.revoked_key(1)]))
        state.replace_root(kit.root_bytes(later, 1, 2), kit.NOW)
        with pytest.raises(errors.RevokedError, match="run above, which this one rests on"):
            revocation.refuse(state, 2, [tmp_path / "above"], line)


@pytest.mark.usefixtures("at_once")
def test_gate_that_another_does_not_let_go_of_keeps_nobody_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_kill, "GATE_SECONDS", 0.05)
    with live(tmp_path, "one", (1,)), lock.gate(tmp_path):
        done, rows = enforced(tmp_path)
        assert [one.run_id for one in done.ended] == ["one"]
        assert len(rows) == 1
        assert "the gate of the runs is not free" in done.failed[0]


def test_child_rests_on_what_its_parent_rests_on(tmp_path: Path) -> None:
    own = _authority("child", 2)
    assert authority.decode(revocation.line_below(tmp_path, "", own)) == (own,)
    assert revocation.line_below(tmp_path, "", None) == ""
    with live(tmp_path, "parent", (2, 1), "root"):
        line = authority.decode(revocation.line_below(tmp_path, "parent", own))
        assert [one.run_id for one in line] == ["root", "parent", "child"]
    with pytest.raises(errors.RevokedError, match="is gone"):
        revocation.line_below(tmp_path, "parent", own)
