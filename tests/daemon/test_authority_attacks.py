"""The daemon's authority as an attacker finds it, over the socket: forged and replayed grants, scopes that two readers
could take two ways, tokens that are no longer good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covenant.wire import frames
from policy import base58, errors
from policy.capabilities.token import Token
from tests import daemon_kit
from tests.capability_kit import ADA, BOB, EVE, signed
from tests.daemon_kit import peer
from tests.doubles import async_client
from tests.doubles.async_client import AsyncClient

pytestmark = pytest.mark.anyio


async def refused(client: AsyncClient, kind: str, **fields: Any) -> str:
    with pytest.raises(errors.CovenantError) as told:
        await client.ask(kind, **fields)
    return type(told.value).code


async def held(client: AsyncClient) -> set[str]:
    return {one["action"] for one in (await client.ask("capability_usage"))["grants"] if one["effective"] == "live"}


async def test_peer_gets_nothing_by_asking(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon, peer(daemon, ADA, "memory.read") as ada:
        mine = (await ada.ask("recent_capabilities"))["capabilities"][0]
        for scope in (None, {}, {"version": 1}, {"version": 1, "parent_b58": mine["signature"]}):
            for action in (
                "memory.write",
                "peers.revoke",
                "capabilities.purge",
                "memory",
                "memory.readx",
                "MEMORY.READ",
            ):
                assert await refused(ada, "grant_capability", action=action, scope=scope) == "grant_refused"
        # The operator's own grants, as parents.
        await daemon.grant("memory.write")
        theirs = (await daemon.ask("recent_capabilities", limit=1))["capabilities"][0]["signature"]
        for parent in (theirs, "5" * 88, base58.encode(bytes(64))):
            answer = await refused(ada, "grant_capability", action="memory.write", parent_b58=parent)
            assert answer in {"grant_refused", "malformed_request"}
        assert await held(ada) == {"memory.read"}


@pytest.mark.parametrize(
    "scope",
    [
        '{"version":1,"version":1}',
        '{"version":1,"tiers":["working"],"tiers":["working","episodic","longterm"]}',
        '{"version":true,"tiers":["working"]}',
        '{"version":1.0000000000000001,"tiers":["working","longterm","nothing"]}',
        '{"version":1,"before_ms":NaN}',
        '{"version":1,"before_ms":Infinity}',
        '{"version":1,"before_ms":1e999}',
        '{"version":1,"before_ms":9007199254740993}',
        '{"version":1,"tiers":["work\\u0131ng"]}',
        '{"version":1,"note":"\\ud800"}',
        '{"version":1,"tiers":["working"],"parent_b58":""}',
        '{"ver\\u0073ion":1,"tiers":"working"}',
        "[]",
        '"{}"',
        "1",
        "[" * 40 + "]" * 40,
    ],
)
async def test_scope_that_could_be_read_two_ways(covenant_home: Path, scope: str) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        before, after = b'{"kind":"grant_capability","action":"memory.read","scope":', b"}"
        await daemon.client.send_bytes(frames.encode(before + scope.encode() + after))
        with pytest.raises(errors.CovenantError):
            await daemon.client.receive()
        assert await held(daemon.client) == set()


async def test_chain_signed_by_its_holder_and_what_it_cannot_be_turned_into(covenant_home: Path) -> None:
    async with (
        daemon_kit.running(covenant_home) as daemon,
        peer(daemon, ADA, "memory.read") as ada,
        peer(daemon, EVE, "memory.read") as eve,
        peer(daemon, BOB) as bob,
    ):
        adas = (await ada.ask("recent_capabilities"))["capabilities"][0]["signature"]
        scope = {"version": 1, "tiers": ["working"]}
        token = Token(BOB.pubkey, "memory.read", scope | {"parent_b58": adas}, ADA.pubkey, None)
        asked = {
            "action": "memory.read",
            "scope": scope,
            "subject": BOB.pubkey,
            "parent_b58": adas,
            "signature_b58": signed("ada", token),
        }
        for who, change in (
            (eve, {}),
            (bob, {}),
            (ada, {"scope": {"version": 1}}),
            (ada, {"scope": {}}),
            (ada, {"subject": EVE.pubkey}),
            (ada, {"action": "memory.write"}),
            (ada, {"expires_at": 2**64 - 1}),
            (ada, {"signature_b58": signed("eve", token)}),
            (ada, {"scope": scope | {"parent_b58": "5"}}),
        ):
            assert await refused(who, "grant_capability", **asked | change) == "grant_refused"
        assert await held(bob) == set()
        given = await ada.ask("grant_capability", **asked)
        assert await held(bob) == {"memory.read"}
        # Revoked and forgotten; a copy of the token is worth nothing to Bob, nor once the one above is revoked to Ada.
        await ada.ask("revoke_capability", signature_b58=given["signature_b58"])
        assert await held(bob) == set()
        await daemon.grant("capabilities.purge")
        later = daemon.server.now_ms() + 1000
        assert (await daemon.ask("purge_capabilities", before_ms=later))["purged"] == 1
        assert await refused(bob, "grant_capability", **asked) == "grant_refused"
        await daemon.ask("revoke_capability", signature_b58=adas)
        assert (await daemon.ask("purge_capabilities", before_ms=later + 1000))["purged"] == 1
        assert await refused(ada, "grant_capability", **asked) == "grant_refused"
        assert await held(bob) == set()


async def test_token_no_longer_good_opens_nothing(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        made = await daemon.ask("enroll_peer", display="ada@local", actions=[])
        old = (covenant_home / "peers" / "operator.token").read_text()
        new = (await daemon.ask("rotate_operator_token"))["token_b58"]
        assert (covenant_home / "peers" / "operator.token").read_text() == new
        assert (await daemon.ask("ping"))["kind"] == "pong", "an open connection goes on"
        await daemon.ask("revoke_peer", token_prefix=made["token_b58"][:6])
        for token in (old, made["token_b58"], new[:-1], new.swapcase(), new + "1", new[:6], ""):
            with pytest.raises(errors.CovenantError):
                async with async_client.connected(covenant_home, token=token):
                    pass
        async with async_client.connected(covenant_home, token=new) as again:
            assert (await again.ask("ping"))["kind"] == "pong"


async def test_prober_does_not_see_that_it_was_seen(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon, peer(daemon, ADA) as ada:
        for kind, fields in (
            ("list_peers", {}),
            ("revoke_peer", {"token_prefix": "5"}),
            ("rotate_operator_token", {}),
            ("enroll_peer", {"display": "eve@local", "actions": []}),
            ("purge_peers", {"before_ms": 1}),
            ("get_secret", {"name": "mail"}),
        ):
            await refused(ada, kind, **fields)
        seen = [event["kind"]["type"] for event in (await ada.ask("recent_audit", extended=True, limit=50))["events"]]
        assert [kind for kind in seen if "reject" in kind or "denied" in kind or kind == "capability_check"] == []
        kinds = [event["kind"]["type"] for event in (await daemon.ask("recent_audit", limit=50))["events"]]
        assert {"operator_peers_list_rejected", "operator_peer_revoke_rejected", "secret_access_denied"} <= set(kinds)


async def test_no_token_is_in_any_file_but_its_own(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        tokens = [(await daemon.ask("enroll_peer", display="ada@local", actions=["memory.read"]))["token_b58"]]
        tokens.append((await daemon.ask("rotate_operator_token"))["token_b58"])
        await daemon.ask("revoke_peer", token_prefix=tokens[0])
    files = {path: path.read_bytes() for path in covenant_home.rglob("*") if path.is_file()}
    found = {path.name for path, raw in files.items() for token in tokens if token.encode() in raw}
    assert found == {"operator.token"}
    assert json.loads((covenant_home / "peers" / "registry.jsonl").read_bytes().splitlines()[0])["token_sha256"]


async def test_showing_peer_out_ends_its_open_connection(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        made = await daemon.ask("enroll_peer", display="ada@local", actions=["memory.read"])
        async with (
            async_client.connected(covenant_home, token=made["token_b58"]) as ada,
            async_client.connected(covenant_home) as operator,
        ):
            assert (await ada.ask("ping"))["kind"] == "pong"
            await daemon.ask("revoke_peer", token_prefix=made["token_b58"][:6])
            await daemon.ask("rotate_operator_token")
            assert await refused(ada, "recent_capabilities") == "authentication_failed"
            assert (await operator.ask("ping"))["kind"] == "pong", "the operator's outlives a rotation"
