"""The keys of a host of SSH are found as OpenSSH finds them."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from covenant.session import ssh_hosts
from policy import errors


def key(number: int) -> str:
    raw = b"\0\0\0\x0bssh-ed25519\0\0\0 " + bytes([number]) * 32
    return f"ssh-ed25519 {base64.b64encode(raw).decode()}"


LINES = f"""
# a comment
git.example.org,192.0.2.7 {key(1)} the host
[git.example.org]:2222 {key(2)}
*.build.example.org,!bad.build.example.org {key(3)}
git.example.org sk-ssh-ed25519@openssh.com AAAA
git.example.org {key(4)}
@revoked git.example.org {key(4)}
@cert-authority *.example.org {key(5)}
short {key(6)[:20]}
|1|broken|hash {key(7)}
"""


@pytest.fixture
def known(tmp_path: Path) -> list[Path]:
    (tmp_path / "known_hosts").write_text(LINES)
    return [tmp_path / "absent", tmp_path / "known_hosts"]


@pytest.mark.parametrize(
    ("host", "port", "keys"),
    [
        ("git.example.org", 22, [1]),
        ("192.0.2.7", 22, [1]),
        ("git.example.org", 2222, [2]),
        ("a.build.example.org", 22, [3]),
        ("bad.build.example.org", 22, []),
        ("gitxexample.org", 22, []),
        ("other.example.org", 22, []),
    ],
)
def test_keys_are_those_of_the_host(known: list[Path], host: str, port: int, keys: list[int]) -> None:
    if keys:
        assert ssh_hosts.keys_of(host, port, known) == tuple(map(key, keys))
        return
    with pytest.raises(errors.UsageError, match="no known_hosts has a key") as refused:
        ssh_hosts.keys_of(host, port, known)
    assert f"ssh-keyscan {host} >> ~/.ssh/known_hosts" in refused.value.hint


def test_names_that_openssh_hashed_are_found(known: list[Path]) -> None:
    done = subprocess.run(["/usr/bin/ssh-keygen", "-q", "-H", "-f", known[1]], capture_output=True, check=False)
    assert b"git.example.org," not in known[1].read_bytes(), done.stderr
    assert ssh_hosts.keys_of("git.example.org", 2222, known) == (key(2),)
    assert key(1) in ssh_hosts.keys_of("git.example.org", 22, known)


def test_files_are_those_of_machine_and_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/ann")
    monkeypatch.setenv("SUDO_UID", "0")
    expected = ["/etc/ssh/ssh_known_hosts", "/srv/ann/.ssh/known_hosts", "/root/.ssh/known_hosts"]
    assert list(map(str, ssh_hosts.files())) == [path + end for path in expected for end in ("", "2")]


@pytest.mark.parametrize("end", ["\v", "\f", "\x1c", "\x85", "\u2028", "\r"])
def test_comment_begins_no_line(tmp_path: Path, end: str) -> None:
    known = tmp_path / "known_hosts"
    # ssh-keyscan writes what a host said of itself into a comment.
    known.write_bytes(f"# evil.example.org:22 SSH-2.0-x{end}git.example.org {key(1)}\n".encode())
    with pytest.raises(errors.UsageError, match="no known_hosts has a key"):
        ssh_hosts.keys_of("git.example.org", 22, [known])
    known.write_bytes(f"git.example.org\t{key(1)}\r\n  \t{end}\n".encode())
    assert ssh_hosts.keys_of("git.example.org", 22, [known]) == (key(1),)


def test_letters_beyond_ascii_are_no_name(tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_bytes(f"\u212aernel.example.org {key(1)}\n".encode())
    with pytest.raises(errors.UsageError, match="no known_hosts has a key"):
        ssh_hosts.keys_of("kernel.example.org", 22, [known])


def test_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    rest = f"@revoked git.example.org {key(1)}\n"
    known.write_text(f"git.example.org {key(1)}\n" + "#" * (4 << 20) + "\n" + rest)
    with pytest.raises(errors.UsageError, match="more than"):
        ssh_hosts.keys_of("git.example.org", 22, [known])
