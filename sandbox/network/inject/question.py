"""The question to an operator about a request: its method and path, a digest of all else that is sent, and a view."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from aiohttp import web

from policy.leases import targets
from policy.signing.lease import TARGET_CHARACTERS
from sandbox.network.inject.judge import Headers, RequestRefusedError
from sandbox.network.inject.line import HeldQuestion

# A longer body is not kept while an operator is asked.
BODY_BYTES: Final = 64 << 10
# An operator need not see them. The digest is of them too.
_UNSHOWN: Final = frozenset({"accept", "accept-language", "user-agent"})
_HTTPS: Final = 443


async def body_of(request: web.BaseRequest) -> bytes:
    """Read the body of a request that is to be held.

    Raises:
        RequestRefusedError: it is longer than what is kept, or of no stated length.
    """
    if not request.body_exists:
        return b""
    length = request.content_length
    if length is None or length > BODY_BYTES:
        message = f"a request that waits for an operator states its length, of at most {BODY_BYTES} bytes"
        raise RequestRefusedError(413, "not_held", message)
    if "Expect" in request.headers:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await request.content.read(-1)


def of(method: str, host: str, port: int, raw_path: str, headers: Headers, body: bytes) -> HeldQuestion:
    """Return what an operator is asked about a request. ``headers`` are those that are passed on, and the agent's own
    value of the gate's header where a token is sent in the place of the secret.

    Raises:
        RequestRefusedError: its path is too long for a lease.
    """
    path, _, query = raw_path.partition("?")
    # Values of one name keep their order: some hosts take the first, and some the last.
    named = sorted(((name.lower(), value) for name, value in headers), key=lambda one: one[0])
    whole: dict[str, Any] = {"query": query, "headers": named, "body": hashlib.sha256(body).hexdigest(), "port": port}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    if len(targets.call(targets.request(method, host, path), digest)) > TARGET_CHARACTERS:
        raise RequestRefusedError(414, "not_held", "the path is too long for a request that waits for an operator")
    shown = {
        "port": 0 if port == _HTTPS else port,
        "query": query,
        "headers": _by_name(named),
        "body": body.decode("utf-8", "replace"),
    }
    said = json.dumps({name: value for name, value in shown.items() if value})
    return HeldQuestion(host, method, path, digest, targets.view(said, len(query) + len(body)))


def _by_name(named: Headers) -> dict[str, str | list[str]]:
    """The headers that are shown: a name that is written twice has all of its values."""
    found: dict[str, list[str]] = {}
    for name, value in named:
        if name not in _UNSHOWN:
            found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}
