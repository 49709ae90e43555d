"""The URLs that push notifications may go to: those below an address that the operator listed, and no other.

A URL is compared with a rule part by part, in one strict form, so that no second reader understands it otherwise. An
address that is not public is reached only where the operator wrote that address itself, never through a name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

from covenant.wire.a2a import faults
from policy.grants.sets import addresses

_URL: Final = re.compile(
    r"(https?)://([a-z0-9](?:[a-z0-9.-]{0,252}[a-z0-9])?|\[[0-9a-f:.]{2,45}\])(?::([0-9]{1,5}))?"
    r"(/[A-Za-z0-9._~!$&'()*+,;=:@/%-]*)?(\?[A-Za-z0-9._~!$&'()*+,;=:@/%?-]*)?"
)
_PORTS: Final = {"http": 80, "https": 443}
_HARD: Final = re.compile(r"[/\\\x00-\x1f]")


class PushUrl(NamedTuple):
    """A URL in its one form. ``host`` is a name or an address without brackets."""

    scheme: str
    host: str
    port: int
    path: str
    query: str

    @property
    def is_address(self) -> bool:
        """Whether the host is an address."""
        return _address(self.host) is not None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}{self.query}"


def parse(text: str) -> PushUrl | None:
    """Return a URL in its one form; None for one with a user, a fragment, dots as segments or another scheme."""
    found = _URL.fullmatch(text)
    if found is None:
        return None
    scheme, host, port, path, query = found.groups()
    number = _PORTS[scheme] if port is None else int(port)
    # A segment that is decoded once more by the receiver must not leave the rule's path.
    segments = [unquote(segment, errors="replace") for segment in (path or "/").split("/")]
    if not 0 < number < 65536 or any(one in (".", "..") or _HARD.search(one) or "%" in one for one in segments):
        return None
    bare = host.strip("[]")
    address = _address(bare)
    if (address is None and host.startswith("[")) or (address is not None and (address.version == 6) != ("[" in host)):
        return None
    return PushUrl(scheme, str(address or bare), number, path or "/", query or "")


def rules(words: Sequence[str]) -> tuple[tuple[PushUrl, ...], list[str]]:
    """Split words into rules and others. A rule is a URL without a query; its path is a prefix of whole segments."""
    good, bad = list[PushUrl](), list[str]()
    for word in filter(None, (word.strip() for word in words)):
        found = parse(word)
        if found is None or found.query:
            bad.append(word)
        else:
            good.append(found)
    return tuple(good), bad


def check(allowed: Sequence[PushUrl], text: str) -> PushUrl:
    """Return a URL in its one form if a rule admits it.

    Raises:
        errors.HttpRefusedError: the operator lists no URL, or none that this one is below.
    """
    if not allowed:
        raise faults.refused(
            faults.NO_PUSH, "this daemon sends no push notifications", hint="the operator sets COVENANT_A2A_PUSH_URLS"
        )
    url = parse(text)
    if url is None or not any(_below(url, rule) for rule in allowed):
        raise faults.refused(
            faults.INVALID_PARAMS,
            "push notifications may not go to this URL",
            hint="the operator lists it in COVENANT_A2A_PUSH_URLS",
        )
    return url


def is_public(address: str) -> bool:
    """Whether an address is one of the public ones of the internet (``policy.grants.sets.addresses``)."""
    found = _address(address.partition("%")[0])
    if found is None:
        return False
    first, last = addresses.span(ipaddress.ip_network(found))
    return any(low <= first and last <= high for low, high in addresses.PUBLIC)


def _below(url: PushUrl, rule: PushUrl) -> bool:
    return url[:3] == rule[:3] and (url.path == rule.path or url.path.startswith(rule.path.rstrip("/") + "/"))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
