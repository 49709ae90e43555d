"""TLS servers that say which name they were asked for, do as they are told, and keep what came before TLS.

Each listens in a namespace that a test made. A client's first line is a command: ``name``, ``echo``, ``give BYTES``,
``take BYTES``, ``end BYTES`` (end its own side, then take and say nothing). A server without a context answers a hello
with a made-up ServerHello and goes on in clear, which shows what a gate does with bytes alone.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sandbox.network.tls.client_hello import HelloReader, Refused
from tests import hello_kit

CHUNK = b"0123456789abcdef" * 4096


class Certificates:
    """A key and a self-signed certificate of these names; ``path`` has both, and is what a client trusts."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.path = directory / "certificate.pem"
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"a test of {names[0]}"[:64])])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
            .sign(key, hashes.SHA256())
        )
        form = serialization.Encoding.PEM
        secret = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.path.write_bytes(secret + made.public_bytes(form))

    def server(self, *, groups: str | None = None) -> ssl.SSLContext:
        """A server's context; ``groups`` that a client does not begin with make it ask for a second hello."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path)
        if groups is not None:
            context.set_ecdh_curve(groups)
        return context

    def client(self, *, names: bool = True) -> ssl.SSLContext:
        """A client's context."""
        context = ssl.create_default_context(cafile=str(self.path))
        context.check_hostname = names
        return context


class Server:
    """Serves listening sockets by threads until it is closed.

    ``names`` are those that clients asked for, ``taken`` counts what came by ``end``.
    """

    def __init__(self, listeners: Sequence[socket.socket], context: ssl.SSLContext | None) -> None:
        self._listeners, self._context = listeners, context
        self.names: list[str | None] = []
        self.taken: list[int] = []
        self.accepted = 0
        if context is not None:
            context.sni_callback = lambda one, name, context: self.names.append(name)
        self._threads = [threading.Thread(target=self._accept, args=(one,), daemon=True) for one in listeners]
        for thread in self._threads:
            thread.start()

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(None)
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._serve, args=(taken,), daemon=True).start()

    def _serve(self, taken: socket.socket) -> None:
        with taken, contextlib.suppress(OSError, Refused):
            taken.settimeout(60)
            if self._context is None:
                self._in_clear(taken)
                return
            with self._context.wrap_socket(taken, server_side=True) as secure:
                self._obey(secure)

    def _in_clear(self, taken: socket.socket) -> None:
        reader = HelloReader()
        while (hello := reader.feed(taken.recv(1))) is None:
            pass
        self.names.append(hello.name)
        taken.sendall(hello_kit.server_hello())
        self._obey(taken)

    def _obey(self, one: socket.socket) -> None:
        line = bytearray()
        while not line.endswith(b"\n"):
            got = one.recv(1)
            if not got:
                return
            line += got
        verb, _, size = line.decode().strip().partition(" ")
        if verb == "name":
            one.sendall(str(self.names[-1]).encode())
        elif verb == "echo":
            while data := one.recv(65536):
                one.sendall(data)
        elif verb == "give":
            give(one, int(size))
        elif verb == "take":
            one.sendall(str(take(one, int(size))).encode())
        elif verb == "end":
            one.shutdown(socket.SHUT_WR)
            self.taken.append(take(one, int(size)))

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join(10)


def give(to: socket.socket, size: int) -> None:
    """Send so many bytes."""
    left = size
    while left:
        sent = CHUNK[: min(left, len(CHUNK))]
        to.sendall(sent)
        left -= len(sent)


def take(whence: socket.socket, size: int) -> int:
    """Receive up to so many bytes; how many they were."""
    got = 0
    while got < size and (data := whence.recv(min(262144, size - got))):
        got += len(data)
    return got


@contextlib.contextmanager
def serving(context: ssl.SSLContext | None, *listeners: socket.socket) -> Iterator[Server]:
    """A server while the block lasts."""
    server = Server(listeners, context)
    try:
        yield server
    finally:
        server.close()
