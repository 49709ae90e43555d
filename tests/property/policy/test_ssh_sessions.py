"""No change of one byte in a login or a binding is signed, and no bytes bring another error about."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from policy.ssh import sessions, wire
from policy.ssh.sessions import Binding, Login, RefusedError, SignRequest
from tests.ssh_kit import HOSTS, binding, login, request

DATA = login()
BOUND = binding()


def _changed(data: bytes, at: int, bit: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def _given(made: SignRequest) -> bool:
    try:
        sessions.check(made, HOSTS)
    except RefusedError:
        return False
    return True


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_changed_login_is_refused_or_of_another_user(at: int, bit: int) -> None:
    assert _given(request(DATA))
    data = _changed(DATA, at, bit)
    if _given(request(data)):
        # The user's name alone is not held to anything.
        assert structs.replace(Login.read(data), user="git") == Login.read(DATA)


@given(st.sampled_from(["host_key", "session", "signature"]), st.integers(0, 10_000), st.integers(0, 7))
def test_changed_binding_is_refused(name: str, at: int, bit: int) -> None:
    spoiled = structs.replace(BOUND, **{name: _changed(getattr(BOUND, name), at, bit)})
    assert not _given(request(DATA, bound=spoiled))
    assert not _given(request(login(session=spoiled.session), bound=spoiled))


@given(st.binary(max_size=300) | st.integers(0, len(DATA)).map(lambda end: DATA[:end]), st.integers(0, 2**32 - 1))
def test_any_bytes_are_read_or_refused(data: bytes, flags: int) -> None:
    for read in (Login.read, wire.key_type):
        with contextlib.suppress(wire.WireError):
            read(data)
    with contextlib.suppress(wire.WireError, RefusedError):
        Binding.read(wire.Reader(data), HOSTS)
    with contextlib.suppress(wire.WireError):
        SignRequest.decoded(wire.Reader(data))
    assert not _given(SignRequest(data, data, flags, BOUND))
