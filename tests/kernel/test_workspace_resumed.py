"""A workspace that goes on after an apply: what was applied is no change of the host, and what the host changed is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox.workspace import operations, store
from tests.kernel.session_kit import Home
from tests.kernel.test_workspace import home, listed, project

__all__ = ["home", "project"]


@pytest.fixture(autouse=True)
def discarded(home: Home) -> Iterator[None]:
    """No test leaves a workspace to the next one."""
    yield
    for one in listed(home):
        assert home.covenant("workspace", "discard", one["run_id"]).returncode == 0


def keep(home: Home, project: Path, script: str) -> str:
    """Run a script in a session whose workspace is kept. Returns the run."""
    done = home.exec("--quiet", "--workspace", project, "--keep-workspace", "--", "sh", "-ec", script)
    assert done.returncode == 0, done.stderr
    (one,) = listed(home)
    return str(one["run_id"])


def resume(home: Home, project: Path, run: str, script: str) -> str:
    """Run a script in a session that goes on with the changes. Returns the run."""
    words = ("--quiet", "--workspace", project, "--keep-workspace", "--resume", run)
    done = home.exec(*words, "--", "sh", "-ec", script)
    assert done.returncode == 0, done.stderr
    (one,) = listed(home)
    return str(one["run_id"])


def conflicts(home: Home, run: str) -> dict[str, str]:
    """Return the changes, each with its conflict or nothing."""
    shown = json.loads(home.covenant("workspace", "diff", run, "--json").stdout)["changes"]
    assert [row for row in shown if row["refused"]] == []
    return {row["path"]: row["conflict"] for row in shown}


def apply(home: Home, run: str, *paths: str) -> None:
    done = home.covenant("workspace", "apply", run, *paths)
    assert done.returncode == 0, done.stderr


FIRST = "echo three >> src/a.txt; rm old.txt; mkdir -p new/deep; echo fresh > new/deep/f; ln -s f new/deep/l; "
FIRST += "chmod 700 src/run.sh; chmod 750 src; mv link new/link"
SECOND = "echo four >> src/a.txt; echo again > old.txt; echo more > new/deep/f; ln -sfn g new/deep/l; chmod 755 src; "
SECOND += "mv src/run.sh new/run.sh; echo beside > new/deep/g; rm new/link"


def test_applied_paths_are_changed_and_applied_again(home: Home, project: Path) -> None:
    run = keep(home, project, FIRST)
    found = conflicts(home, run)
    assert set(found.values()) == {""}
    apply(home, run)
    assert (project / "src/a.txt").read_text() == "one\ntwo\nthree\n"
    assert conflicts(home, run) == {}
    run = resume(home, project, run, SECOND)
    found = conflicts(home, run)
    assert set(found.values()) == {""}, found
    assert {"src/a.txt", "old.txt", "new/deep/f", "new/deep/l", "src", "new/run.sh", "new/deep/g"} < set(found)
    apply(home, run)
    assert (project / "src/a.txt").read_text() == "one\ntwo\nthree\nfour\n"
    assert (project / "old.txt").read_text() == "again\n"
    assert (project / "new/deep/f").read_text() == "more\n"
    assert os.readlink(project / "new/deep/l") == "g"
    assert (project / "new/run.sh").exists()
    assert not (project / "src/run.sh").exists()
    assert not (project / "new/link").is_symlink()
    run = resume(home, project, run, "rm -r new; rm src/a.txt")
    assert set(conflicts(home, run).values()) == {""}
    apply(home, run)
    assert not (project / "new").exists()
    assert (project / "src").is_dir()


def _write(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def _link(target: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return change


# Each change of the host beside what takes it back.
CHANGES: list[tuple[str, Callable[[Path], object], Callable[[Path], object]]] = [
    ("src/a.txt", _write("one\ntwo\nTHREE\n"), _write("one\ntwo\nthree\n")),
    ("src/a.txt", lambda path: path.chmod(0o600), lambda path: path.chmod(0o644)),
    ("new/deep/f", _write("FRESH\n"), _write("fresh\n")),
    ("new/deep/l", _link("h"), _link("f")),
    ("old.txt", _write("host\n"), Path.unlink),
]


def test_change_of_host_between_is_conflict(home: Home, project: Path) -> None:
    """Control: the other paths, and the same path once the change was taken back."""
    run = keep(home, project, FIRST)
    apply(home, run)
    run = resume(home, project, run, "echo four >> src/a.txt; echo again > old.txt; echo more > new/deep/f; " + LINK)
    paths = {path for path, _, _ in CHANGES}
    for path, change, back in CHANGES:
        change(project / path)
        found = conflicts(home, run)
        assert paths <= set(found)
        assert [one for one, conflict in found.items() if conflict] == [path]
        back(project / path)
    assert set(conflicts(home, run).values()) == {""}
    (project / "old.txt").write_text("host\n")
    refused = home.covenant("workspace", "apply", run)
    assert refused.returncode != 0
    assert b"old.txt" in refused.stderr
    apply(home, run, *(paths - {"old.txt"}))
    assert (project / "old.txt").read_text() == "host\n"
    assert (project / "src/a.txt").read_text() == "one\ntwo\nthree\nfour\n"
    # A path that the host removed.
    (project / "src/a.txt").unlink()
    assert conflicts(home, run)["src/a.txt"]


LINK = "ln -sfn g new/deep/l"


def test_name_that_host_removed_before_apply_stays_conflict(home: Home, project: Path) -> None:
    """The apply of another path in its directory does not hide it. Control: a copy beside it is applied."""
    run = keep(home, project, "echo three >> src/a.txt; echo x > src/b.txt; echo x > c.txt; mv old.txt src/old.txt")
    (project / "src/a.txt").unlink()
    apply(home, run, "src/b.txt")
    found = conflicts(home, run)
    assert found["src/a.txt"]
    assert found["c.txt"] == found["old.txt"] == ""
    apply(home, run, "c.txt")
    run = resume(home, project, run, "echo four >> src/a.txt; mv link moved")
    found = conflicts(home, run)
    assert found["src/a.txt"]
    assert found["moved"] == ""
    assert not (project / "src/a.txt").exists()


def test_record_that_is_lost_means_conflict(home: Home, project: Path) -> None:
    """Control: with the record there is none."""
    run = keep(home, project, "echo three >> src/a.txt; echo x > n.txt")
    apply(home, run)
    run = resume(home, project, run, "echo four >> src/a.txt; echo y > n.txt")
    assert set(conflicts(home, run).values()) == {""}
    place = store.place(home.world.state, run)
    record = place.applied()
    assert set(record.paths) == {"src/a.txt", "n.txt"}
    (place.path / store.APPLIED).unlink()
    assert all(conflicts(home, run).values())
    (place.path / store.APPLIED).write_text("{")
    damaged = home.covenant("workspace", "diff", run)
    assert damaged.returncode != 0
    assert f"fix: remove {place.path / store.APPLIED}" in damaged.stderr.decode()
    place.write_applied(record)
    apply(home, run)
    assert (project / "n.txt").read_text() == "y\n"


def test_apply_killed_before_its_record_is_finished(home: Home, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look at the workspace does the steps once more, and writes the record."""
    run = keep(home, project, "echo three >> src/a.txt")
    place = store.place(home.world.state, run)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, operations.opened(place) as one:
        patched.setattr(store.WorkspaceDirectory, "write_applied", killed)
        with pytest.raises(KeyboardInterrupt):
            one.apply(log=lambda changes: None)
    assert (project / "src/a.txt").read_text() == "one\ntwo\nthree\n"
    assert place.journal() is not None
    assert place.applied().paths == {}
    assert home.covenant("workspace", "diff", run).returncode == 0
    run = resume(home, project, run, "echo four >> src/a.txt")
    assert conflicts(home, run) == {"src/a.txt": ""}
    apply(home, run)
    assert (project / "src/a.txt").read_text() == "one\ntwo\nthree\nfour\n"


def test_trial_sandbox_leaves_workspace_alone(home: Home, project: Path) -> None:
    """The first run of a policy is tried in a sandbox before: also with a kept workspace, and with a resumed one."""
    proved = home.world.state / "closures" / "canaries.json"
    home.world.configure(self_test=True)
    try:
        run = keep(home, project, "echo one > n.txt")
        assert proved.exists(), "the policy was tried"
        proved.unlink()
        again = resume(home, project, run, "cat n.txt; echo two >> n.txt")
        assert proved.exists()
        assert again != run
        apply(home, again)
        assert (project / "n.txt").read_text() == "one\ntwo\n"
    finally:
        home.world.configure()
        proved.unlink(missing_ok=True)
    (one,) = listed(home)
    assert one["run_id"] == again, "a trial leaves no workspace"
    rows = [row["kind"] for row in home.world.rows() if row["kind"]["type"] == "self_test"]
    assert sum(row["name"] == "canaries" and row["passed"] for row in rows) >= 2
