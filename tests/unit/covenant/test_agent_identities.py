"""Agents have keys of their own: the same after a restart, another at another home, and none that others can make."""

from __future__ import annotations

from covenant.identity import Identity
from policy import base58


def test_an_agent_is_who_it_was() -> None:
    identity, again = Identity(b"\x01" * 32), Identity(b"\x01" * 32)
    hello = identity.of_agent("hello")
    assert hello.display == "hello@agent"
    assert hello == again.of_agent("hello") == identity.of_agent("hello")
    # HKDF-SHA256 (RFC 5869) worked out with hmac, its key's public half by `openssl pkey`
    public = "d906572d899cd5bb241df6d541c10f8274f0bb508a7135ae1dbf308383b03b01"
    assert base58.decode(hello.pubkey, length=32).hex() == public


def test_no_two_agents_are_the_same() -> None:
    homes = [Identity(bytes([n]) * 32) for n in range(3)]
    keys = {home.of_agent(name).pubkey for home in homes for name in ("hello", "hello2", "Hello")}
    assert len(keys | {home.agent.pubkey for home in homes}) == 12
