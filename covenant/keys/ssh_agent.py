"""A client of ssh-agent that lists its Ed25519 keys and signs DSSE encodings. It uses no other function.

Messages are a length (uint32), a type and its fields; a string is a length and bytes. Source: RFC 9987 (the agent
protocol), RFC 8709 (ssh-ed25519: the signature is the plain 64 bytes over the unchanged message).

An agent signs any bytes for any client of its socket, with the key that also logs people in. So no message sent here
may be valid for SSH, and the reverse. DSSE's encoding begins with ``DSSEv1 ``. A login signature begins with the length
of the session id (RFC 4252, section 7), and DSSE's first four bytes read as a length are 1.1 GB. A message of
ssh-keygen -Y begins with ``SSHSIG``. ``sign`` refuses everything else: tests/unit/covenant/keys/test_ssh_agent.py.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from policy import errors
from policy.manifest import text
from policy.signing import envelope as envelopes
from policy.ssh import wire
from sandbox import unix_wire

T = TypeVar("T")

SOCKET_VARIABLE = "SSH_AUTH_SOCK"
# The maximum message length of OpenSSH's agent in both directions (AGENT_MAX_LEN).
MAX_MESSAGE_BYTES = 256 * 1024
MAX_IDENTITIES = 1024
# Lists are answered from memory; a signature may wait for a person's confirmation (ssh-add -c).
LIST_SECONDS = 10.0
SIGN_SECONDS = 120.0

_FAILURE = 5
_REQUEST_IDENTITIES, _IDENTITIES_ANSWER = 11, 12
_SIGN_REQUEST, _SIGN_RESPONSE = 13, 14
_ALGORITHM = b"ssh-ed25519"
_OURS = b"DSSEv1 "
_IS_A_DIGEST = re.compile(r"SHA256:.*|[0-9a-f]{64}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AgentKey:
    """An Ed25519 key of the agent. ``comment`` is the agent's text, and proves nothing."""

    comment: str
    key: envelopes.PublicKey

    @property
    def fingerprint(self) -> str:
        """The fingerprint in the format of ssh-add -l."""
        return wire.fingerprint(key_blob(self.key))


