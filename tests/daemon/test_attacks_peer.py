"""An enrolled peer without rights, over the real socket.

Each test checks what a request tells it about another peer, and what it can make the daemon write.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from covenant.handlers.intents import pipeline
from covenant.wire import requests
from policy import base58, contract, errors
from tests import daemon_kit
from tests.capability_kit import ADA, BOB, EVE
from tests.daemon_kit import Daemon, peer
from tests.doubles.async_client import AsyncClient
from tests.golden import ipc_kit

pytestmark = pytest.mark.anyio

MARK = "the-tide-turns-at-nine"
_KINDS = sorted(kind for kind, model in requests.KINDS.items() if model is not requests.Unsupported)
# What is made anew for each asker differs from one time to the next.
_DIFFERS = {"submit_intent", "recent_audit", "verify"}


@dataclass
class Theirs:
    """Names of another peer's objects, by which a stranger could ask for them."""

    memory: str
    intent: str
    task: str
    signature: str
    event: str

    @classmethod
    def nothing(cls) -> Theirs:
        """Return names of the same form, of objects that do not exist."""
        memory, intent, task, event = (str(uuid.uuid4()) for _ in range(4))
        return cls(memory, intent, task, base58.encode(b"\x05" * 64), event)

    def asked(self, kind: str, *, swapped: bool) -> dict[str, Any]:
        """The sample of a kind, about these: which of its two ids is which depends on ``swapped``."""
        text = json.dumps(ipc_kit.REQUESTS[kind] | ({"prefer_stream": False} if kind == "submit_intent" else {}))
        one, other = (self.intent, self.memory) if swapped else (self.memory, self.intent)
        if "a2_a" in kind:
            one = other = self.task
        if kind == "prove_audit_inclusion":
            one = other = self.event
        for was, now in ((ipc_kit.UUID, one), (ipc_kit.OTHER, other), (ipc_kit.SIGNATURE, self.signature)):
            text = text.replace(was, now)
        asked: dict[str, Any] = json.loads(text)
        return asked

    def hidden(self, text: str) -> str:
        """A text with a word for each of the names, so that two can be compared."""
        for name in ("memory", "intent", "task", "signature", "event"):
            text = text.replace(getattr(self, name), f"<{name}>").replace(getattr(self, name)[:80], f"<{name}>")
        return text


@asynccontextmanager
async def lived(home: Path) -> AsyncIterator[tuple[Daemon, AsyncClient, Theirs]]:
    """A daemon in which Ada did something of everything, and Eve's connection."""
    grants = ("memory.write", "memory.read", f"a2a.send.{BOB.display}", "tool.call.echo")
    async with (
        daemon_kit.running(home, http_port=0) as daemon,
        peer(daemon, ADA, *grants) as ada,
        peer(daemon, BOB, f"a2a.recv.{ADA.display}"),
        peer(daemon, EVE) as eve,
    ):
        kept = await ada.ask("put_memory", tier="working", text=MARK)
        done = await ada.ask("submit_intent", text=f"say {MARK}")
        task = str(uuid.uuid4())
        sent = {"id": task, "sender": ADA.model_dump(), "recipient": BOB.model_dump(), "intent_text": MARK}
        await ada.ask("send_a2_a_task", task=sent)
        await ada.ask("call_tool", name="echo", arguments={"text": MARK})
        signature = (await ada.ask("recent_capabilities", limit=1))["capabilities"][0]["signature"]
        event = (await ada.ask("recent_audit", extended=True, limit=1))["events"][0]["id"]
        yield daemon, eve, Theirs(kept["record"]["id"], done["intent_id"], task, signature, event)


async def answered(client: AsyncClient, kind: str, fields: Mapping[str, Any]) -> str:
    try:
        answer = await client.ask(kind, **fields)
    except errors.CovenantError as e:
        answer = e.to_json()
    assert answer.get("code") != "internal"
    return json.dumps(answer, sort_keys=True)


async def test_no_request_tells_who_may_nothing_what_another_process_has(covenant_home: Path) -> None:
    async with lived(covenant_home) as (daemon, eve, theirs):
        nothing = Theirs.nothing()
        for kind in _KINDS:
            for swapped in (False, True):
                there = await answered(eve, kind, theirs.asked(kind, swapped=swapped))
                absent = await answered(eve, kind, nothing.asked(kind, swapped=swapped))
                assert MARK not in there, kind
                assert ADA.pubkey not in there, kind
                assert ADA.display not in there, kind
                if kind not in _DIFFERS:
                    # Neither in words nor by what is refused: of what is there and of what is not it hears the same.
                    assert theirs.hidden(there) == nothing.hidden(absent), kind
        feed = json.dumps(await eve.ask("recent_audit", extended=True, limit=1000))
        assert MARK not in feed
        assert ADA.pubkey not in feed
        # The operator sees all of it: what was looked for was there.
        rows = json.dumps([row.kind for row in await daemon.server.audit.recent(1000)])
        assert MARK in rows


async def test_text_ignored_fills_no_log_for_who_may_write_nothing(covenant_home: Path) -> None:
    async with lived(covenant_home) as (daemon, eve, _):
        long = "x/.env " + "y" * (contract.INTENT_BYTES - 100)
        assert (await eve.ask("submit_intent", text=long))["status"] == "ignored"
        (row,) = [one.kind for one in await daemon.server.audit.recent(10) if one.kind["type"] == "intent_ignored"]
        assert long.startswith(row["intent_text"])
        assert len(row["intent_text"]) == pipeline.MOST_OF_IGNORED


async def test_who_may_keep_text_has_all_of_ignored_one_in_log(covenant_home: Path) -> None:
    long = "x/.env " + "y" * (pipeline.MOST_OF_IGNORED + 1)
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")
        assert (await daemon.ask("submit_intent", text=long))["status"] == "ignored"
        (row,) = [one.kind for one in await daemon.server.audit.recent(10) if one.kind["type"] == "intent_ignored"]
        assert row["intent_text"] == long
