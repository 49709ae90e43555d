"""``known-hosts.toml`` in a home: the other hosts whose tasks are taken, and to which tasks are sent.

    name = "host1"                       # this host, as the others know it; needed to send
    [[host]]
    name = "host2"                       # the part of a display name behind `@`
    pubkey = "8opHzTAnfzRpPEx..."        # of its daemon's identity
    url = "https://host2.example:8421"   # needed to send there

Read once, at the start. Without the file this host takes no tasks of others and sends none.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from covenant.wire.a2a import push_urls
from policy import errors
from policy.capabilities import token
from sandbox.storage import atomic_file

NAME: Final = "known-hosts.toml"
_MAX_BYTES: Final = 1024 * 1024
_MOST: Final = 4096
_HOST: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")


@dataclass(frozen=True, slots=True)
class KnownHost:
    """Another host: its name, the key of its daemon, and where its daemon is reached."""

    name: str
    pubkey: str
    url: str | None


@dataclass(frozen=True, slots=True)
class KnownHosts:
    """The file's content; empty without one."""

    name: str | None = None
    hosts: Mapping[str, KnownHost] = field(default_factory=dict)

    def of(self, display: str) -> KnownHost | None:
        """Return the host that a display name names."""
        return self.hosts.get(display.partition("@")[2])


def read(home: Path) -> KnownHosts:
    """Read the file of a home.

    Raises:
        errors.SettingError: it is a symlink, another user's, readable by others, or has what cannot be used.
    """
    where = str(home / NAME)
    if not os.path.lexists(where):
        return KnownHosts()
    directory = atomic_file.open_directory(home, error=errors.SettingError)
    try:
        raw = atomic_file.read(directory, NAME, max_bytes=_MAX_BYTES, where=str(home), error=errors.SettingError)
    finally:
        os.close(directory)
    return parse(raw or b"", where=where)


def parse(raw: bytes, *, where: str) -> KnownHosts:
    """Read the file's bytes. Unknown keys are refused.

    Raises:
        errors.SettingError: as ``read``.
    """
    try:
        document = tomllib.loads(raw.decode())
    except (ValueError, RecursionError):  # no UTF-8, no TOML, or a number of thousands of digits
        raise errors.SettingError(f"{NAME} is no TOML", where=where) from None
    name, listed = document.get("name"), document.get("host", [])
    if not document.keys() <= {"name", "host"} or not isinstance(listed, list) or len(listed) > _MOST:
        raise errors.SettingError(f"{NAME} has other keys than `name` and `[[host]]`", where=where)
    if name is not None and not _is_host(name):
        raise errors.SettingError("`name` is no host's name", hint="1 to 256 of A-Z a-z 0-9 _ . -", where=where)
    hosts: dict[str, KnownHost] = {}
    for one in listed:
        host = _host(one, where)
        if host.name in hosts or host.name == name:
            raise errors.SettingError(f"the host `{host.name}` stands twice", where=where)
        hosts[host.name] = host
    return KnownHosts(name, hosts)


def _host(one: Any, where: str) -> KnownHost:
    if not isinstance(one, dict) or not one.keys() <= {"name", "pubkey", "url"} or not _is_host(one.get("name")):
        raise errors.SettingError("a `[[host]]` has `name`, `pubkey` and `url`", where=where)
    name, pubkey, url = one["name"], one.get("pubkey"), one.get("url")
    try:
        token.key_bytes(pubkey if isinstance(pubkey, str) else "")
    except token.MalformedTokenError as e:
        raise errors.SettingError(f"the `pubkey` of host `{name}`: {e}", where=where) from None
    if url is None:
        return KnownHost(name, str(pubkey), None)
    found = push_urls.parse(url) if isinstance(url, str) else None
    # Over http anyone on the way reads the task; who writes an address has a network of its own in mind.
    if found is None or found.query or (found.scheme == "http" and not found.is_address):
        raise errors.SettingError(
            f"the `url` of host `{name}` cannot be used",
            hint="https://HOST[:PORT], or http with an address",
            where=where,
        )
    return KnownHost(name, str(pubkey), str(found).rstrip("/"))


def _is_host(name: Any) -> bool:
    return isinstance(name, str) and _HOST.fullmatch(name) is not None
