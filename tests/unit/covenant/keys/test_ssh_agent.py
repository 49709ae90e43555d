"""Check ssh-agent: a real agent's signatures verify as any others do, and a hostile agent's answers are refused."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.keys import signers, ssh_agent
from policy import errors
from policy.signing import envelope
from policy.ssh import wire
from tests import signing_kit as kit
from tests import ssh_agent_kit

PAE = envelope.pae(envelope.IN_TOTO_PAYLOAD_TYPE, b"{}")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_agent_kit.SshAgent]:
    with ssh_agent_kit.running(tmp_path_factory.mktemp("agent")) as made:
        made.add("ann@laptop")
        made.add("twice")
        made.add("twice")
        made.add("an ecdsa key", kind="ecdsa")
        made.add("bell\x07 and \u202e")
        yield made


# --- a real agent -----------------------------------------------------------------------------------------


def test_only_plain_ed25519_keys_are_seen(agent: ssh_agent_kit.SshAgent) -> None:
    with ssh_agent.Agent(agent.socket) as client:
        found = client.identities()
    assert [i.comment for i in found][:3] == ["ann@laptop", "twice", "twice"]
    assert len(found) == 4
    listed = agent.run("ssh-add", "-l", "-E", "sha256")
    assert len(listed.splitlines()) == 5
    for identity in found:
        assert identity.fingerprint in listed
    public = agent.run("ssh-add", "-L")
    assert "ecdsa" in public


def test_signature_of_agent_is_one_like_any_other(agent: ssh_agent_kit.SshAgent) -> None:
    with ssh_agent.Agent(agent.socket) as client:
        identity = client.find("ann@laptop")
        made = client.sign(identity, PAE)
        assert client.sign(identity, PAE) == made
    assert len(made) == envelope.SIGNATURE_BYTES
    signed = envelope.Envelope(b"{}", envelope.IN_TOTO_PAYLOAD_TYPE, (envelope.Signature(identity.key.keyid, made),))
    decoded = envelope.decode(signed.encode())
    assert envelope.signers(decoded, [kit.public(1), identity.key]) == (identity.key,)


def test_key_is_named_by_comment_fingerprint_or_key_id(agent: ssh_agent_kit.SshAgent) -> None:
    with ssh_agent.Agent(agent.socket) as client:
        ann, first = client.find("ann@laptop"), client.identities()[1]
        for wanted in (ann.fingerprint, ann.key.keyid):
            assert client.find(wanted) == ann
        assert client.find(first.fingerprint) == first
        with pytest.raises(errors.AgentError, match="has 2 keys `twice`") as caught:
            client.find("twice")
        assert "SHA256:" in caught.value.hint
        for wanted in ("an ecdsa key", "nobody", "", "ann@laptop ", ann.fingerprint[:-1]):
            with pytest.raises(errors.AgentError, match="has no Ed25519 key"):
                client.find(wanted)


def test_door_to_agent_opens_when_it_signs(agent: ssh_agent_kit.SshAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", agent.socket)
    door = signers.agent_key("ann@laptop")
    signed = envelope.Envelope(b"{}", envelope.IN_TOTO_PAYLOAD_TYPE, ())
    both = signed.signed_by(door.signature(signed)).signed_by(door.signature(signed))
    assert envelope.signers(both, [door.key]) == (door.key,)
    assert len(both.signatures) == 1
    monkeypatch.setenv("SSH_AUTH_SOCK", agent.socket + "-gone")
    with pytest.raises(errors.AgentError, match="cannot be reached"):
        door.signature(signed)


def test_locked_agent_signs_nothing(agent: ssh_agent_kit.SshAgent) -> None:
    with ssh_agent.Agent(agent.socket) as client:
        identity = client.find("ann@laptop")
        # The protocol's own lock (RFC 9987): with a passphrase, since ssh-add asks for one on a terminal.
        lock = bytes([22]) + struct.pack(">I", 1) + b"x"
        _raw(agent.socket, lock)
        try:
            with pytest.raises(errors.AgentError):
                client.sign(identity, PAE)
        finally:
            _raw(agent.socket, bytes([23]) + lock[1:])
        client.sign(identity, PAE)


def _raw(path: str, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(struct.pack(">I", len(message)) + message)
        assert connection.recv(5)[4] == 6


def test_more_than_agent_takes_is_refused_before_it_is_sent(agent: ssh_agent_kit.SshAgent) -> None:
    def message(size: int) -> bytes:
        return envelope.pae("t", bytes(size))

    with ssh_agent.Agent(agent.socket) as client:
        identity = client.find("ann@laptop")
        overhead = ssh_agent.MAX_MESSAGE_BYTES - 200
        client.sign(identity, message(overhead))
        with pytest.raises(errors.AgentError, match="signs at most 262144 bytes"):
            client.sign(identity, message(ssh_agent.MAX_MESSAGE_BYTES))
        client.sign(identity, PAE)


@pytest.mark.parametrize("path", ["", "agent", "./agent", "/nowhere/agent"])
def test_no_agent_is_said(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", path)
    with pytest.raises(errors.AgentError) as caught:
        ssh_agent.Agent()
    assert caught.value.code == "ssh_agent"


# --- one door is not another ------------------------------------------------------------------------------


def test_what_ssh_signs_is_never_what_we_sign(agent: ssh_agent_kit.SshAgent, tmp_path: Path) -> None:
    userauth = _userauth(b"\x01" * 32)
    sshsig = b"SSHSIG" + wire.string(b"file") + wire.string(b"") * 2
    with ssh_agent.Agent(agent.socket) as client:
        identity = client.find("ann@laptop")
        for message in (userauth, sshsig, b"", b"DSSEv1", b"DSSEv2 1 a 1 b", b" " + PAE, b"{}", PAE[1:]):
            with pytest.raises(ValueError, match="only a DSSE encoding is signed"):
                client.sign(identity, message)
        assert client.sign(identity, PAE)
    # In reverse: a signature by ssh-keygen with the same agent is not valid for its file as a payload.
    (tmp_path / "payload").write_bytes(PAE)
    public = tmp_path / "ann.pub"
    line = next(row for row in agent.run("ssh-add", "-L").splitlines() if row.endswith("ann@laptop"))
    public.write_text(line + "\n")
    agent.run("ssh-keygen", "-q", "-Y", "sign", "-f", str(public), "-n", "file", str(tmp_path / "payload"))
    armoured = (tmp_path / "payload.sig").read_text().splitlines()[1:-1]
    raw = base64.b64decode("".join(armoured))
    assert raw.startswith(b"SSHSIG")
    assert not identity.key.verifies(raw[-64:], PAE)


def _userauth(session: bytes) -> bytes:
    """Return the message that a login signs (RFC 4252, section 7)."""
    fields = (b"git", b"ssh-connection", b"publickey")
    return (
        wire.string(session)
        + bytes([50])
        + b"".join(wire.string(f) for f in fields)
        + b"\x01"
        + wire.string(b"ssh-ed25519")
        + wire.string(ssh_agent.key_blob(kit.public(1)))
    )


@given(st.binary(min_size=1, max_size=128), st.text(max_size=20), st.binary(max_size=64))
def test_no_login_is_encoding_of_ours_and_other_way_round(session: bytes, kind: str, payload: bytes) -> None:
    # A session id is a digest of at most 64 bytes from the key exchange: its length is never `DSSE` read as a number.
    assert int.from_bytes(b"DSSE", "big") > 2**30
    assert _userauth(session)[:4] != envelope.pae(kind, payload)[:4]
    assert not envelope.pae(kind, payload).startswith(b"SSHSIG")
    # Read as SSH's fields, our message begins with a session id that is longer than the message.
    made = envelope.pae(kind, payload)
    assert int.from_bytes(made[:4], "big") > len(made)


# --- a hostile agent ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _answering(folder: Path, *answers: bytes, hang: bool = False) -> Iterator[str]:
    """Serve a socket that sends each of these answers after one request, then closes or hangs."""
    path = str(folder / "fake")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(1)
    done = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                for answer in answers:
                    connection.recv(1 << 20)
                    connection.sendall(answer)
                if hang:
                    done.wait(60)
                else:
                    connection.recv(1 << 20)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield path
    finally:
        done.set()
        server.close()
        thread.join(60)
        os.unlink(path)


def _frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def _identities(*pairs: tuple[bytes, bytes], count: int | None = None) -> bytes:
    fields = b"".join(wire.string(blob) + wire.string(comment) for blob, comment in pairs)
    return _frame(bytes([12]) + struct.pack(">I", len(pairs) if count is None else count) + fields)


BLOB = ssh_agent.key_blob(kit.public(1))
ONE = _identities((BLOB, b"ann"))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "closed the connection"),
    "half a length": (b"\0\0", "closed the connection"),
    "no bytes": (_frame(b""), "answered with 0 bytes"),
    "too many bytes": (struct.pack(">I", 2**32 - 1), "answered with 4294967295 bytes"),
    "one byte too many": (struct.pack(">I", 256 * 1024 + 1), "answered with 262145 bytes"),
    "a refusal": (_frame(b"\x05"), "refused"),
    "another message": (_frame(b"\x0e" + ONE[5:]), "answered with message 14"),
    "no count": (_frame(b"\x0c"), "cut off"),
    "more keys than there are": (_identities((BLOB, b"ann"), count=2), "cut off"),
    "a great many keys": (_identities(count=2**32 - 1), "says that it has"),
    "fewer keys than there are": (_identities((BLOB, b"ann"), count=0), "more than was asked for"),
    "a field that is too long": (_frame(bytes([12]) + struct.pack(">II", 1, 2**31) + BLOB), "cut off"),
    "bytes after the end": (_frame(ONE[4:] + b"\0"), "more than was asked for"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_malformed_list_is_refused(name: str, tmp_path: Path) -> None:
    answer, says = HOSTILE[name]
    with _answering(tmp_path, answer) as path, ssh_agent.Agent(path) as client:
        if len(answer) < 4:
            # The fake agent waits for a next request before it closes; the client sends none.
            threading.Timer(0.1, client._socket.shutdown, [socket.SHUT_WR]).start()
        with pytest.raises(errors.AgentError, match=says):
            client.identities()


def test_control_same_frame_without_its_fault_is_list(tmp_path: Path) -> None:
    with _answering(tmp_path, ONE) as path, ssh_agent.Agent(path) as client:
        (found,) = client.identities()
    assert found == ssh_agent.AgentKey("ann", kit.public(1))


def test_keys_that_root_would_not_list_are_not_seen(tmp_path: Path) -> None:
    small = wire.string(b"ssh-ed25519") + wire.string((1).to_bytes(32, "little"))
    others = [small, BLOB + b"\0", BLOB[:-1], wire.string(b"ssh-rsa") + BLOB, b"", b"\0" * 4]
    answer = _identities(*((blob, b"x") for blob in others), (BLOB, b"\xff\x1b[2J"))
    with _answering(tmp_path, answer) as path, ssh_agent.Agent(path) as client:
        (found,) = client.identities()
    assert found.key == kit.public(1)
    assert found.comment == "\\xff\x1b[2J"


@pytest.mark.parametrize("name", ["fingerprint", "keyid"])
def test_comment_spelled_like_another_key_does_not_stand_for_it(name: str, tmp_path: Path) -> None:
    ours, theirs = ssh_agent.AgentKey("ann", kit.public(1)), ssh_agent.key_blob(kit.public(2))
    wanted = {"fingerprint": ours.fingerprint, "keyid": ours.key.keyid}[name]
    lie = (theirs, wanted.encode())
    with _answering(tmp_path, _identities(lie, (BLOB, b"ann"))) as path, ssh_agent.Agent(path) as client:
        assert client.find(wanted) == ours
    with (
        _answering(tmp_path, _identities(lie)) as path,
        ssh_agent.Agent(path) as client,
        pytest.raises(errors.AgentError, match="has no Ed25519 key"),
    ):
        client.find(wanted)


def test_who_names_no_key_means_none(tmp_path: Path) -> None:
    """The option is empty in --ssh-agent "$KEY" if KEY is not set."""
    with (
        _answering(tmp_path, _identities((BLOB, b""))) as path,
        ssh_agent.Agent(path) as client,
        pytest.raises(errors.AgentError, match="has no Ed25519 key"),
    ):
        client.find("")


def _signature(raw: bytes, algorithm: bytes = b"ssh-ed25519", after: bytes = b"") -> bytes:
    body = wire.string(algorithm) + wire.string(raw) + after
    return _frame(bytes([14]) + wire.string(body))


GOOD = kit.key(1).sign(PAE)
FALSE: dict[str, bytes] = {
    "another message's": _signature(kit.key(1).sign(PAE + b" ")),
    "another key's": _signature(kit.key(2).sign(PAE)),
    "another algorithm": _signature(GOOD, b"ssh-ed448"),
    "none": _signature(b""),
    "half": _signature(GOOD[:32]),
    "and a byte": _signature(GOOD + b"\0"),
    "a field more": _signature(GOOD, after=b"\0"),
    "an answer more": _frame(_signature(GOOD)[4:] + b"\0"),
    "a list": ONE,
    "a refusal": _frame(b"\x05"),
}


@pytest.mark.parametrize("name", FALSE)
def test_false_signature_is_refused(name: str, tmp_path: Path) -> None:
    identity = ssh_agent.AgentKey("ann", kit.public(1))
    with _answering(tmp_path, FALSE[name]) as path, ssh_agent.Agent(path) as client, pytest.raises(errors.AgentError):
        client.sign(identity, PAE)
    with _answering(tmp_path, _signature(GOOD)) as path, ssh_agent.Agent(path) as client:
        assert client.sign(identity, PAE) == GOOD


@pytest.mark.parametrize("start", [b"", b"\0", _signature(GOOD)[:-1]])
def test_agent_that_says_no_more_is_not_waited_for(
    start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_agent, "SIGN_SECONDS", 0.2)
    with (
        _answering(tmp_path, start, hang=True) as path,
        ssh_agent.Agent(path) as client,
        pytest.raises(errors.AgentError, match="did not answer within"),
    ):
        client.sign(ssh_agent.AgentKey("ann", kit.public(1)), PAE)


def test_another_users_agent_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _answering(tmp_path, ONE) as path:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        if os.getuid() == 0:
            # Root's own agent is accepted for every user, so show an agent of another user.
            monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: struct.pack("3i", 1, 1000, 1000))
        with pytest.raises(errors.AgentError, match="belongs to uid"):
            ssh_agent.Agent(path)
        monkeypatch.undo()
    with _answering(tmp_path, ONE) as path, ssh_agent.Agent(path) as client:
        assert client.identities()


def test_programs_that_these_tests_need_are_there() -> None:
    assert subprocess.run(["ssh-add", "-l"], env={"PATH": os.environ["PATH"]}, capture_output=True).returncode == 2
