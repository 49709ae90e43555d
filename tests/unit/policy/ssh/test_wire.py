"""Bytes of SSH: one form for each key, and no key of another form."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from policy.ssh import wire
from sandbox.network.ssh import private_keys
from tests import ssh_kit

LINE = wire.write_line(private_keys.public(ssh_kit.HOST))
POINT = wire.string("nistp256") + wire.string(b"\4" + b"x" * 64)


@pytest.mark.parametrize("kind", [("ed25519",), ("ecdsa", "-b", "384"), ("ecdsa", "-b", "521"), ("rsa", "-b", "2048")])
def test_keys_are_those_of_openssh(kind: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", *kind, "-N", "", "-C", "", "-f", str(path)], check=True)
    line = path.with_suffix(".pub").read_text().strip()
    blob = private_keys.public(private_keys.load(path.read_bytes()))
    assert wire.read_line(line) == blob
    shown = subprocess.run(["ssh-keygen", "-l", "-f", str(path)], capture_output=True, text=True, check=True).stdout
    assert wire.fingerprint(blob) == shown.split()[1]


@pytest.mark.parametrize(
    "line",
    [
        "",
        LINE + " comment",
        " " + LINE,
        LINE + "\n",
        LINE.replace("ssh-ed25519", "ssh-rsa"),
        LINE[:-1],
        LINE[:-4],
        LINE + "AAAA",
        "ssh-ed25519 " + "=" * 4,
        "ssh-ed25519 \u00e4",
        "x" * 2_000,
    ],
)
def test_other_line_is_no_key(line: str) -> None:
    assert wire.read_line(LINE)
    with pytest.raises(wire.WireError):
        wire.read_line(line)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        wire.string("ssh-dss") + wire.string(b"x"),
        wire.string("ssh-ed25519") + wire.string(b"x" * 31),
        wire.string("ssh-ed25519") + wire.string(b"x" * 32) + b"x",
        wire.string("ssh-ed25519-cert-v01@openssh.com") + wire.string(b"x" * 32),
        wire.string("ecdsa-sha2-nistp384") + POINT,
        wire.string("ecdsa-sha2-nistp256") + POINT.replace(b"\4x", b"\2x"),
        wire.string("ssh-rsa") + wire.integer(65537) + wire.integer(1 << 1023),
        wire.string("ssh-rsa") + wire.integer(65537) + wire.integer(1 << 8192),
        wire.string("ssh-rsa") + wire.integer(1) + wire.integer(1 << 2047),
        wire.string("ssh-rsa") + wire.string(b"\0\3") + wire.integer(1 << 2047),
        wire.string("ssh-rsa") + wire.string(b"\xff") + wire.integer(1 << 2047),
    ],
)
def test_other_bytes_are_no_key(blob: bytes) -> None:
    assert wire.key_type(wire.string("ecdsa-sha2-nistp256") + POINT) == "ecdsa-sha2-nistp256"
    with pytest.raises(wire.WireError):
        wire.key_type(blob)


def test_number_is_written_as_it_is_read() -> None:
    for value in (1, 127, 128, 255, 256, 1 << 2047):
        assert wire.Reader(wire.integer(value)).integer() == value


def test_flag_is_zero_or_one() -> None:
    assert [wire.Reader(bytes([one])).flag() for one in (0, 1)] == [False, True]
    with pytest.raises(wire.WireError):
        wire.Reader(b"\2").flag()
