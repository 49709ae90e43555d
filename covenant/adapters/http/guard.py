"""Checks before authentication: refuse pages of other origins and requests that a proxy may misread.

Every page in the user's browser can reach a server on the loopback. These checks run before the token is read. So
neither DNS rebinding nor a form, image or script of another origin reaches the token check. All functions are pure: a
request's head in, a refusal out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from multidict import CIMultiDict, CIMultiDictProxy

from policy import errors

BODY_BYTES: Final = 8 * 1024 * 1024
# Only these names mean this machine. RFC 9110, section 7.2: Host is the host that the client asked for.
CONSOLE: Final = "/console/"
LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
_ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9-]+(?:\.[a-z0-9-]+)*|\[[0-9a-f:]+\])(?::[0-9]{1,5})?")
# The second is A2A's own name for JSON.
_JSON: Final = re.compile(r'application/(?:json|a2a\+json)(?:\s*;\s*charset="?utf-8"?)?\s*', re.IGNORECASE)
# A query goes into histories, referrers and logs: RFC 6750, section 5.3, and OAuth 2.1 forbid tokens there.
_CREDENTIALS: Final = frozenset({"access_token", "authorization", "bearer", "token", "token_b58"})
_METHODS: Final = "GET, POST, OPTIONS"
_HEADERS: Final = "authorization, content-type, last-event-id"
_PREFLIGHT_SECONDS: Final = "600"


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its body. ``has_body`` as its headers say."""

    method: str
    target: str
    headers: CIMultiDictProxy[str] | CIMultiDict[str]
    query_names: Collection[str] = ()
    has_body: bool = False
    version: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Guard:
    """The checks of one gateway.

    Args:
        port: where it listens; a Host with another port is refused.
        origins: the origins whose pages may send requests, in the form that browsers send.
    """

    port: int
    origins: frozenset[str]

    def check(self, head: Head) -> None:
        """Raise unless the request may reach the token check.

        (1) HTTP/1.0 or 1.1, and a target that is a path of this server. (2) Host: exactly one, a name of the loopback
        with our port. (3) Origin: none, or a listed one. (4) Fetch metadata of a request without Origin: not from
        another site. (5) no upgrade, (6) no token in the query. (7) body: uncompressed JSON within the maximum length,
        and none with GET.

        Raises:
            errors.HttpRefusedError: with the ``status`` of the response.
        """
        # (1) llhttp accepts an HTTP/0.9 with headers, unlike other parsers. The absolute form of a target would name a
        # second authority besides Host (RFC 9112, section 3.2.2).
        if head.version not in ((1, 0), (1, 1)):
            raise _refused(400, "this is HTTP/1.1")
        if not head.target.startswith("/"):
            raise _refused(400, "the request's target is not a path")
        # (2)
        self._check_host(head)
        # (3)
        origin = self.origin(head)
        # (4) Images, frames and forms of another page send no Origin with GET, but do send their site:
        # https://www.w3.org/TR/fetch-metadata/
        site = _one(head, "Sec-Fetch-Site")
        if site is not None and site not in ("same-origin", "none") and origin is None:
            raise _refused(403, "another site's page may not ask here")
        # (5)
        if "Upgrade" in head.headers:
            raise _refused(400, "no other protocol is spoken here")
        # (6)
        if not _CREDENTIALS.isdisjoint(name.lower() for name in head.query_names):
            raise _refused(400, "a token does not belong into a query", hint="send `Authorization: Bearer TOKEN`")
        # (7)
        self._check_body(head)

    def _check_host(self, head: Head) -> None:
        hosts = head.headers.getall("Host", [])
        if len(hosts) != 1:
            raise _refused(400, "a request has one Host")
        name, _, port = hosts[0].lower().rpartition(":")
        if port == "" or hosts[0].endswith("]"):
            name, port = hosts[0].lower(), "80"
        if name not in LOCAL_NAMES or port != str(self.port):
            raise _refused(421, "this is not the host that was asked for", hint=f"ask 127.0.0.1:{self.port}")

    def origin(self, head: Head) -> str | None:
        """Return the origin of the requesting page if it is listed; None without one, or for the console's own page.

        Raises:
            errors.HttpRefusedError: it is not listed, or there are several.
        """
        origin = _one(head, "Origin")
        if (
            origin is not None
            and head.target.startswith(CONSOLE)
            and origin == f"http://{head.headers['Host'].lower()}"
        ):
            return None
        if origin is not None and origin not in self.origins:
            # Refuse instead of only leaving out CORS headers: some GET requests have effects.
            raise _refused(403, "this origin may not ask here", hint="list it in COVENANT_HTTP_ORIGINS")
        return origin

    @staticmethod
    def _check_body(head: Head) -> None:
        if head.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _refused(415, "bodies are read as they are, not compressed")
        length = _one(head, "Content-Length")
        if length is not None and (not length.isdecimal() or len(length) > 18 or int(length) > BODY_BYTES):
            raise _refused(413, "a body has at most 8 MiB")
        kind = _one(head, "Content-Type")
        if not head.has_body:
            return
        if head.method == "GET":
            raise _refused(400, "GET has no body")
        # Excludes the three types that a form can send to another origin without a preflight.
        if kind is None or not _JSON.fullmatch(kind):
            raise _refused(415, "a body is application/json")

    def cors(self, origin: str | None, *, preflight: bool = False) -> dict[str, str]:
        """Return the headers that let a listed origin's page read the response."""
        headers = {"Vary": "Origin"}
        if origin is None:
            return headers
        headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Credentials": "true"}
        if preflight:
            headers |= {
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": _HEADERS,
                "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
            }
        return headers


def origins(words: Sequence[str]) -> tuple[frozenset[str], list[str]]:
    """Split words into valid origins and others: paths, wildcards, `null`, other schemes."""
    good, bad = set[str](), list[str]()
    for word in filter(None, (word.strip() for word in words)):
        if _ORIGIN.fullmatch(word) and _port_is_one(word):
            good.add(word)
        else:
            bad.append(word)
    return frozenset(good), bad


def bearer(headers: CIMultiDictProxy[str] | CIMultiDict[str]) -> str:
    """Return the token of `Authorization: Bearer TOKEN`; the scheme in any case.

    Raises:
        errors.AuthenticationError: there is none, or more than one.
    """
    values = headers.getall("Authorization", [])
    if len(values) != 1:
        raise errors.AuthenticationError(
            "missing bearer token" if not values else "malformed: more than one Authorization header"
        )
    scheme, _, token = values[0].partition(" ")
    token = token.strip(" ")
    if scheme.lower() != "bearer" or not token:
        raise errors.AuthenticationError("malformed Authorization header: no bearer token")
    return token


def _port_is_one(origin: str) -> bool:
    """Whether the port has the form that browsers send: the scheme's own port is left out."""
    try:
        parts = urlsplit(origin)
        return parts.port is None or (parts.port > 0 and f"{parts.scheme}:{parts.port}" not in ("http:80", "https:443"))
    except ValueError:
        return False


def _one(head: Head, name: str) -> str | None:
    values = head.headers.getall(name, [])
    if len(values) > 1:
        raise _refused(400, f"the header {name} stands twice")
    return values[0] if values else None


def _refused(status: int, message: str, *, hint: str = "") -> errors.HttpRefusedError:
    return errors.HttpRefusedError(message, hint=hint, status=status)
