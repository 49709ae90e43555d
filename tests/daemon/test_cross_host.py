"""Two daemons: a task of one reaches the mailbox of the other, once, and each forgery is rejected with its reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from covenant.keys.identity import Identity
from covenant.providers import known_hosts
from covenant.wire import cross_host
from covenant.wire.cross_host import SignedTask
from policy import errors
from tests import daemon_kit
from tests.daemon_kit import Daemon

pytestmark = pytest.mark.anyio
STRANGER = Identity(b"\x05" * 32)


@asynccontextmanager
async def receiver(home: Path, sender: Identity) -> AsyncIterator[Daemon]:
    home.mkdir(mode=0o700, exist_ok=True)
    known = home / "known-hosts.toml"
    known.write_text(f'name = "host2"\n[[host]]\nname = "host1"\npubkey = "{sender.agent.pubkey}"\n')
    known.chmod(0o600)
    async with daemon_kit.running(home, http_port=0) as daemon:
        yield daemon


def sealed(identity: Identity, to: Identity | Any, *, name: str, at_ms: int, host: str = "host1") -> SignedTask:
    sender = {"display": f"operator@{host}", "pubkey": identity.agent.pubkey}
    recipient = {"display": "operator@host2", "pubkey": to.agent.pubkey}
    task = {"id": name, "sender": sender, "recipient": recipient, "intent_text": "ship it"}
    raw = json.dumps(task).encode()
    return SignedTask(raw, at_ms, identity.seal(at_ms, raw))


async def post(daemon: Daemon, body: bytes) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{daemon.http_port}/a2a/peer-tasks"
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(url, content=body, headers={"Content-Type": "application/json"})
        return answer.status_code, answer.json()


async def rows(daemon: Daemon, kind: str) -> list[dict[str, Any]]:
    events = (await daemon.ask("recent_audit", limit=200))["events"]
    return [one["kind"] for one in reversed(events) if one["kind"]["type"] == kind]


async def test_envelope_is_taken_once_and_forgeries_never(tmp_path: Path) -> None:
    sender, home = Identity(b"\x06" * 32), tmp_path / "home"
    async with receiver(home, sender) as daemon:
        me, now_ms = daemon.server.identity, daemon.server.now_ms()
        good = sealed(sender, me, name="t1", at_ms=now_ms)
        # Its grant is missing: rejected, and not remembered, so that it is taken once the grant is there.
        assert await post(daemon, good.to_bytes()) == (403, {"kind": "rejected"})
        await daemon.grant("a2a.recv.operator@host1")
        assert (await post(daemon, good.to_bytes()))[0] == 403, "a grant by name is none here"
        await daemon.grant(f"a2a.recv.{sender.agent.pubkey}")
        assert await post(daemon, good.to_bytes()) == (202, {"kind": "accepted"})
        assert await post(daemon, good.to_bytes()) == (202, {"kind": "accepted"})
        forged = SignedTask(good.task_json.replace(b"ship it", b"sink it"), good.issued_at_ms, good.signature)
        later = SignedTask(good.task_json, good.issued_at_ms + 1, good.signature)
        wrong = [
            (forged, "signature_invalid"),
            (later, "signature_invalid"),
            (SignedTask(good.task_json, now_ms, b"\0" * 63), "malformed_signature"),
            (SignedTask(b"{}", now_ms, b"\0" * 64), "malformed_payload"),
            (sealed(STRANGER, me, name="t2", at_ms=now_ms), "unknown_principal"),
            (sealed(sender, me, name="t2", at_ms=now_ms, host="host9"), "unknown_principal"),
            (sealed(sender, STRANGER, name="t2", at_ms=now_ms), "recipient_mismatch"),
            (sealed(sender, me, name="t2", at_ms=now_ms - 6 * 60_000), "stale"),
            (sealed(sender, me, name="t2", at_ms=now_ms + 2 * 60_000), "future_skew"),
        ]
        for envelope, _ in wrong:
            assert await post(daemon, envelope.to_bytes()) == (403, {"kind": "rejected"})
        said = [(row["outcome"], row["reason"]) for row in await rows(daemon, "cross_host_a2_a_admission")]
        before = [("rejected", "recv_not_granted")] * 2 + [("admitted", ""), ("duplicate", "duplicate")]
        assert said == before + [("rejected", reason) for _, reason in wrong]
        assert (await post(daemon, b"[]"))[0] == 400
        assert (await post(daemon, b"x" * (cross_host.BODY_BYTES + 1)))[0] == 413
    # The claims outlive the daemon.
    async with receiver(home, sender) as daemon:
        assert (await post(daemon, good.to_bytes()))[0] == 202
        assert (await rows(daemon, "cross_host_a2_a_admission"))[-1]["outcome"] == "duplicate"
        assert (await daemon.ask("try_recv_a2_a_task"))["task"]["intent_text"] == "ship it"
        assert (await daemon.ask("try_recv_a2_a_task"))["task"] is None


async def test_new_known_host_counts_after_restart(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    async with daemon_kit.running(home, http_port=0) as daemon:
        # The file is written under the live daemon, and holds from its next start on.
        known = home / "known-hosts.toml"
        known.write_text(f'name = "host2"\n[[host]]\nname = "host1"\npubkey = "{STRANGER.agent.pubkey}"\n')
        known.chmod(0o600)
        me, now_ms = daemon.server.identity, daemon.server.now_ms()
        await daemon.grant(f"a2a.recv.{STRANGER.agent.pubkey}")
        task = sealed(STRANGER, me, name="t1", at_ms=now_ms)
        assert (await post(daemon, task.to_bytes()))[0] == 503
    async with daemon_kit.running(home, http_port=0) as daemon:
        assert await post(daemon, task.to_bytes()) == (202, {"kind": "accepted"})


async def test_task_is_delivered_to_known_host(tmp_path: Path) -> None:
    home = tmp_path / "one"
    home.mkdir(mode=0o700)
    sender = Identity.load(home)
    async with receiver(tmp_path / "two", sender) as there:
        await there.grant(f"a2a.recv.{sender.agent.pubkey}")
        pubkey = there.server.identity.agent.pubkey
        known = home / "known-hosts.toml"
        url = f"http://127.0.0.1:{there.http_port}"
        known.write_text(f'name = "host1"\n[[host]]\nname = "host2"\npubkey = "{pubkey}"\nurl = "{url}"\n')
        known.chmod(0o600)
        async with daemon_kit.running(home) as here:
            me = (await here.ask("list_peers", limit=1))["peers"][0]["agent_id"]
            to = {"display": "operator@host2", "pubkey": pubkey}
            task = {"id": "d1", "sender": me, "recipient": to, "intent_text": "ship it"}
            with pytest.raises(errors.CapabilityMissingError):
                await here.ask("send_a2_a_task", task=task)
            await here.grant(f"a2a.send.{pubkey}")
            assert (await here.ask("send_a2_a_task", task=task))["task_id"] == "d1"
            given = (await there.ask("try_recv_a2_a_task"))["task"]
            assert (given["intent_text"], given["sender"]["display"]) == ("ship it", "operator@host1")
            other = {**task, "id": "d2", "recipient": {**to, "pubkey": STRANGER.agent.pubkey}}
            await here.grant(f"a2a.send.{STRANGER.agent.pubkey}")
            with pytest.raises(errors.RecipientRejectedError, match="identity_mismatch"):
                await here.ask("send_a2_a_task", task=other)
            said = [(row["outcome"], row["reason"]) for row in await rows(here, "cross_host_a2_a_delivery")]
            assert said == [("delivered", ""), ("refused", "identity_mismatch")]


@pytest.mark.parametrize(
    "text",
    [
        *('name = "a b"', "hosts = []", "host = 1", "name = ", '[[host]]\nname = "a"', '[[host]]\nname = "a"\nx = 1'),
        '[[host]]\nname = "a"\npubkey = "11111111111111111111111111111111"',
        f'[[host]]\nname = "a"\npubkey = "{STRANGER.agent.pubkey}"\nurl = "http://a.example"',
        f'[[host]]\nname = "a"\npubkey = "{STRANGER.agent.pubkey}"\n' * 2,
    ],
)
def test_wrong_known_hosts_are_refused(text: str) -> None:
    with pytest.raises(errors.SettingError):
        known_hosts.parse(text.encode(), where="known-hosts.toml")


def test_known_hosts_are_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert known_hosts.read(tmp_path).hosts == {}
    path = tmp_path / known_hosts.NAME
    path.write_text(f'[[host]]\nname = "a"\npubkey = "{STRANGER.agent.pubkey}"\nurl = "http://10.0.0.1:8421"\n')
    path.chmod(0o644)
    with pytest.raises(errors.SettingError):
        known_hosts.read(tmp_path)
    path.chmod(0o600)
    assert known_hosts.read(tmp_path).hosts["a"].url == "http://10.0.0.1:8421"
