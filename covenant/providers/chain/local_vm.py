"""A chain in one process: Solana's virtual machine (litesvm) executes the transaction, and stores nothing.

It tests that the transaction would be accepted, and that its output has the input's root. Its cluster is ``litesvm``,
so that no receipt claims to be on a network.
"""

from __future__ import annotations

from typing import Final

import anyio.to_thread

from covenant.providers.chain import interface, transactions
from covenant.stores.settlement.interface import Anchor, Batch
from covenant.wire import parts
from policy import errors

CLUSTER: Final = "litesvm"

_LAMPORTS: Final = 1_000_000_000
_LOG: Final = "Program log: "


class LocalVm:
    """``pick.Chain`` in litesvm. ``seed`` are the 32 bytes of the key that pays there."""

    def __init__(self, seed: bytes) -> None:
        interface.require_installed()
        self._seed = seed

    def status(self) -> parts.ChainConfiguration:
        """As ``Chain.status``: always ready."""
        return parts.ChainConfiguration(
            chain=interface.CHAIN, cluster=CLUSTER, program_id=transactions.MEMO_PROGRAM, ready=True
        )

    async def anchor(self, batch: Batch, *, now_ms: int) -> Anchor:
        """As ``Chain.anchor``; each time in a fresh machine, in a worker thread."""
        tx_sig, slot = await anyio.to_thread.run_sync(self._execute, batch)
        return Anchor(chain=interface.CHAIN, cluster=CLUSTER, tx_sig=tx_sig, slot=slot, confirmed_at=now_ms)

    def _execute(self, batch: Batch) -> tuple[str, int]:
        from solders.keypair import Keypair
        from solders.litesvm import LiteSVM
        from solders.transaction_metadata import TransactionMetadata

        signer = Keypair.from_seed(self._seed)
        vm = LiteSVM()
        vm.airdrop(signer.pubkey(), _LAMPORTS)
        instruction = transactions.memo_instruction(batch, authority=signer.pubkey())
        transaction = transactions.signed(instruction, signer=signer, blockhash=vm.latest_blockhash())
        done = vm.send_transaction(transaction)
        if not isinstance(done, TransactionMetadata):
            raise errors.ChainError(f"the transaction failed: {done.err()}")
        kept = [transactions.read_memo(line.removeprefix(_LOG)) for line in done.logs()]
        expected = Batch(batch.batch_id, batch.merkle_root, batch.receipt_count)
        if [one for one in kept if one is not None] != [expected]:
            raise errors.ChainError("what the machine executed does not name this batch and its root")
        return str(done.signature()), vm.get_clock().slot