class Agent:
    """An open connection. Close it, or use it as a context manager.

    Raises:
        errors.AgentError: no socket is named, it cannot be reached, or it is another user's.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path or os.environ.get(SOCKET_VARIABLE, "")
        if not self.path.startswith("/"):
            raise errors.AgentError(f"{SOCKET_VARIABLE} names no ssh-agent", hint="start one: eval $(ssh-agent)")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(LIST_SECONDS)
            self._socket.connect(self.path)
            self._check_peer()
        except OSError as e:
            self.close()
            raise self.error(f"cannot be reached: {e.strerror or e}") from e
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def identities(self) -> tuple[AgentKey, ...]:
        """Return the plain Ed25519 keys, in the agent's order; certificates and other kinds of keys are left out.

        Raises:
            errors.AgentError: no or a malformed answer within ``LIST_SECONDS``.
        """
        answer = _Reader(self._ask(bytes([_REQUEST_IDENTITIES]), _IDENTITIES_ANSWER, LIST_SECONDS), self)
        count = answer.uint32()
        if count > MAX_IDENTITIES:
            raise self.error(f"says that it has {count} keys")
        pairs = [(answer.string(), answer.string()) for _ in range(count)]
        answer.end()
        found = []
        for blob, comment in pairs:
            key = _key_of(blob)
            if key is not None:
                found.append(AgentKey(comment.decode("utf-8", "backslashreplace"), key))
        return tuple(found)

    def find(self, wanted: str) -> AgentKey:
        """Return the only key with this SSH fingerprint or key id or, if it has the form of neither, this comment.

        Raises:
            errors.AgentError: there is none, or two have that comment.
        """
        known = self.identities()
        # A comment is any text: one in the form of another key's name must not select it. Nor does an empty name select
        # a key without a comment.
        by_key = not wanted or _IS_A_DIGEST.fullmatch(wanted) is not None
        found = [i for i in known if wanted in ((i.fingerprint, i.key.keyid) if by_key else (i.comment,))]
        if len({i.key.keyid for i in found}) == 1:
            return found[0]
        if found:
            raise self.error(
                f"has {len(found)} keys {text.quote(wanted)}",
                hint=f"give one by its fingerprint: {', '.join(i.fingerprint for i in found)}",
            )
        has = ", ".join(text.quote(i.comment) for i in known) or "none"
        raise self.error(f"has no Ed25519 key {text.quote(wanted)}", hint=f"it has {has}; ssh-add -l shows them all")

    def sign(self, identity: AgentKey, message: bytes) -> bytes:
        """Return the key's 64-byte Ed25519 signature over a DSSE pre-authentication encoding.

        Raises:
            errors.AgentError: the message is too large, the agent refused, took longer than ``SIGN_SECONDS``, or
                answered with anything but this key's signature over this message.
            ValueError: the message is no such encoding.
        """
        # INVARIANT: a key that opens a person's machines never signs bytes of another protocol.
        if not message.startswith(_OURS):
            raise ValueError("only a DSSE encoding is signed")
        request = (
            bytes([_SIGN_REQUEST]) + wire.string(key_blob(identity.key)) + wire.string(message) + struct.pack(">I", 0)
        )
        if len(request) + 4 > MAX_MESSAGE_BYTES:
            raise errors.AgentError(
                f"an ssh-agent signs at most {MAX_MESSAGE_BYTES} bytes, this is {len(message)}",
                hint="sign with a key file: covenant keys new NAME",
            )
        answer = _Reader(self._ask(request, _SIGN_RESPONSE, SIGN_SECONDS), self)
        signature = _Reader(answer.string(), self)
        answer.end()
        algorithm, raw = signature.string(), signature.string()
        signature.end()
        if algorithm != _ALGORITHM or not identity.key.verifies(raw, message):
            raise self.error(f"answered with something else than a signature of {text.quote(identity.comment)}")
        return raw

    def _ask(self, request: bytes, wanted: int, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(struct.pack(">I", len(request)) + request)
            (size,) = struct.unpack(">I", self._receive(4, deadline))
            if not 0 < size <= MAX_MESSAGE_BYTES:
                raise self.error(f"answered with {size} bytes")
            answer = self._receive(size, deadline)
        except TimeoutError:
            raise self.error(f"did not answer within {seconds:.0f} seconds") from None
        except OSError as e:
            raise self.error(f"broke off: {e.strerror or e}") from e
        if answer[0] == _FAILURE:
            raise self.error("refused", hint="the key may be locked, gone, bound to hosts, or not confirmed")
        if answer[0] != wanted:
            raise self.error(f"answered with message {answer[0]}")
        return answer[1:]

    def _receive(self, size: int, deadline: float) -> bytes:
        got = bytearray()
        while len(got) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            part = self._socket.recv(size - len(got))
            if not part:
                raise self.error("closed the connection")
            got += part
        return bytes(got)

    def _check_peer(self) -> None:
        uid = unix_wire.peer(self._socket).uid
        # Another user's agent could offer its own key under a comment that we trust.
        if uid not in {0, os.geteuid()}:
            raise self.error(f"belongs to uid {uid}", hint="use your own; root takes a signed file: trust import")

    def error(self, what: str, hint: str = "") -> errors.AgentError:
        """Return an error about this agent, for the caller to raise."""
        return errors.AgentError(f"the ssh-agent {what}", hint=hint, where=self.path)


class _Reader:
    """Reads the fields of one answer, and says of which agent a malformed one is."""

    def __init__(self, data: bytes, agent: Agent) -> None:
        self._fields, self._agent = wire.Reader(data), agent

    def uint32(self) -> int:
        return self._read(self._fields.number)

    def string(self) -> bytes:
        return self._read(self._fields.string)

    def end(self) -> None:
        if self._fields.left:
            raise self._agent.error("answered with more than was asked for")

    def _read(self, field: Callable[[], T]) -> T:
        try:
            return field()
        except wire.WireError:
            raise self._agent.error("answered with a field that is cut off") from None


def key_blob(key: envelopes.PublicKey) -> bytes:
    """Return the key in SSH's format (RFC 8709, section 4)."""
    return wire.string(_ALGORITHM) + wire.string(key.raw)


def _key_of(blob: bytes) -> envelopes.PublicKey | None:
    """Return the Ed25519 key in a blob; None for other kinds, and for an invalid key."""
    head = wire.string(_ALGORITHM) + struct.pack(">I", envelopes.KEY_BYTES)
    if not blob.startswith(head) or len(blob) != len(head) + envelopes.KEY_BYTES:
        return None
    try:
        return envelopes.public_key(blob[len(head) :])
    except ValueError:
        return None
