"""The gate's answers and the desk's: what is given, what is told, and a gate that asks for what it may not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from policy import errors
from policy.grants.services import SshSet
from policy.ssh import keys, protocol, wire
from sandbox.network.ssh import line, private_keys, server
from sandbox.network.ssh.desk import SshDesk, SshSigned, Then
from sandbox.network.ssh.server import Client, SshServer
from tests import ssh_kit
from tests.ssh_kit import HOSTS, OTHER_HOST, OTHER_SESSION, OWN, RSA, binding, extension, login, request, signing

LIST = bytes([protocol.LIST])
OWN_KEY = private_keys.public(OWN)


def pem(private: private_keys.Private) -> bytes:
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    return private.private_bytes(*form)


class Vault:
    """The operator's part: secrets by name, and the rows."""

    def __init__(self, **secrets: bytes) -> None:
        self.secrets = secrets
        self.rows: list[SshSigned] = []

    def ask(self, name: str, then: Then) -> None:
        found = self.secrets.get(name)
        then(3, None if found is None else memoryview(found))

    def signed(self, row: SshSigned) -> None:
        self.rows.append(row)


class Both:
    """A gate's server with the desk of its shim behind a real line."""

    def __init__(self, vault: Vault) -> None:
        self.denied: list[tuple[str, str]] = []
        self.error: errors.RunError | None = None
        self._desk = SshDesk(SshSet.rows(ssh_kit.ROWS), vault)
        self._line = line.DeskLine(socket.fromfd(self._desk.gate_end, socket.AF_UNIX, socket.SOCK_SEQPACKET).detach())

    def run(self, talk: Callable[[SshServer], Awaitable[Any]]) -> Any:
        async def serve() -> Any:
            loop = asyncio.get_running_loop()
            self._line.start(loop)
            loop.add_reader(self._desk.fileno(), self._serve)
            return await talk(SshServer(HOSTS, self._line, lambda target, code: self.denied.append((code, target))))

        try:
            return asyncio.run(serve())
        finally:
            self._desk.close()
            self._line.close()

    def _serve(self) -> None:
        self.error = self.error or self._desk.serve()


def said(vault: Vault, *messages: bytes) -> tuple[list[bytes], Both]:
    both = Both(vault)

    async def talk(serving: SshServer) -> list[bytes]:
        client = Client()
        return [await serving.answer(client, message) for message in messages]

    return both.run(talk), both


def test_bound_login_is_signed_with_a_row() -> None:
    vault = Vault(deploy=pem(OWN))
    found, both = said(vault, extension(binding()), LIST, signing(login()))
    assert (found[0], OWN_KEY in found[1], both.denied) == (protocol.SUCCESS, True, [])
    fields = wire.Reader(found[2][1:])
    assert found[2][:1] == b"\x0e"
    assert keys.verifies(OWN_KEY, fields.string(), login())
    own = wire.fingerprint(OWN_KEY)
    assert vault.rows == [SshSigned("deploy", 3, "git.example.org", "git", "ssh-ed25519", own)]


@pytest.mark.parametrize(
    ("secret", "code"),
    [(pem(RSA), "key_not_granted"), (b"no key", "unavailable"), (None, "unavailable")],
)
def test_login_without_its_key_is_told(secret: bytes | None, code: str) -> None:
    vault = Vault(**({} if secret is None else {"deploy": secret}))
    found, both = said(vault, extension(binding()), signing(login()))
    assert (found, vault.rows) == ([protocol.SUCCESS, protocol.FAILURE], [])
    assert both.denied == [(code, f"{wire.fingerprint(OWN_KEY)} at git.example.org")]


def test_vault_that_answers_later_signs_too() -> None:
    class Later(Vault):
        def ask(self, name: str, then: Then) -> None:
            asyncio.get_running_loop().call_soon(super().ask, name, then)

    found, both = said(Later(deploy=pem(OWN)), extension(binding()), LIST, signing(login()))
    assert ([one[:1] for one in found], both.denied) == ([protocol.SUCCESS, b"\x0c", b"\x0e"], [])


def test_refused_binding_leaves_nothing_to_sign() -> None:
    vault = Vault(deploy=pem(OWN))
    spoiled = extension(binding(OTHER_HOST))
    found, both = said(vault, spoiled, LIST, extension(binding()), signing(login()))
    assert found == [protocol.FAILURE, protocol.listed([]), protocol.FAILURE, protocol.FAILURE]
    assert {code for code, _ in both.denied} == {"host_not_granted"}


def test_second_session_ends_the_first() -> None:
    vault = Vault(deploy=pem(OWN))
    again = extension(binding(session=OTHER_SESSION))
    found, both = said(vault, extension(binding()), extension(binding()), again, signing(login()))
    assert found == [protocol.SUCCESS, protocol.SUCCESS, protocol.FAILURE, protocol.FAILURE]
    assert [code for code, _ in both.denied] == ["binding_refused"] * 2


def test_every_other_request_is_told() -> None:
    vault = Vault(deploy=pem(OWN))
    others = [bytes([kind]) for kind in range(256) if kind not in (protocol.LIST, protocol.SIGN, protocol.EXTENSION)]
    for at in range(0, len(others), server.BURST):
        found, both = said(vault, *others[at : at + server.BURST])
        assert set(found) == {protocol.FAILURE}
        assert {code for code, _ in both.denied} == {protocol.REQUEST_REFUSED}
    found, both = said(vault, LIST + b"x", bytes([protocol.SIGN]), signing(login()), bytes([27]) + wire.string("query"))
    assert set(found) == {protocol.FAILURE}
    assert [code for code, _ in both.denied] == ["malformed", "malformed", "not_bound", "request_refused"]


def test_flood_is_limited() -> None:
    found, both = said(Vault(deploy=pem(OWN)), *[LIST] * (server.BURST + 50))
    assert found[0] != protocol.FAILURE
    assert both.denied[-1] == ("limit", "requests")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        line.QUESTION.pack(b"X", 1),
        line.QUESTION.pack(line.LIST, 1) + b"x",
        line.QUESTION.pack(line.SIGN, 1),
        line.QUESTION.pack(line.SIGN, 1) + request(login(session=OTHER_SESSION)).encoded(),
        line.QUESTION.pack(line.SIGN, 1) + request(login(), bound=binding(OTHER_HOST)).encoded(),
        line.QUESTION.pack(line.SIGN, 1) + request(b"SSHSIG").encoded(),
        line.QUESTION.pack(line.SIGN, 1) + request(login()).encoded() + b"x" * line.MOST_BYTES,
    ],
)
def test_gate_that_asks_for_more_ends_the_run(message: bytes) -> None:
    vault = Vault(deploy=pem(OWN))
    made = SshDesk(SshSet.rows(ssh_kit.ROWS), vault)
    with socket.socket(fileno=socket.fromfd(made.gate_end, socket.AF_UNIX, socket.SOCK_SEQPACKET).detach()) as gates:
        made.started()
        # The control: what an honest gate asks for.
        gates.send(line.QUESTION.pack(line.SIGN, 7) + request(login()).encoded())
        assert made.serve() is None
        assert gates.recv(line.MOST_BYTES)[:5] == line.ANSWER.pack(7, line.GIVEN)
        gates.send(message)
        assert isinstance(made.serve(), errors.GateError)
        assert len(vault.rows) == 1
    made.close()
