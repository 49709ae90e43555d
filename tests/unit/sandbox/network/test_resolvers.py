"""Which resolvers are asked."""

from __future__ import annotations

import pathlib

import pytest

from policy import errors
from sandbox import config
from sandbox.network import resolvers

STATE = pathlib.Path("/nowhere")


def parsed(text: str) -> config.Config:
    """The configuration in ``text``."""
    return config.parse(text.encode(), file="config.toml", state=STATE)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nameserver 192.0.2.1\n", ("192.0.2.1",)),
        ("# nameserver 192.0.2.9\nnameserver 192.0.2.1 # one\n;nameserver 192.0.2.8\n", ("192.0.2.1",)),
        ("nameserver\t2001:db8::1\nnameserver fe80::1%eth0\n", ("2001:db8::1", "fe80::1%eth0")),
        ("nameserver 192.0.2.1\nnameserver 192.0.2.1\n", ("192.0.2.1",)),
        ("search example.com\nnameserver resolver.example\nnameservers 192.0.2.1\nnameserver\n", ()),
        ("", ()),
    ],
)
def test_hosts_file(text: str, found: tuple[str, ...]) -> None:
    assert resolvers.nameservers(text) == found


def test_operators_come_first(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 192.0.2.1\n" * 2 + "nameserver 192.0.2.2\nnameserver 192.0.2.3\nnameserver 192.0.2.4\n")
    assert resolvers.of(parsed(""), hosts_file=file) == ("192.0.2.1", "192.0.2.2", "192.0.2.3")
    assert resolvers.of(parsed('resolvers = ["192.0.2.7"]'), hosts_file=file) == ("192.0.2.7",)


def test_none_at_all_is_error(tmp_path: pathlib.Path) -> None:
    for file in (tmp_path / "missing", tmp_path / "empty"):
        if file.name == "empty":
            file.write_text("options edns0\n")
        with pytest.raises(errors.HostError, match="names no resolver"):
            resolvers.of(parsed(""), hosts_file=file)


@pytest.mark.parametrize("text", ['resolvers = ["resolver.example"]', 'resolvers = "192.0.2.1"', "resolvers = [1]"])
def test_resolver_is_address(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="resolvers"):
        parsed(text)


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_change_of_hosts_file_is_seen(tmp_path: pathlib.Path) -> None:
    file, clock = tmp_path / "resolv.conf", Clock()
    file.write_text("nameserver 192.0.2.1\n")
    current = resolvers.Current(config.Config(state=tmp_path), hosts_file=file, clock=clock)
    assert current() == ("192.0.2.1",)
    # As network managers do it: another file takes the name.
    (tmp_path / "new").write_text("nameserver 192.0.2.22\n")
    (tmp_path / "new").rename(file)
    clock.now = 0.9
    assert current() == ("192.0.2.1",)
    clock.now = 1.0
    assert current() == ("192.0.2.22",)


def test_file_that_is_gone_or_empty_changes_nothing(tmp_path: pathlib.Path) -> None:
    file, clock = tmp_path / "resolv.conf", Clock()
    file.write_text("nameserver 192.0.2.1\n")
    current = resolvers.Current(config.Config(state=tmp_path), hosts_file=file, clock=clock)
    file.write_text("")
    clock.now = 1.0
    assert current() == ("192.0.2.1",)
    file.unlink()
    clock.now = 2.0
    assert current() == ("192.0.2.1",)
    file.write_text("nameserver 192.0.2.3\n")
    clock.now = 3.0
    assert current() == ("192.0.2.3",)


def test_change_of_configuration_is_seen(tmp_path: pathlib.Path) -> None:
    file, clock, settings = tmp_path / "resolv.conf", Clock(), tmp_path / "config.toml"
    file.write_text("nameserver 192.0.2.1\n")
    settings.write_text('resolvers = ["192.0.2.7"]\n')
    settings.chmod(0o600)
    current = resolvers.Current(config.load(tmp_path), hosts_file=file, clock=clock)
    assert current() == ("192.0.2.7",)
    settings.write_text('resolvers = ["192.0.2.8", "192.0.2.9"]\n')
    clock.now = 1.0
    assert current() == ("192.0.2.8", "192.0.2.9")
    settings.write_text("resolvers = [")
    clock.now = 2.0
    assert current() == ("192.0.2.8", "192.0.2.9")
