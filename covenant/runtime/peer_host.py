"""Post an envelope to the daemon of another host. Its answer is not trusted: only its status is read."""

from __future__ import annotations

from http import HTTPStatus

import aiohttp


async def post(url: str, body: bytes, *, seconds: float) -> tuple[str, str]:
    """Post an envelope. Returns the outcome and the reason, as version 1 writes them.

    No redirect is followed, and no setting of the environment used.
    """
    timeout = aiohttp.ClientTimeout(total=seconds)
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            if answer.status == HTTPStatus.ACCEPTED:
                return "delivered", ""
            return "refused", "remote_refused" if answer.status == HTTPStatus.FORBIDDEN else "remote_error"
    except TimeoutError:
        return "unreachable", "timeout"
    except (aiohttp.ClientError, OSError):
        return "unreachable", "transport"
