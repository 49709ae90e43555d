"""`covenant workspace` for users other than root, through a supervisor: each has its own, and nothing of another's."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covenant.keys import keystore
from policy.signing import keyfile
from sandbox.workspace import store
from tests.kernel import serving, workspace_kit
from tests.kernel.serving import CALLER, LONE, STRANGER, Served
from tests.kernel.session_kit import Terminal
from tests.kernel.world import World

MINE, OTHERS, ROOTS = (f"{digit * 8}-0000-4000-8000-{digit * 12}" for digit in "abc")
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with (
        serving.open_place() as base,
        Served(World(base, warm=warm), callers=[CALLER, STRANGER, LONE], kept_workspaces=4) as one,
    ):
        keystore.new(one.world.home, "other", None)
        (one.world.home / "keys" / "tester.key").write_bytes(keyfile.plain(one.world.key))
        (one.world.home / "keys" / "tester.key").chmod(0o600)
        yield one


@pytest.fixture
def top(served: Served) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)
    for one in store.listed(served.world.state):
        one.remove()


@pytest.fixture
def mine(served: Served, top: Path) -> Path:
    """A directory of the caller, with a workspace; another user and root have one each."""
    made = workspace_kit.project(top, "mine", CALLER)
    workspace_kit.plant(served.world.state, MINE, made, CALLER)
    workspace_kit.plant(served.world.state, OTHERS, workspace_kit.project(top, "others", STRANGER), STRANGER)
    # Root's own run on the caller's directory: its content may have what only root was to see.
    workspace_kit.plant(served.world.state, ROOTS, made, 0)
    return made


def workspace(served: Served, *words: str | Path, uid: int = CALLER) -> Done:
    return serving.covenant("workspace", *map(str, words), served=served, uid=uid)


def told(served: Served, *words: str | Path, uid: int = CALLER) -> dict[str, Any]:
    """The document of a command that succeeds."""
    done = workspace(served, *words, "--json", uid=uid)
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows(served: Served, kind: str) -> list[dict[str, Any]]:
    return [row for row in served.world.rows() if row["kind"]["type"] == kind]


def test_user_sees_and_applies_its_own(served: Served, mine: Path) -> None:
    assert [one["run_id"] for one in told(served, "list")["workspaces"]] == [MINE]
    assert [one["run_id"] for one in told(served, "list", uid=0)["workspaces"]] == [MINE, OTHERS, ROOTS]
    shown = workspace(served, "list").stdout.splitlines()
    assert len(shown) == 2
    assert "MiB" in shown[1]
    found = told(served, "diff", "aaaa")
    assert [row["path"] for row in found["changes"]] == ["new", "new/file", "shown"]
    assert workspace(served, "show", "aa", "new/file").stdout == "new\n"
    done = told(served, "apply", "aa", "new", "--digest", told(served, "diff", "aa", "new")["digest"])
    assert done["count"] == 2
    made = (mine / "new" / "file").stat()
    assert (made.st_uid, made.st_gid) == (CALLER, CALLER)
    (row,) = [row for row in rows(served, "workspace_applied") if row["kind"]["run_id"] == MINE]
    assert row["issuer"]["display"] == row["kind"]["operator"] == f"uid{CALLER}@local"
    assert (row["kind"]["changes_sha256"], row["kind"]["approved_by"]) == (done["digest"], [])
    assert workspace(served, "discard", "aa").returncode == 0
    assert told(served, "list")["workspaces"] == []


VERBS: dict[str, tuple[str, ...]] = {
    "diff": (),
    "show": ("shown",),
    "apply": (),
    "branch": ("x",),
    "fork": (),
    "discard": (),
}


@pytest.mark.parametrize("verb", VERBS)
def test_workspace_of_another_is_as_one_that_is_not_there(served: Served, mine: Path, verb: str) -> None:
    """Control: the verb reaches the caller's own (a branch needs a repository)."""

    def said(run: str) -> tuple[int, str, str]:
        done = workspace(served, verb, run, *VERBS[verb])
        return done.returncode, done.stdout, done.stderr.replace(f"`{run}`", "RUN")

    nothing = said("d" * 8)
    assert nothing[0] != 0
    for run in (OTHERS[:8], ROOTS[:8], "b"):
        assert said(run) == nothing, run
    for run in (OTHERS, ROOTS):
        assert said(run) == said("d" * 8 + run[8:]), run
        assert store.place(served.world.state, run).path.exists()
    # Another's that begins alike is no second meaning of the word.
    os.rename(store.place(served.world.state, OTHERS).path, store.place(served.world.state, f"aab{OTHERS}").path)
    own = workspace(served, verb, "a", *VERBS[verb])
    assert (own.returncode == 0) == (verb != "branch"), own.stderr
    assert "begin" not in own.stderr


