"""Granted host paths on real directories: what is refused, each beside what is allowed."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from policy import errors
from policy.host import GrantedPath
from sandbox.rootfs import host_paths

OWNERS = (os.getuid(),)


def test_directory_and_file_are_found_as_what_they_are(docs: Path) -> None:
    assert host_paths.look_up(str(docs), owners=OWNERS) == GrantedPath(str(docs), "dir")
    assert host_paths.look_up(f"{docs}/page", owners=OWNERS) == GrantedPath(f"{docs}/page", "file")


def test_descriptor_is_of_what_was_checked(docs: Path) -> None:
    fd, _ = host_paths.open_granted(str(docs), owners=OWNERS)
    try:
        docs.rename(docs.parent / "moved")
        (docs.parent / "docs").symlink_to("/etc")
        assert os.path.samestat(os.fstat(fd), (docs.parent / "moved").stat())
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def _link_last(docs: Path) -> str:
    (docs.parent / "link").symlink_to(docs)
    return f"{docs.parent}/link"


def _link_between(docs: Path) -> str:
    (docs.parent.parent / "b").symlink_to(docs.parent)
    return f"{docs.parent.parent}/b/docs"


def _group_writable(docs: Path) -> str:
    docs.chmod(0o775)
    return str(docs)


def _others_writable_above(docs: Path) -> str:
    docs.parent.chmod(0o757)
    return str(docs)


def _writable_file(docs: Path) -> str:
    (docs / "page").chmod(0o666)
    return f"{docs}/page"


def _sticky_itself(docs: Path) -> str:
    docs.chmod(0o1777)
    return str(docs)


def _fifo(docs: Path) -> str:
    os.mkfifo(docs / "fifo", 0o644)
    return f"{docs}/fifo"


def _socket(docs: Path) -> str:
    with socket.socket(socket.AF_UNIX) as s:
        os.chdir(docs)  # the path of a socket is short
        s.bind("socket")
    return f"{docs}/socket"


REFUSED: list[tuple[Callable[[Path], str], str]] = [
    (_link_last, "leads through symlink"),
    (_link_between, "leads through symlink"),
    (_group_writable, "can be written by others"),
    (_others_writable_above, "can be written by others"),
    (_writable_file, "can be written by others"),
    (_sticky_itself, "can be written by others"),
    (_fifo, "neither a file nor a directory"),
    (_socket, "neither a file nor a directory"),
    (lambda docs: f"{docs}/gone", "No such file"),
    (lambda docs: f"{docs}/page/below", "not a directory"),
    (lambda docs: f"{docs}/../docs", "not absolute and normalised"),
    (lambda docs: f"{docs}/", "not absolute and normalised"),
    (lambda docs: f"/{docs}", "not absolute and normalised"),
    (lambda docs: docs.name, "not absolute and normalised"),
    (lambda docs: f"{docs}/a\0b", "not absolute and normalised"),
]


@pytest.mark.parametrize(("arrange", "why"), REFUSED)
def test_what_is_refused(docs: Path, arrange: Callable[[Path], str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    host_paths.look_up(str(docs), owners=OWNERS)
    with pytest.raises(errors.GrantedPathError, match=why) as refusal:
        host_paths.look_up(arrange(docs), owners=OWNERS, where="agent.toml:7")
    assert refusal.value.where == "agent.toml:7"


def test_symlink_is_answered_with_real_path(docs: Path) -> None:
    with pytest.raises(errors.GrantedPathError) as refusal:
        host_paths.look_up(_link_last(docs), owners=OWNERS)
    assert refusal.value.hint == f"grant `{docs}` instead"


def test_directory_of_someone_else_is_refused_until_operator_names_him(
    docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat

    def foreign(fd: int) -> os.stat_result:
        info = real(fd)
        if os.path.samestat(info, docs.stat()):
            return os.stat_result((*info[:4], 4242, *info[5:10]))
        return info

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(errors.GrantedPathError, match="belongs to uid 4242"):
        host_paths.look_up(str(docs), owners=OWNERS)
    assert host_paths.look_up(str(docs), owners=(*OWNERS, 4242)).kind == "dir"


def test_sticky_directory_of_root_may_be_passed_through() -> None:
    """Through /tmp, but not /tmp itself: anyone could put things into what was granted."""
    assert stat.S_IMODE(os.stat("/tmp").st_mode) == 0o1777
    with pytest.raises(errors.GrantedPathError, match="can be written by others"):
        host_paths.look_up("/tmp", owners=OWNERS)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        assert host_paths.look_up(folder, owners=OWNERS).kind == "dir"


@pytest.mark.parametrize("path", ["/proc", "/proc/self", "/sys", "/proc/sys/kernel"])
def test_kernel_file_systems_are_refused_even_without_table(path: str) -> None:
    with pytest.raises(errors.GrantedPathError):
        host_paths.look_up(path, never={})


NEVER = {"/": "whole", "/etc/shadow": "passwords", "/var/lib/covenant": "decides"}


@pytest.mark.parametrize(
    ("path", "relation"),
    [
        ("/", "path `/` is never"),
        ("/etc/shadow", "path `/etc/shadow` is never"),
        ("/var/lib/covenant/keys", "lies in `/var/lib/covenant`"),
        ("/var/lib", "contains `/var/lib/covenant`"),
        ("/etc", "contains `/etc/shadow`"),
    ],
)
def test_never_grantable_paths_are_refused_with_their_reason(path: str, relation: str) -> None:
    host_paths.check_never("/usr/share/doc", NEVER)
    host_paths.check_never("/var/lib/covenant2", NEVER)
    with pytest.raises(errors.NeverGrantableError, match=relation):
        host_paths.check_never(path, NEVER)


def test_no_descriptor_is_left(docs: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        host_paths.look_up(str(docs), owners=OWNERS)
        with pytest.raises(errors.GrantedPathError):
            host_paths.look_up(f"{docs}/gone/further", owners=OWNERS)
    assert sorted(os.listdir("/proc/self/fd")) == before
