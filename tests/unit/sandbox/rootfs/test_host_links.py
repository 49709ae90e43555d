"""Links of granted paths on real directories: what is followed, and what is refused beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.host import GrantedPath
from sandbox.kernel.fs import filesystems
from sandbox.rootfs import host_links, host_paths
from tests.unit.sandbox.rootfs.test_host_paths import OWNERS

OWNER = os.getuid()


def resolved(path: Path | str) -> tuple[str, dict[str, str]]:
    real, links = host_links.resolve(str(path), {}, "agent.toml:7", owner=OWNER)
    return real, dict(links)


def test_path_without_links_stays(docs: Path) -> None:
    assert resolved(docs) == (str(docs), {})
    assert resolved(docs / "gone") == (str(docs / "gone"), {})


def test_links_are_followed_and_listed(docs: Path) -> None:
    (docs.parent / "current").symlink_to("docs")
    (docs.parent.parent / "b").symlink_to(docs.parent)
    (docs / "first").symlink_to("./../docs/page")
    asked = docs.parent.parent / "b" / "current" / "first"
    assert resolved(asked) == (
        str(docs / "page"),
        {
            str(docs.parent.parent / "b"): str(docs.parent),
            str(docs.parent / "current"): "docs",
            str(docs / "first"): "./../docs/page",
        },
    )


def _dangling(docs: Path) -> None:
    (docs / "link").symlink_to("gone")


def _loop(docs: Path) -> None:
    (docs / "link").symlink_to("other")
    (docs / "other").symlink_to("link")


def _shared_directory(docs: Path) -> None:
    docs.chmod(0o1777)
    (docs / "link").symlink_to("page")


def _shared_above(docs: Path) -> None:
    docs.parent.chmod(0o775)
    (docs / "link").symlink_to("page")


def _no_utf8(docs: Path) -> None:
    os.symlink(b"\xff", bytes(docs / "link"))


def _through_file(docs: Path) -> None:
    (docs / "link").symlink_to("page/below")


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (_dangling, "gone`: No such file"),
    (_loop, "more than 40 symlinks"),
    (_shared_directory, "others can write"),
    (_shared_above, "others can change"),
    (_no_utf8, "cannot be read"),
    (_through_file, "Not a directory"),
]


@pytest.mark.parametrize(("arrange", "why"), REFUSED)
def test_link_is_refused(docs: Path, arrange: Callable[[Path], None], why: str) -> None:
    (docs / "good").symlink_to("page")
    assert resolved(docs / "good")[0] == str(docs / "page")
    arrange(docs)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.GrantedPathError, match=why) as refusal:
        resolved(docs / "link")
    assert refusal.value.where == "agent.toml:7"
    assert refusal.value.hint
    del refusal
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_link_of_another_user_is_refused(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a user whose files may be granted: it could lead to files of root that this user cannot read."""
    link, real = docs / "link", os.fstat
    link.symlink_to("page")
    assert resolved(link)[0] == str(docs / "page")
    inode = link.lstat().st_ino

    def foreign(fd: int) -> os.stat_result:
        info = real(fd)
        return os.stat_result((*info[:4], 4242, *info[5:10])) if info.st_ino == inode else info

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(errors.GrantedPathError, match="belongs to uid 4242") as refusal:
        host_paths.look_up(str(link), owners=(*OWNERS, 4242), follow=True)
    assert refusal.value.hint == f"grant `{docs / 'page'}` instead"
    assert host_paths.look_up(str(docs / "page"), owners=OWNERS).kind == "file"


def test_link_that_an_agent_may_make_is_refused(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path for writing has a file system of its own, mounted nosuid and nodev: links there may be an agent's."""
    (docs / "link").symlink_to("page")
    mine = filesystems.Mount(1, 0, "7:1", "/", str(docs), frozenset({"rw", "nosuid", "nodev"}), "ext4")
    elsewhere = filesystems.Mount(2, 0, "7:1", "/", "/elsewhere", frozenset({"rw"}), "ext4")
    monkeypatch.setattr(filesystems, "is_block_device", lambda _: True)
    monkeypatch.setattr(filesystems, "mount_of", lambda _: mine)
    monkeypatch.setattr(filesystems, "mounts", lambda: iter([mine, elsewhere]))
    # Control: a file system that is mounted without nosuid cannot be granted for writing.
    assert resolved(docs / "link")[0] == str(docs / "page")
    monkeypatch.setattr(filesystems, "mounts", lambda: iter([mine]))
    with pytest.raises(errors.GrantedPathError, match="an agent may be granted its file system for writing"):
        resolved(docs / "link")


@pytest.mark.parametrize("kind", ["fuse", "fuse.sshfs", "nfs4", "9p", ""])
def test_link_on_a_file_system_of_others_is_refused(docs: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A user's FUSE server may say that root owns its links."""
    (docs / "link").symlink_to("page")
    assert resolved(docs / "link")[0] == str(docs / "page")
    mount = filesystems.Mount(1, 0, "0:99", "/", str(docs), frozenset({"rw", "nosuid", "nodev"}), kind)
    monkeypatch.setattr(filesystems, "mount_of", lambda _: mount)
    with pytest.raises(errors.GrantedPathError, match="where others may say who owns a file"):
        resolved(docs / "link")


@pytest.mark.parametrize("tree", ["/proc/self", "/dev/stdin", "/var/run"])
def test_link_in_never_grantable_tree_is_refused(tree: str) -> None:
    with pytest.raises(errors.NeverGrantableError):
        host_links.resolve(f"{tree}/x", {})


def test_target_is_looked_at_as_any_granted_path(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = host_links.resolve
    monkeypatch.setattr(host_links, "resolve", lambda *given: real(*given, owner=OWNER))
    (docs / "link").symlink_to("page")
    found = host_paths.look_up(str(docs / "link"), owners=OWNERS, follow=True)
    assert found == GrantedPath(
        str(docs / "link"), "file", real=str(docs / "page"), links=((str(docs / "link"), "page"),)
    )
    assert found.place == str(docs / "page")
    with pytest.raises(errors.NeverGrantableError, match=f"`{docs}/link` leads to `{docs}/page`"):
        host_paths.look_up(str(docs / "link"), owners=OWNERS, follow=True, never={str(docs / "page"): "it is ours"})
    (docs / "page").chmod(0o666)
    with pytest.raises(errors.GrantedPathError, match="can be written by others"):
        host_paths.look_up(str(docs / "link"), owners=OWNERS, follow=True)


def test_link_is_not_followed_for_writing(docs: Path) -> None:
    (docs / "link").symlink_to("page")
    with pytest.raises(errors.GrantedPathError, match="leads through symlink"):
        host_paths.look_up(str(docs / "link"), owners=OWNERS, writing=True)


def test_closure_of_links_has_their_directories() -> None:
    made = host_links.closure([{"path": "/bin", "target": "usr/bin"}, {"path": "/usr/bin/sh", "target": "dash"}])
    assert [(f.path, f.kind, f.target) for f in made.files] == [
        ("/bin", "symlink", "usr/bin"),
        ("/usr", "dir", ""),
        ("/usr/bin", "dir", ""),
        ("/usr/bin/sh", "symlink", "dash"),
    ]
    assert host_links.closure([]).files == ()
