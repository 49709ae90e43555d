"""Keys, bindings and logins of SSH, made for tests as a client and a host make them."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from policy.ssh import sessions, wire
from policy.ssh.sessions import Binding, Hosts, SignRequest
from sandbox.network.ssh import private_keys

SESSION, OTHER_SESSION = b"s" * 32, b"t" * 32
OWN = ed25519.Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
HOST = ed25519.Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
OTHER_HOST = ec.derive_private_key(3, ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)
ROWS = [("deploy", "git.example.org", wire.write_line(private_keys.public(HOST)))]
HOSTS = Hosts(ROWS)


def binding(host: private_keys.Private = HOST, session: bytes = SESSION) -> Binding:
    """A session that a host has signed."""
    blob = private_keys.public(host)
    algorithm = "rsa-sha2-512" if wire.key_type(blob) == wire.RSA else wire.key_type(blob)
    return Binding(blob, session, private_keys.sign(host, algorithm, session))


def login(
    *,
    key: private_keys.Private = OWN,
    session: bytes = SESSION,
    algorithm: str = "ssh-ed25519",
    service: str = "ssh-connection",
    method: str = "publickey",
    host_key: bytes = b"",
    user: str = "git",
) -> bytes:
    """The data that a client asks to be signed."""
    parts = (user, service, method)
    data = wire.string(session) + bytes([50]) + b"".join(map(wire.string, parts)) + b"\1"
    data += wire.string(algorithm) + wire.string(private_keys.public(key))
    return data + (wire.string(host_key) if method == sessions.BOUND_METHOD else b"")


def request(
    data: bytes, *, key: private_keys.Private = OWN, flags: int = 0, bound: Binding | None = None
) -> SignRequest:
    """A request for a signature in a bound session."""
    return SignRequest(private_keys.public(key), data, flags, bound or binding())


def extension(bound: Binding, *, forwarded: int = 0) -> bytes:
    """The message that binds a connection."""
    parts = (b"session-bind@openssh.com", bound.host_key, bound.session, bound.signature)
    return bytes([27]) + b"".join(map(wire.string, parts)) + bytes([forwarded])


def signing(data: bytes, *, key: private_keys.Private = OWN, flags: int = 0) -> bytes:
    """The message that asks for a signature."""
    return bytes([13]) + wire.string(private_keys.public(key)) + wire.string(data) + flags.to_bytes(4, "big")
