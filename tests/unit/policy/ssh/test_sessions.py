"""Which signatures are given: a login in a session that a named host has signed, and nothing that is close to it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from policy.ssh import keys, sessions, wire
from policy.ssh.sessions import Binding, Hosts, RefusedError, SignRequest
from sandbox.network.ssh import private_keys
from tests import ssh_kit
from tests.ssh_kit import HOST, HOSTS, OTHER_HOST, OTHER_SESSION, RSA, SESSION, binding, login, request

HOST_KEY = private_keys.public(HOST)


def refusal(made: SignRequest) -> str:
    with pytest.raises(RefusedError) as refused:
        sessions.check(made, HOSTS)
    return refused.value.code


@pytest.mark.parametrize("method", [sessions.METHOD, sessions.BOUND_METHOD])
def test_login_at_named_host_is_signed(method: str) -> None:
    found = sessions.check(request(login(method=method, host_key=HOST_KEY)), HOSTS)
    assert (found.host, found.secrets, found.user, found.algorithm) == (
        "git.example.org", ("deploy",), "git", "ssh-ed25519"
    )  # fmt: skip


@pytest.mark.parametrize("flags", [2, 4])
def test_rsa_signs_by_the_asked_hash(flags: int) -> None:
    algorithm = sessions.FLAGS[flags]
    data = login(key=RSA, algorithm=algorithm)
    assert sessions.check(request(data, key=RSA, flags=flags), HOSTS).algorithm == algorithm
    signature = private_keys.sign(RSA, algorithm, data)
    assert keys.verifies(private_keys.public(RSA), signature, data)
    assert not keys.verifies(private_keys.public(RSA), signature.replace(b"rsa-sha2-", b"rsa-sha1-"), data)


CLOSE: dict[str, tuple[dict[str, Any], str]] = {
    "another session": ({"session": OTHER_SESSION}, "session_refused"),
    "another host in it": ({"method": sessions.BOUND_METHOD, "host_key": b"x"}, "session_refused"),
    "another service": ({"service": "ssh-userauth"}, "not_a_login"),
    "another method": ({"method": "hostbased"}, "not_a_login"),
    "no user": ({"user": ""}, "not_a_login"),
    "user with a blank": ({"user": "git x"}, "not_a_login"),
    "long user": ({"user": "g" * 256}, "not_a_login"),
    "another algorithm": ({"algorithm": "ssh-rsa"}, "algorithm_refused"),
    "another key": ({"key": HOST}, "algorithm_refused"),
}


@pytest.mark.parametrize("name", CLOSE)
def test_close_login_is_refused(name: str) -> None:
    fields, code = CLOSE[name]
    assert refusal(request(login(**fields))) == code


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSHSIG" + wire.string("file") + wire.string(b"") + wire.string("sha512") + wire.string(b"x" * 64),
        b"DSSEv1 4 text 4 text",
        SESSION,
        login() + b"\0",
        login()[:-1],
        login().replace(b"\1" + wire.string("ssh-ed25519"), b"\0" + wire.string("ssh-ed25519")),
        login().replace(bytes([50]) + wire.string("git"), bytes([51]) + wire.string("git")),
        login() + b"x" * sessions.DATA_BYTES,
    ],
)
def test_other_data_are_refused(data: bytes) -> None:
    assert refusal(request(data)) == sessions.NOT_A_LOGIN


def test_sha1_is_refused() -> None:
    for flags, algorithm in (
        (0, "ssh-rsa"),
        (0, "rsa-sha2-512"),
        (2, "rsa-sha2-512"),
        (6, "rsa-sha2-512"),
        (2, "ssh-rsa"),
    ):
        made = request(login(key=RSA, algorithm=algorithm), key=RSA, flags=flags)
        assert refusal(made) == sessions.ALGORITHM_REFUSED
    assert refusal(request(login(), flags=2)) == sessions.ALGORITHM_REFUSED


def test_unnamed_host_is_refused_with_its_key() -> None:
    with pytest.raises(RefusedError) as refused:
        sessions.check(request(login(), bound=binding(OTHER_HOST)), HOSTS)
    line = wire.write_line(private_keys.public(OTHER_HOST))
    assert (refused.value.code, refused.value.target) == ("host_not_granted", line)


@pytest.mark.parametrize("host", [HOST, OTHER_HOST, RSA], ids=["ed25519", "ecdsa", "rsa"])
def test_binding_holds_for_its_session_and_host(host: private_keys.Private) -> None:
    good = binding(host)
    own = private_keys.public(ssh_kit.OWN)
    named = Hosts([("deploy", "a.example.org", wire.write_line(one)) for one in (good.host_key, own)])
    assert good.check(named) == ("a.example.org", ("deploy",))
    for bad in (
        Binding(good.host_key, OTHER_SESSION, good.signature),
        Binding(good.host_key, good.session, good.signature[:-1] + bytes([good.signature[-1] ^ 1])),
        Binding(good.host_key, good.session, good.signature + b"x"),
        Binding(good.host_key, good.session, b""),
        Binding(own, good.session, good.signature),
        binding(host, b"short"),
        binding(host, b"x" * 65),
    ):
        with pytest.raises(RefusedError) as refused:
            bad.check(named)
        assert refused.value.code == sessions.BINDING_REFUSED


def test_unnamed_key_verifies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "verifies", lambda *_: pytest.fail("a key of the agent's was used"))
    for host_key in (private_keys.public(OTHER_HOST), HOST_KEY + b"x", b""):
        with pytest.raises(RefusedError) as refused:
            Binding(host_key, SESSION, b"").check(HOSTS)
        assert refused.value.code == sessions.HOST_NOT_GRANTED


def test_forwarded_session_is_refused() -> None:
    message = wire.Reader(ssh_kit.extension(binding(), forwarded=1)[1:])
    message.string()
    with pytest.raises(RefusedError) as refused:
        Binding.read(message, HOSTS)
    assert refused.value.code == sessions.FORWARDED


def test_request_is_read_as_it_is_written() -> None:
    made = request(login(), flags=4)
    assert SignRequest.decoded(wire.Reader(made.encoded())) == made
    for spoiled in (made.encoded()[:-1], made.encoded() + b"x", b""):
        with pytest.raises(wire.WireError):
            SignRequest.decoded(wire.Reader(spoiled))


def test_secrets_of_other_hosts_are_not_tried() -> None:
    other = wire.write_line(private_keys.public(OTHER_HOST))
    hosts = Hosts([*ssh_kit.ROWS, ("build", "build.example.org", other), ("deploy", "build.example.org", other)])
    assert sessions.check(request(login()), hosts).secrets == ("deploy",)
    assert sessions.check(request(login(), bound=binding(OTHER_HOST)), hosts).secrets == ("build", "deploy")


def test_other_private_keys_are_none(tmp_path: Path) -> None:
    path = tmp_path / "closed"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(path)], check=True)
    broken = b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n"
    for raw in (path.read_bytes(), broken, b"no key", b""):
        with pytest.raises(ValueError):  # noqa: PT011 - of the library, with many words
            private_keys.load(raw)


def test_long_rsa_key_signs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    raw = RSA.private_bytes(*form)
    assert private_keys.public(private_keys.load(raw)) == private_keys.public(RSA)
    monkeypatch.setattr(private_keys, "RSA_BITS", 2047)
    with pytest.raises(ValueError, match="more bits"):
        private_keys.load(raw)
