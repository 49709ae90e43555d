"""Connections by the operator's proxy: CONNECT, and then the bytes of the connection (RFC 9110, section 9.3.6)."""

from __future__ import annotations

import base64
import errno
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

_HEAD_BYTES: Final = 8192
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")


class Proxy(Struct, frozen=True):
    """A proxy. ``credentials`` are `USER:PASSWORD`, or empty; ``direct`` are hosts that are reached without it."""

    host: str
    port: int
    credentials: str = ""
    direct: tuple[str, ...] = ()

    def plan(self) -> dict[str, Any]:
        """Return the proxy as a process of a gate is given it."""
        return {"host": self.host, "port": self.port, "credentials": self.credentials, "direct": list(self.direct)}

    @classmethod
    def of(cls, plan: Mapping[str, Any] | None) -> Proxy | None:
        """Return the proxy of a plan."""
        return None if plan is None else cls(**{**plan, "direct": tuple(plan["direct"])})

    def headers(self) -> dict[str, str]:
        """The headers of a request to it."""
        if not self.credentials:
            return {}
        return {"Proxy-Authorization": "Basic " + base64.b64encode(self.credentials.encode()).decode()}

    def connected(self, host: str, port: int, seconds: float) -> socket.socket:
        """Return a connection to a host by this proxy.

        Raises:
            OSError: the proxy does not answer, refuses it, or is none.
        """
        until = time.monotonic() + seconds
        made = socket.create_connection((self.host, self.port), timeout=seconds)
        try:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            lines = (f"CONNECT {where} HTTP/1.1", f"Host: {where}", *(f"{k}: {v}" for k, v in self.headers().items()))
            made.sendall("\r\n".join((*lines, "", "")).encode("latin-1"))
            found = _STATUS.match(_head(made, until))
            if found is None or not found[1].startswith(b"2"):
                raise PermissionError(errno.ECONNREFUSED, "the proxy refuses the connection")
            made.settimeout(seconds)
        except BaseException:
            made.close()
            raise
        return made


def _head(made: socket.socket, until: float) -> bytes:
    """Read the answer's head, byte by byte: what follows belongs to the connection."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        left = until - time.monotonic()
        if left <= 0 or len(head) >= _HEAD_BYTES:
            raise TimeoutError(errno.ETIMEDOUT, "the proxy does not answer in time")
        made.settimeout(left)
        byte = made.recv(1)
        if not byte:
            raise ConnectionResetError(errno.ECONNRESET, "the proxy has closed the connection")
        head += byte
    return head