def test_apply_has_the_rights_that_the_caller_has_now(served: Served, mine: Path) -> None:
    """The directory was the caller's when the run began. Control: it is its own again."""
    os.chown(mine, STRANGER, STRANGER)
    mine.chmod(0o755)
    refused = workspace(served, "apply", "aa")
    assert refused.returncode != 0
    assert "Permission denied" in refused.stderr
    assert sorted(os.listdir(mine)) == ["in.txt"]
    os.chown(mine, CALLER, CALLER)
    assert workspace(served, "apply", "aa").returncode == 0


def test_digest_holds_an_apply_to_what_was_shown(served: Served, mine: Path) -> None:
    shown = told(served, "diff", "aa")
    assert f"digest of the 3 that can be applied: {shown['digest']}" in workspace(served, "diff", "aa").stderr
    refused = workspace(served, "apply", "aa", "new", "--digest", shown["digest"])
    assert "workspace_digest" in refused.stderr
    assert sorted(os.listdir(mine)) == ["in.txt"]
    # The host makes one of the files meanwhile: the changes are others.
    (mine / "shown").write_text("host")
    assert workspace(served, "apply", "aa", "--digest", shown["digest"]).returncode != 0
    (mine / "shown").unlink()
    assert workspace(served, "apply", "aa", "--digest", shown["digest"]).returncode == 0


def test_content_is_safe_on_a_terminal(served: Served, mine: Path) -> None:
    shown = workspace(served, "show", "aa", "shown").stdout
    assert shown == "a\\x1b[2Jb\n\\xff"
    raw = subprocess.run(
        serving.covenant_command("workspace", "show", "aa", "shown", "--raw"),
        env=serving.environment_of(served, CALLER),
        capture_output=True,
        check=True,
        **serving.identity(CALLER),
    )
    assert raw.stdout == b"a\x1b[2Jb\n\xff"
    assert "policy digest: 1111" in workspace(served, "show", "aa").stdout
    missing = workspace(served, "show", "aa", "in.txt")
    assert "the agent left no change at `in.txt`" in missing.stderr


def reviewed(served: Served, *answers: tuple[bytes, bytes]) -> bytes:
    """Run `apply --ask` in a terminal as the user, and give each answer behind its question. Returns what was shown."""
    command = serving.covenant_command("workspace", "apply", "aa", "--ask")
    one = Terminal(command, serving.environment_of(served, CALLER), uid=CALLER, **serving.identity(CALLER))
    try:
        for question, answer in answers:
            one.until(question)
            one.type(answer + b"\r")
        assert one.ended() == 0, one.shown
        return one.shown
    finally:
        one.close()


def test_each_path_is_asked_for(served: Served, mine: Path) -> None:
    shown = reviewed(
        served,
        (b"apply these changes?", b"diff"),
        (b"+new", b"each"),
        (b"apply new/file?", b"yes"),
        (b"apply shown?", b"no"),
    )
    assert b"\x1b[2J" not in shown
    assert b"applied 2 changes" in shown
    assert sorted(os.listdir(mine)) == ["in.txt", "new"]
    assert [one["run_id"] for one in told(served, "list")["workspaces"]] == [MINE]


def test_terminal_that_says_no_changes_nothing(served: Served, mine: Path) -> None:
    reviewed(served, (b"apply these changes?", b"no"))
    assert sorted(os.listdir(mine)) == ["in.txt"]
    refused = workspace(served, "apply", "aa", "--ask")
    assert refused.returncode == 2
    assert "leave --ask out" in refused.stderr


