"""Layers and paths of a session: a profile takes the newest layer of a name."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from covenant.session import host, profiles
from policy import errors
from sandbox.layers.store import LayerStore

SHELL = profiles.load("shell")


def packed(state: Path, name: str, content: str) -> str:
    """Pack a layer of one file, and return its reference."""
    top = state.parent / f"{name}-{content}"
    top.mkdir()
    (top / "file").write_text(content)
    return str(LayerStore(state).pack_tree(top, name).ref)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def refs(state: Path, *named: str) -> list[str]:
    return [str(ref) for ref, _ in host.layers(state, SHELL, named)]


def test_newest_layer_of_profile_is_taken(state: Path) -> None:
    older = packed(state, "debian-minimal", "older")
    assert refs(state) == [older]
    newer = packed(state, "debian-minimal", "newer")
    assert newer != older
    assert refs(state) == [newer]


def test_layers_keep_their_order_once(state: Path) -> None:
    base, app, other = (packed(state, name, name) for name in ("debian-minimal", "app", "other"))
    assert refs(state, "other", "app") == [base, other, app]
    assert refs(state, app, "app", "debian-minimal", app.partition("sha256:")[2][:12]) == [base, app]


def test_layer_has_name_that_was_asked(state: Path) -> None:
    """One tree that was packed under two names is known by both."""
    base = packed(state, "debian-minimal", "x")
    (state.parent / "debian-minimal-x").rename(state.parent / "moved")
    LayerStore(state).pack_tree(state.parent / "moved", "latest")
    assert refs(state) == [base]


def test_relative_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/usr/share")
    assert host.readable("doc") == "/usr/share/doc"
    assert host.readable("./doc/../doc/") == "/usr/share/doc"
    with pytest.raises(errors.GrantedPathError, match="there is nothing"):
        host.readable("absent")


@pytest.mark.parametrize("path", ["/tmp", "/tmp/x", "/proc/self", "/run", "/dev/null", "/workspace/x"])
def test_path_that_session_covers_is_refused(path: str) -> None:
    with pytest.raises(errors.GrantedPathError, match="of its own") as e:
        host.readable(path)
    assert "--prefix /opt/NAME" in e.value.hint
    assert host.readable("/usr/../usr/bin") == "/usr/bin"


def test_volume_needs_its_own_file_system(tmp_path: Path) -> None:
    with pytest.raises(errors.GrantedPathError, match="No such file") as missing:
        host.volume(str(tmp_path / "absent"), tmp_path)
    assert missing.value.hint == f"mkdir {tmp_path}/absent"
    with pytest.raises(errors.NotEnforceableError, match="has no bound") as e:
        host.volume(str(tmp_path), tmp_path)
    assert e.value.hint.endswith(f"IMAGE {tmp_path}")


CODING = profiles.load("codex")


def test_project_becomes_a_workspace(tmp_path: Path) -> None:
    found = host.workspace(tmp_path, CODING, {})
    assert (found.directory, found.mb) == (str(tmp_path.resolve()), CODING.disk_mb)


@pytest.mark.parametrize("which", ["root", "home", "the owner's home", "sudo's home", "never", "above never", "link"])
def test_place_that_is_no_project_is_refused(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix is in the hint: a directory below is taken."""
    home, below = tmp_path / "home", tmp_path / "home" / "project"
    below.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home if which in ("home", "link") else tmp_path / "other"))
    monkeypatch.setenv("SUDO_UID", "64999" if which == "sudo's home" else "")
    owner = home.stat().st_uid
    homes = {"the owner's home": {owner: home}, "sudo's home": {64999: home}}.get(which, {})

    def entry(uid: int) -> pwd.struct_passwd:
        if uid not in homes:
            raise KeyError(uid)
        return pwd.struct_passwd(("x", "x", uid, uid, "", str(homes[uid]), ""))

    monkeypatch.setattr(pwd, "getpwuid", entry)
    never = {str(home): "it is Covenant's own"} if which == "never" else {}
    never |= {str(below / "deep"): "it is Covenant's own"} if which == "above never" else {}
    (tmp_path / "link").symlink_to(home)
    place = {"root": Path("/"), "link": tmp_path / "link"}.get(which, home)
    with pytest.raises(errors.WorkspaceError, match="cannot be a workspace") as e:
        host.workspace(place, CODING, never)
    assert "--no-workspace" in e.value.hint
    assert host.workspace(below, CODING, {}).directory == str(below.resolve())


def test_checkout_is_taken_and_other_directory_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[str]()
    monkeypatch.setattr(host, "check_run_takes", lambda project, never: taken.append(project.directory))
    shell = profiles.load("shell")
    assert host.checkout(tmp_path, shell, {}) == (None, "this directory is no checkout of git")
    (tmp_path / ".git").mkdir()
    below = tmp_path / "src"
    below.mkdir()
    assert host.checkout(below, shell, {})[0] is None, "a checkout above does not count"
    project, why = host.checkout(tmp_path, shell, {})
    assert (project and project.directory, why) == (str(tmp_path.resolve()), "")
    assert taken == [str(tmp_path.resolve())]
    real = os.lstat
    other = os.stat_result((0,) * 4 + (os.getuid() + 1,) + (0,) * 5)
    monkeypatch.setattr(os, "lstat", lambda path: other if str(path).endswith(".git") else real(path))
    project, why = host.checkout(tmp_path, shell, {})
    assert project is None
    assert "belongs to another user" in why
    monkeypatch.setattr(os, "lstat", real)
    monkeypatch.setenv("HOME", str(tmp_path))
    project, why = host.checkout(tmp_path, shell, {})
    assert project is None
    assert "it is a home directory" in why


def test_directory_that_is_gone_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert host.checkout(Path(), profiles.load("shell"), {}) == (None, "this directory is no checkout of git")


def test_checkout_that_no_run_takes_is_left(tmp_path: Path) -> None:
    """A file system of a process: the reason is that of a run."""
    project, why = host.checkout(Path("/proc/self"), profiles.load("shell"), {})
    assert (project, why) == (None, "this directory is no checkout of git")
    (tmp_path / ".git").write_text("gitdir: /elsewhere\n")
    never = {str(tmp_path): "it is Covenant's own"}
    project, why = host.checkout(tmp_path, profiles.load("shell"), never)
    assert project is None
    assert "Covenant's own" in why


def test_profiles_of_coding_agents_take_the_directory() -> None:
    taken = {name: profiles.load(name).workspace for name in profiles.names()}
    assert {taken[name] for name in ("codex", "claude-code", "aider", "opencode")} == {"directory"}
    assert {name for name in taken if taken[name] == "checkout"} == {"shell", "python", "node"}
    assert {name for name in taken if not taken[name]} == {"llm", "shell-gpt"}


def test_volume_without_its_prefix_is_told_of_it(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(state.parent)
    with pytest.raises(errors.GrantedPathError) as e:
        host.volume("data:/data", state)
    assert e.value.hint == "a volume is written --write volume:data:/data"
    with pytest.raises(errors.GrantedPathError) as e:
        host.volume("data", state)
    assert e.value.hint == f"mkdir {state.parent}/data"


def test_mistyped_volume_is_answered_with_the_nearest(state: Path) -> None:
    made = state / "volumes" / "data"
    made.mkdir(parents=True)
    (made / "record.json").write_text("{}")
    with pytest.raises(errors.VolumeError) as e:
        host.volume("volume:dat:/data", state)
    assert e.value.hint == "did you mean `data`? If not: covenant volume create dat --size 1G"
