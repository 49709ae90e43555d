"""Receipts through a whole daemon: an intent leaves one, a flush settles it, and the next start still proves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.stores.settlement import interface
from policy import errors
from policy.audit_log import receipt_tree
from tests import daemon_kit

pytestmark = pytest.mark.anyio


async def test_intent_is_receipted_settled_and_proved_over_restart(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write", "chain.receipts", "chain.flush", "chain.batches")
        await daemon.grant("settlement.backfill.dry_run")
        answer = await daemon.ask("submit_intent", text="say something")
        (receipt,) = (await daemon.ask("recent_receipts"))["receipts"]
        assert receipt == answer["settlement"]
        assert (receipt["resource"], receipt["memory_record_id"]) == ("memory", answer["intent_id"])
        dry = await daemon.ask("backfill_settlement_receipts", dry_run=True)
        assert (dry["row_count"], dry["rollback_path"]) == (0, None)
        status = (await daemon.ask("chain_status"))["status"]
        assert not status["ready"]
        flushed = await daemon.ask("flush_receipts", limit=10)
        assert (flushed["receipts_updated"], flushed["batch"]["tx_sig"], flushed["batch"]["slot"]) == (1, None, None)
        with pytest.raises(errors.CovenantError) as refused:
            await daemon.ask("flush_receipts", limit=10)
        assert refused.value.code == "nothing_to_settle"
    async with daemon_kit.running(covenant_home) as daemon:
        assert (await daemon.ask("receipt_batches", limit=5))["batches"] == [flushed["batch"]]
        (settled,) = await daemon.server.receipts.recent(9)
        proof = await daemon.server.receipts.prove(receipt["id"])
        assert proof is not None
        assert proof.root.hex() == flushed["batch"]["merkle_root"]
        assert receipt_tree.verify(interface.leaf(settled).digest(), proof)
        assert (await daemon.ask("verify"))["drift"] == []


async def test_with_chain_same_flush_is_anchored(covenant_home: Path) -> None:
    covenant_home.mkdir(mode=0o700)
    (covenant_home / "secrets.toml").touch(0o600)
    (covenant_home / "secrets.toml").write_text('[settlement]\nchain = "litesvm"\n')
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write", "chain.flush", "chain.receipts")
        await daemon.ask("submit_intent", text="say something")
        flushed = await daemon.ask("flush_receipts", limit=10)
        (receipt,) = (await daemon.ask("recent_receipts"))["receipts"]
        assert receipt["tx_sig"] == receipt["onchain_sig"] == flushed["batch"]["tx_sig"]
        assert receipt["cluster"] == "litesvm"
        assert (await daemon.ask("chain_status"))["status"]["ready"]
        assert (await daemon.ask("verify"))["drift"] == []
