"""Which resolvers the DNS gate asks: the operator's, else those of the host, as they are at this moment."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from policy import errors
from sandbox import config as host_config
from sandbox.config import Config

HOSTS_FILE = Path("/etc/resolv.conf")
# As many as libc asks (resolv.conf(5), MAXNS).
MOST = 3
_BYTES = 64 * 1024
# A recursive query for the NS records of the root, without its id; the header of an answer, and its code for "refused".
_ROOT_SERVERS = b"\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + b"\x00" + b"\x00\x02\x00\x01"
_HEADER_BYTES, _REFUSED = 12, 5
# The interval in which the files are looked at, at most.
_LOOK_SECONDS = 1.0


def of(config: Config, *, hosts_file: Path = HOSTS_FILE) -> tuple[str, ...]:
    """Addresses, the first to be asked first; at most ``MOST``.

    Raises:
        errors.HostError: none is configured and the host names none.
    """
    if config.resolvers:
        return config.resolvers[:MOST]
    try:
        with hosts_file.open("rb") as file:
            text = file.read(_BYTES).decode("ascii", "replace")
    except OSError:
        text = ""
    found = nameservers(text)
    if not found:
        raise errors.HostError(
            f"{hosts_file} names no resolver",
            hint=f'write resolvers = ["ADDRESS"] in {host_config.file_of(config.state)}',
        )
    return found[:MOST]


class Current:
    """The resolvers of a live run: a laptop that changes networks gets others, and so does its agent.

    A call looks at the configuration and at the host's resolv.conf, at most once a second, and reads them again when
    one of them has changed. What is malformed or names no resolver changes nothing.

    Raises:
        errors.HostError: Raised when none is configured at first and the host names none.
    """

    def __init__(
        self, config: Config, *, hosts_file: Path = HOSTS_FILE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._state, self._hosts_file, self._clock = config.state, hosts_file, clock
        self._files = (config.state / "config.toml", host_config.SYSTEM_FILE, hosts_file)
        self._seen, self._next_look = self._look(), clock() + _LOOK_SECONDS
        self._found = of(config, hosts_file=hosts_file)

    def __call__(self) -> tuple[str, ...]:
        """Return the addresses, the first to be asked first."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            seen = self._look()
            if seen != self._seen:
                self._seen = seen
                self._read()
        return self._found

    def _read(self) -> None:
        try:
            self._found = of(host_config.load(self._state), hosts_file=self._hosts_file)
        except errors.CovenantError:
            return  # half written, or a network that is just going away

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(_identity(file) for file in self._files)


def fault_of(address: str, *, port: int = 53, timeout_seconds: float = 1.0) -> str:
    """Ask a resolver for the servers of the root, twice at most. Returns what is wrong with it, or nothing.

    It is asked from the calling thread's network namespace. Every answer but a refusal will do: a resolver for
    internal names may know no root.
    """
    fault = ""
    for _ in range(2):
        ident = os.urandom(2)
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as made:
                made.settimeout(timeout_seconds)
                made.connect(found[4])
                made.send(ident + _ROOT_SERVERS)
                answer = made.recv(4096)
        except TimeoutError:
            fault = "does not answer"
            continue
        except OSError as e:
            fault = f"cannot be asked: {(e.strerror or str(e)).lower()}"
            continue
        if len(answer) < _HEADER_BYTES or answer[:2] != ident or not answer[2] & 0x80:
            fault = "answers something else"
            continue
        return "refuses to answer this host" if answer[3] & 0x0F == _REFUSED else ""
    return fault


def _identity(file: Path) -> tuple[int, ...] | None:
    try:
        info = os.stat(file)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def nameservers(text: str) -> tuple[str, ...]:
    """The addresses of a resolv.conf(5), without what is none; a link-local one keeps its interface."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        words = line.split("#")[0].split(";")[0].split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                ipaddress.ip_address(words[1])
            except ValueError:
                continue
            found[words[1]] = None
    return tuple(found)