def approve(served: Served, run: str, out: Path, *words: str, key: str = "tester") -> Done:
    digest = told(served, "diff", run, uid=0)["digest"]
    return workspace(served, "approve", run, "--digest", digest, "--key", key, "--out", out, *words, uid=0)


def test_operator_approves_these_very_changes(served: Served, mine: Path, top: Path) -> None:
    file = top / "approval"
    two = workspace_kit.plant(
        served.world.state, MINE.replace("a", "e"), mine, CALLER, apply="operator", agent_id="probe"
    )
    refused = workspace(served, "apply", "eee")
    assert "workspace_approval" in refused.stderr
    assert "fix: covenant workspace approve eeeeeeee --digest" in refused.stderr
    assert workspace(served, "branch", "eee", "x").returncode != 0
    # One by a key that the trust root does not know, of another run, and of a part of the changes.
    assert approve(served, "eee", file, key="other").returncode == 0
    assert "no signature is by a key of the trust root" in workspace(served, "apply", "eee", "--approval", file).stderr
    assert approve(served, "aaa", file).returncode == 0
    assert "for another run" in workspace(served, "apply", "eee", "--approval", file).stderr
    assert approve(served, "eee", file).returncode == 0
    assert "for another digest" in workspace(served, "apply", "eee", "new", "--approval", file).stderr
    assert sorted(os.listdir(mine)) == ["in.txt"]
    # The agent's files are others than those that were approved: as of a second run.
    done = told(served, "apply", "eee", "--approval", file)
    assert done["approved_by"] == ["tester"]
    assert sorted(os.listdir(mine)) == ["in.txt", "new", "shown"]
    assert not two.path.exists()
    (row,) = [row["kind"] for row in rows(served, "workspace_applied") if row["kind"]["run_id"] == done["run_id"]]
    assert (row["approved_by"], len(row["approval_sha256"])) == (["tester"], 64)


def test_root_needs_the_approval_too(served: Served, mine: Path, top: Path) -> None:
    workspace_kit.plant(served.world.state, "f" * 8, mine, 0, apply="operator")
    assert "workspace_approval" in workspace(served, "apply", "fff", uid=0).stderr
    wrong = workspace(served, "approve", "fff", "--digest", "0" * 64, "--key", "tester", "--out", top / "x", uid=0)
    assert "workspace_digest" in wrong.stderr
    assert not (top / "x").exists()
    assert approve(served, "fff", top / "x", "--expires", "1s").returncode == 0
    os.utime(top / "x")
    assert approve(served, "fff", top / "y").returncode == 0
    assert told(served, "apply", "fff", "--approval", top / "y", uid=0)["count"] == 3


def test_user_keeps_so_many_workspaces(served: Served, mine: Path) -> None:
    """Four of one user. Control: when one is gone there is room again, and another user's do not count."""
    for _ in range(3):
        assert workspace(served, "fork", "aaa").returncode == 0
    refused = workspace(served, "fork", MINE)
    assert "workspace_limit" in refused.stderr
    assert "fix: covenant workspace list" in refused.stderr
    assert workspace(served, "fork", OTHERS, uid=STRANGER).returncode == 0
    other = next(one["run_id"] for one in told(served, "list")["workspaces"] if one["run_id"] != MINE)
    assert workspace(served, "discard", other).returncode == 0
    assert workspace(served, "fork", MINE).returncode == 0


def test_damaged_workspace_hides_no_other(served: Served, mine: Path) -> None:
    (store.place(served.world.state, OTHERS).path / store.RECORD).write_bytes(b"{")
    assert [one["run_id"] for one in told(served, "list")["workspaces"]] == [MINE]
    assert told(served, "list")["damaged"] == []
    assert told(served, "list", uid=0)["damaged"] == [OTHERS]


def test_record_of_an_earlier_version_is_roots(served: Served, mine: Path) -> None:
    """It says nothing of its user."""
    one = store.place(served.world.state, MINE)
    record = json.loads((one.path / store.RECORD).read_bytes())
    for name in ("uid", "role", "package", "keeps"):
        del record[name]
    (one.path / store.RECORD).write_text(json.dumps(record))
    assert told(served, "list")["workspaces"] == []
    assert told(served, "apply", "aaa", uid=0)["count"] == 3
