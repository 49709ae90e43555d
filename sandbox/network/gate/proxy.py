"""Connections by the operator's proxy: CONNECT, and then the bytes of the connection (RFC 9110, section 9.3.6)."""

from __future__ import annotations

import base64
import errno
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from policy import denials
from sandbox.network.dns import names
from sandbox.network.gate import proxy_tls

# What a process that asks a proxy calls, beyond every gate's: the resolver of the C library reads its files and asks by
# sockets of its own, and each connection is made in a thread.
CALLS: Final = frozenset({
    "bind", "clone", "connect", "fstat", "getpeername", "getpid", "getsockname", "getsockopt", "gettid", "gettimeofday",
    "ioctl", "lseek", "mprotect", "newfstatat", "openat", "rseq", "rt_sigprocmask", "sched_yield", "sendmmsg",
    "sendmsg", "set_robust_list", "setsockopt", "shutdown", "socket", "socketpair", "uname",
})  # fmt: skip
# Why it made no connection, by the code of the denial.
FAULTS: Final = {
    "proxy_unreachable": "it does not answer ([proxy] url of config.toml)",
    "proxy_timeout": "it did not answer in time",
    "proxy_certificate": "its certificate is not believed ([tls] ca of config.toml)",
    "proxy_auth": "it refuses the credentials ([proxy] secret of config.toml)",
    "proxy_refused": "it refused a granted destination",
    "proxy_malformed": "it answers as no proxy does ([proxy] url of config.toml)",
}
_HEAD_BYTES: Final = 8192
# A name or an address: nothing that could end a line of the request.
_HOST: Final = re.compile(r"[A-Za-z0-9_.:-]{1,253}")
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")


class ProxyError(OSError):
    """Raised when a proxy does not make a connection. ``code`` says why, as a denial does."""

    def __init__(self, number: int, code: str, said: str) -> None:
        super().__init__(number, said)
        self.code = code


