"""Which resolvers the DNS gate asks: the operator's, else those of the host."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from policy import errors
from sandbox.config import Config

HOSTS_FILE = Path("/etc/resolv.conf")
# As many as libc asks (resolv.conf(5), MAXNS).
MOST = 3
_BYTES = 64 * 1024


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
            hint='write resolvers = ["ADDRESS"] in the supervisor\'s config.toml',
        )
    return found[:MOST]


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
