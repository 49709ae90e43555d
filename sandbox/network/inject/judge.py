"""Judge a request to an injected host, and say which of its headers and of its answer's are passed on. Pure.

Nothing is repaired: a request that the gate and the host could read in two ways is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from policy.grants.credentials import InjectRule

Headers = Sequence[tuple[str, str]]

# Headers between two neighbours (RFC 9110, 7.6.1), and what the gate writes itself.
_HOP: Final = frozenset({
    "accept-encoding", "connection", "content-length", "expect", "host", "http2-settings", "keep-alive",
    "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
# A part of an answer could begin in the middle of a secret, where it is not found.
_PARTS: Final = frozenset({"if-range", "range", "request-range"})
# A server that takes one of these would do another request than the one that was judged.
_OVERRIDES: Final = frozenset({
    "x-http-method", "x-http-method-override", "x-method-override", "x-original-url", "x-rewrite-url",
    "x-forwarded-host", "x-forwarded-prefix", "x-forwarded-uri", "x-original-uri", "x-original-method", "x-host",
})  # fmt: skip
_ANSWER_DROPPED: Final = frozenset({
    "alt-svc", "connection", "content-length", "keep-alive", "proxy-authenticate", "proxy-connection", "set-cookie",
    "set-cookie2", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_REFUSED: Final = ("upgrade", "http2-settings", "proxy-authorization", "trailer", "te", "content-encoding")
# A row of the log has it.
PATH_BYTES: Final = 2048
_TARGET = re.compile(r"/[!-~]*")
_DOTS = re.compile(r"(?i)(?:^|/|%2f|\\|%5c)(?:\.|%2e){1,2}(?:$|[/;\\]|%2f|%5c|%3b)")
_ODD = re.compile(r"(?i)//|\\|%5c|%00|%0[ad]|#|[\"<>^`{|}]|%(?![0-9a-f]{2})")
# What stands for a character that a rule of paths means by itself: the host could read another path.
_HIDDEN = re.compile(r"(?i)%(?:2[1-9a-f]|3[0-9b]|3d|4[0-9a-f]|5[0-9a]|5f|6[1-9a-f]|7[0-9ae])")


class RequestRefusedError(Exception):
    """A request that is not passed on: the status and the words for the agent, and the code of the denial."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Frame(Protocol):
    """The part of a request that is judged."""

    @property
    def method(self) -> str: ...
    @property
    def raw_path(self) -> str: ...
    @property
    def version(self) -> tuple[int, int]: ...


def frame(request: Frame, headers: Headers, host: str, port: int) -> None:
    """Refuse what could be understood in two ways, or is meant for another server.

    Raises:
        RequestRefusedError: it is so.
    """
    lower = [name.lower() for name, _ in headers]
    if tuple(request.version) != (1, 1) or not _TARGET.fullmatch(request.raw_path):
        raise RequestRefusedError(400, "frame_refused", "the gate takes a path, by HTTP/1.1")
    hosts = [value for name, value in headers if name.lower() == "host"]
    if len(hosts) != 1 or hosts[0].lower() not in (host, f"{host}:{port}"):
        raise RequestRefusedError(421, "host_refused", f"the connection is to {host}, and so is the header Host")
    for name in _REFUSED:
        if name in lower:
            raise RequestRefusedError(400, "frame_refused", f"the header {name} is not taken")
    if any(name.lower() == "expect" and value.lower() != "100-continue" for name, value in headers):
        raise RequestRefusedError(417, "frame_refused", "the header Expect is 100-continue, or none")
    if lower.count("content-length") + lower.count("transfer-encoding") > 1:
        raise RequestRefusedError(400, "frame_refused", "a body has one length")
    if any("_" in name for name in lower):
        # Some servers take `_` for `-`: then it would be another header (RFC 3875, 4.1.18).
        raise RequestRefusedError(400, "frame_refused", "a header's name has no `_`")
    if any(not value.isprintable() for _, value in headers):
        raise RequestRefusedError(400, "frame_refused", "a header's value is one line of text")


def granted(method: str, raw_path: str, rules: Iterable[InjectRule], asked: Iterable[InjectRule] = ()) -> bool:
    """Refuse a request that no rule covers. Returns whether one of ``rules`` does: else an operator is asked.

    Raises:
        RequestRefusedError: none does, or its path could be read as another one.
    """
    path = raw_path.partition("?")[0]
    if len(path) > PATH_BYTES:
        raise RequestRefusedError(414, "path_refused", f"a path has at most {PATH_BYTES} bytes")
    if _DOTS.search(path) or _ODD.search(path):
        raise RequestRefusedError(403, "path_refused", "the path could be read as another one")
    plainly = [one for one in rules if one.takes(method, path)]
    found = plainly or [one for one in asked if one.takes(method, path)]
    if not found or method in ("CONNECT", "TRACE"):
        raise RequestRefusedError(403, "request_not_granted", f"{method} {path} is not granted with a secret")
    if _HIDDEN.search(path) and not any(one.path == "/*" for one in found):
        raise RequestRefusedError(
            403, "path_refused", "the path could be read as another one: write plain characters plainly"
        )
    return bool(plainly)


def passed_on(headers: Headers, own: str) -> list[tuple[str, str]]:
    """The headers of a request that the host gets; ``own`` is the one that the gate writes."""
    dropped = _HOP | _OVERRIDES | _PARTS | {own.lower()} | _named(headers)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def passed_back(headers: Headers) -> list[tuple[str, str]]:
    """The headers of an answer that the agent gets. A session that began with the secret is no agent's either."""
    dropped = _ANSWER_DROPPED | _named(headers)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _named(headers: Headers) -> set[str]:
    """The headers that a Connection header names: they are for a neighbour."""
    lists = (value for name, value in headers if name.lower() == "connection")
    # A message's own headers are none of a neighbour's: a name here must not take them away.
    return {one.strip().lower() for value in lists for one in value.split(",")} - {"content-type", "content-encoding"}


def kind_of(headers: Mapping[str, str]) -> str:
    """The media type of an answer, in lower case."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()