class Proxy(Struct, frozen=True):
    """A proxy. ``credentials`` are `USER:PASSWORD`, or empty; ``direct`` are hosts that are reached without it.

    With ``by_name`` it is asked for granted names, and looks them up itself; else for the addresses of names.
    ``resolves`` are patterns of names that it alone can look up. ``bundles`` are files of the authorities of a proxy
    that is spoken to over TLS; one without them is not.
    """

    host: str
    port: int
    credentials: str = ""
    direct: tuple[str, ...] = ()
    by_name: bool = False
    resolves: tuple[str, ...] = ()
    bundles: tuple[str, ...] = ()

    def plan(self) -> dict[str, Any]:
        """Return the proxy as a process of a gate is given it."""
        return {
            "host": self.host,
            "port": self.port,
            "credentials": self.credentials,
            "direct": list(self.direct),
            "by_name": self.by_name,
            "resolves": list(self.resolves),
            "bundles": list(self.bundles),
        }

    @classmethod
    def of(cls, plan: Mapping[str, Any] | None) -> Proxy | None:
        """Return the proxy of a plan. Reads the files of authorities, which a sealed gate may not.

        Raises:
            OSError: Raised when such a file is missing or holds none.
        """
        if plan is None:
            return None
        made = cls(**{**plan, **{name: tuple(plan[name]) for name in ("direct", "resolves", "bundles")}})
        if made.bundles:
            proxy_tls.context(made.bundles)
        return made

    def looks_up(self, name: str) -> bool:
        """Whether it is asked for this name, and not for an address."""
        return self.by_name or self.resolves_alone(name)

    def resolves_alone(self, name: str) -> bool:
        """Whether the operator says that it alone can look this name up."""
        return names.is_elsewhere(names.Patterns(self.resolves), name)

    def headers(self) -> dict[str, str]:
        """The headers of a request to it."""
        if not self.credentials:
            return {}
        return {"Proxy-Authorization": "Basic " + base64.b64encode(self.credentials.encode()).decode()}

    def connected(self, host: str, port: int, seconds: float) -> socket.socket:
        """Return a connection to a host by this proxy.

        Raises:
            ProxyError: Raised when the proxy does not answer, refuses it, or is none.
            OSError: Raised when its connection ends.
        """
        if not _HOST.fullmatch(host):
            raise ProxyError(errno.EINVAL, "proxy_refused", "no host for a proxy")
        until = time.monotonic() + seconds
        made = self.reached(seconds)
        try:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            lines = (f"CONNECT {where} HTTP/1.1", f"Host: {where}", *(f"{k}: {v}" for k, v in self.headers().items()))
            made.sendall("\r\n".join((*lines, "", "")).encode("latin-1"))
            found = _STATUS.match(_head(made, until))
            if found is None:
                raise ProxyError(errno.EPROTO, "proxy_malformed", "the proxy answers as none does")
            if not found[1].startswith(b"2"):
                code = "proxy_auth" if found[1] == b"407" else "proxy_refused"
                raise ProxyError(errno.ECONNREFUSED, code, "the proxy refuses the connection")
            made.settimeout(seconds)
            if isinstance(made, ssl.SSLSocket):
                return proxy_tls.RELAY.plain(made)
        except BaseException:
            made.close()
            raise
        return made

    def reached(self, seconds: float) -> socket.socket:
        """Return a connection to the proxy itself, over TLS where it is spoken to so.

        Raises:
            ProxyError: Raised when it does not answer, or is not who it should be.
        """
        until = time.monotonic() + seconds
        try:
            made = socket.create_connection((self.host, self.port), timeout=seconds)
        except OSError as e:
            raise ProxyError(e.errno or errno.ETIMEDOUT, "proxy_unreachable", "the proxy is not reached") from e
        try:
            _keep(made)
            if not self.bundles:
                return made
            made.settimeout(max(0.001, until - time.monotonic()))
            return proxy_tls.context(self.bundles).wrap_socket(made, server_hostname=self.host)
        except ssl.SSLCertVerificationError as e:
            made.close()
            raise ProxyError(errno.EACCES, "proxy_certificate", f"its certificate: {e.verify_message}") from e
        except TimeoutError as e:
            made.close()
            raise ProxyError(errno.ETIMEDOUT, "proxy_timeout", "the proxy does not answer in time") from e
        except OSError as e:
            made.close()
            raise ProxyError(errno.EPROTO, "proxy_malformed", "the proxy does not speak TLS") from e
        except BaseException:
            made.close()
            raise


class ProxyTerms(Struct, frozen=True):
    """The proxy of a run. ``failed`` is called once with each reason for which it did not make a connection."""

    proxy: Proxy
    failed: Callable[[str], None]

    def watched(self, denied: denials.Told) -> denials.Told:
        """Return ``denied``, which also reports the proxy by its place: the row of a denial has the destination."""
        known: set[str] = set()

        def told(denial: denials.Denial, *, count: int = 1) -> None:
            if denial.code in FAULTS and denial.code not in known:
                known.add(denial.code)
                self.failed(f"the proxy {self.proxy.host}:{self.proxy.port}: {FAULTS[denial.code]}")
            denied(denial, count=count)

        return told


def _keep(made: socket.socket) -> None:
    """Send each write at once, and ask a proxy that says nothing for two minutes whether it lives (tcp(7))."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)


def _head(made: socket.socket, until: float) -> bytes:
    """Read the answer's head, byte by byte: what follows belongs to the connection."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        left = until - time.monotonic()
        if left <= 0 or len(head) >= _HEAD_BYTES:
            raise ProxyError(errno.ETIMEDOUT, "proxy_timeout", "the proxy does not answer in time")
        made.settimeout(left)
        try:
            byte = made.recv(1)
        except TimeoutError as e:
            raise ProxyError(errno.ETIMEDOUT, "proxy_timeout", "the proxy does not answer in time") from e
        if not byte:
            raise ProxyError(errno.ECONNRESET, "proxy_malformed", "the proxy has closed the connection")
        head += byte
    return head
