"""Which signature an agent may have: one for its own login in a session that a named host has signed.

A session is bound by the extension ``session-bind@openssh.com`` of OpenSSH (PROTOCOL.agent, section 1): the host's key,
the session's id, and the host's signature over that id. An id is the hash of a key exchange, which holds both sides'
fresh values (RFC 4253, section 7.2): a signature for one session is of no use in another one, or at another host.

The same checks are made twice: by the gate, which reads the agent's bytes, and by the process that signs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from policy.ssh import keys, wire

USERAUTH_REQUEST: Final = 50
SERVICE: Final = "ssh-connection"
METHOD, BOUND_METHOD = "publickey", "publickey-hostbound-v00@openssh.com"
# Flags of a request: the hash of an RSA signature. Without one it would be SHA-1.
FLAGS: Final[Mapping[int, str]] = {2: "rsa-sha2-256", 4: "rsa-sha2-512"}
# An id is a digest of the key exchange.
SESSION_BYTES: Final = (20, 64)
USER_BYTES: Final = 255
# A key of RSA with 8192 bits, twice, and its session; a certificate has no place here.
DATA_BYTES: Final = 4_096

# Codes of denials.
HOST_NOT_GRANTED: Final = "host_not_granted"
NOT_BOUND: Final = "not_bound"
FORWARDED: Final = "forwarded"
BINDING_REFUSED: Final = "binding_refused"
NOT_A_LOGIN: Final = "not_a_login"
SESSION_REFUSED: Final = "session_refused"
ALGORITHM_REFUSED: Final = "algorithm_refused"
KEY_NOT_GRANTED: Final = "key_not_granted"


class RefusedError(Exception):
    """Raised when a request is refused: the code of the denial, and its target."""

    def __init__(self, code: str, target: str) -> None:
        super().__init__(code)
        self.code, self.target = code, target


class Binding(Struct, frozen=True):
    """A session and the host whose key signed its id."""

    host_key: bytes
    session: bytes
    signature: bytes

    @classmethod
    def read(cls, fields: wire.Reader, hosts: Hosts) -> Binding:
        """Read the contents of the extension, and check them.

        Raises:
            wire.WireError: it is malformed.
            RefusedError: the session is a forwarded one, or ``check`` refuses it.
        """
        made = cls(fields.string(), fields.string(), fields.string())
        forwarded = fields.flag()
        fields.end()
        if forwarded:
            raise RefusedError(FORWARDED, _shown(made.host_key))
        made.check(hosts)
        return made

    def check(self, hosts: Hosts) -> tuple[str, tuple[str, ...]]:
        """Check that a named host has signed the session. Returns the host's name and its secrets.

        The key is looked up first: no signature is verified by a key that an agent has made up.

        Raises:
            RefusedError: the host is not named, the signature is not its own, or the id is none of a session.
        """
        found = hosts.at(self.host_key)
        least, most = SESSION_BYTES
        if not least <= len(self.session) <= most or not keys.verifies(self.host_key, self.signature, self.session):
            raise RefusedError(BINDING_REFUSED, _shown(self.host_key))
        return found


class Login(Struct, frozen=True):
    """A login by a public key, which a client asks to be signed (RFC 4252, section 7)."""

    session: bytes
    user: str
    algorithm: str
    key: bytes
    host_key: bytes | None

    @classmethod
    def read(cls, data: bytes) -> Login:
        """Read the bytes that are to be signed.

        Raises:
            wire.WireError: they are anything else.
        """
        if len(data) > DATA_BYTES:
            raise wire.WireError("the data are longer than those of a login")
        fields = wire.Reader(data)
        session = fields.string()
        if fields.take(1) != bytes([USERAUTH_REQUEST]):
            raise wire.WireError("it is no request for a login")
        user = fields.word()
        service, method = fields.word(), fields.word()
        if service != SERVICE or method not in (METHOD, BOUND_METHOD) or not 0 < len(user) <= USER_BYTES:
            raise wire.WireError("it is no login by a public key")
        if not fields.flag():
            raise wire.WireError("it holds no signature")
        algorithm, key = fields.word(), fields.string()
        host_key = fields.string() if method == BOUND_METHOD else None
        fields.end()
        return cls(session, user, algorithm, key, host_key)


class SignRequest(Struct, frozen=True):
    """A request for a signature in a bound session."""

    key: bytes
    data: bytes
    flags: int
    binding: Binding

    def encoded(self) -> bytes:
        """Return it as one message of the gate to the process that signs."""
        bound = self.binding
        parts = (self.key, self.data, bound.host_key, bound.session, bound.signature)
        return self.flags.to_bytes(4, "big") + b"".join(map(wire.string, parts))

    @classmethod
    def decoded(cls, fields: wire.Reader) -> SignRequest:
        """Read such a message.

        Raises:
            wire.WireError: it is malformed.
        """
        flags, key, data = fields.number(), fields.string(), fields.string()
        bound = Binding(fields.string(), fields.string(), fields.string())
        fields.end()
        return cls(key, data, flags, bound)


class Hosts:
    """The hosts of a run by their keys, each with the names of the secrets that log in there."""

    def __init__(self, rows: Collection[tuple[str, str, str]]) -> None:
        self._by_key: dict[bytes, tuple[str, list[str]]] = {}
        for secret, host, line in sorted(rows):
            _, secrets = self._by_key.setdefault(wire.read_line(line), (host, []))
            secrets.append(secret)
        self.secrets = tuple(sorted({secret for secret, _, _ in rows}))

    def at(self, host_key: bytes) -> tuple[str, tuple[str, ...]]:
        """Return the name of a host, and the secrets that log in there.

        Raises:
            RefusedError: no host that is granted has the key.
        """
        if host_key not in self._by_key:
            raise RefusedError(HOST_NOT_GRANTED, _shown(host_key))
        host, secrets = self._by_key[host_key]
        return host, tuple(secrets)


class Allowed(Struct, frozen=True):
    """A signature that may be given, by the key of one of ``secrets``."""

    host: str
    secrets: tuple[str, ...]
    user: str
    algorithm: str


def check(request: SignRequest, hosts: Hosts) -> Allowed:
    """Decide about one request.

    Raises:
        RefusedError: it is refused.
    """
    host, secrets = request.binding.check(hosts)
    own = wire.fingerprint(request.key)
    target = f"{own} at {host}"
    try:
        login = Login.read(request.data)
        kind = wire.key_type(request.key)
    except wire.WireError as e:
        raise RefusedError(NOT_A_LOGIN, target) from e
    if login.session != request.binding.session or login.host_key not in (None, request.binding.host_key):
        raise RefusedError(SESSION_REFUSED, target)
    wanted = FLAGS.get(request.flags, "") if kind == wire.RSA else kind
    if login.key != request.key or login.algorithm != wanted or (kind != wire.RSA and request.flags):
        raise RefusedError(ALGORITHM_REFUSED, target)
    return Allowed(host, secrets, login.user, login.algorithm)


def _shown(host_key: bytes) -> str:
    """Return a host's key as a denial shows it: as a line of the manifest where there is room."""
    try:
        wire.key_type(host_key)
        line = wire.write_line(host_key)
    except wire.WireError:
        return wire.fingerprint(host_key)
    return line if len(line) <= 400 else wire.fingerprint(host_key)
