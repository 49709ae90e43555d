"""The settlement transaction: instruction data, derived addresses, and the memo with a root.

Two instructions have the same content. ``anchor_receipt_batch`` belongs to the settlement program, for a cluster with
that program. A memo has the same numbers as text and runs wherever the SPL memo program is, which every cluster and
litesvm have. The format of the memo is ours; the addresses' seeds are those of version 1.

The page of version 1 names the instruction and its account, not their layout. The order of the arguments and the four
bytes of the count are inferred from the account ``ReceiptBatch{batch_id, authority, merkle_root, receipt_count,
created_at}`` and from Anchor's own rules.

The signing key is an argument. It is never the daemon's identity, which signs only messages tagged with a domain
(decisions.md, signing doors): a transaction is not.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covenant.providers.chain import interface
from covenant.stores.settlement.interface import Batch
from policy import errors

if TYPE_CHECKING:
    from solders.hash import Hash
    from solders.instruction import Instruction
    from solders.keypair import Keypair
    from solders.pubkey import Pubkey
    from solders.transaction import Transaction

MEMO_PROGRAM: Final = "MemoSq4gqABAXKb96qnH8TysNcWxMyWCqXgDLGmfcHr"
# The size of a network packet (Solana, PACKET_DATA_SIZE).
MAX_TRANSACTION_BYTES: Final = 1232

_MEMO: Final = re.compile(r"covenant\.receipt-batch\.v1 ([0-9a-f]{64}) ([0-9a-f]{64}) ([0-9]{1,10})")
_COUNT_END: Final = 2**32


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses that the settlement program derives, each with its bump dropped."""

    program_id: Pubkey

    def config(self) -> Pubkey:
        """The program's configuration."""
        return self._derive(b"config")

    def agent(self, agent_key: Pubkey) -> Pubkey:
        """An agent's account."""
        return self._derive(b"agent", bytes(agent_key))

    def credits(self, owner: Pubkey) -> Pubkey:
        """An owner's account of credits."""
        return self._derive(b"credits", bytes(owner))

    def stake(self, agent: Pubkey, owner: Pubkey) -> Pubkey:
        """An owner's stake in an agent."""
        return self._derive(b"stake", bytes(agent), bytes(owner))

    def task(self, task_id: bytes) -> Pubkey:
        """A task's account."""
        return self._derive(b"task", task_id)

    def receipt_batch(self, batch_id: bytes) -> Pubkey:
        """A batch's account."""
        return self._derive(b"receipt_batch", batch_id)

    def _derive(self, *seeds: bytes) -> Pubkey:
        return type(self.program_id).find_program_address(seeds, self.program_id)[0]


def anchor_data(batch: Batch) -> bytes:
    """Return the data of ``anchor_receipt_batch``: Anchor's eight bytes for its name, then id, root and count."""
    name = hashlib.sha256(b"global:anchor_receipt_batch").digest()[:8]
    return name + bytes.fromhex(batch.batch_id) + bytes.fromhex(batch.merkle_root) + _count(batch)


def anchor_instruction(batch: Batch, *, program_id: Pubkey, authority: Pubkey) -> Instruction:
    """Return ``anchor_receipt_batch`` with the configuration, the batch's new account, the payer, and the system
    program.

    Raises:
        errors.SettlementMissingError: the extra is not installed.
    """
    interface.require_installed()
    from solders.instruction import AccountMeta, Instruction
    from solders.system_program import ID

    addresses = Addresses(program_id)
    accounts = [
        AccountMeta(addresses.config(), is_signer=False, is_writable=False),
        AccountMeta(addresses.receipt_batch(bytes.fromhex(batch.batch_id)), is_signer=False, is_writable=True),
        AccountMeta(authority, is_signer=True, is_writable=True),
        AccountMeta(ID, is_signer=False, is_writable=False),
    ]
    return Instruction(program_id, anchor_data(batch), accounts)


def memo(batch: Batch) -> str:
    """Return the memo's text for a batch."""
    _count(batch)
    return f"covenant.receipt-batch.v1 {batch.batch_id} {batch.merkle_root} {batch.receipt_count}"


def read_memo(text: str) -> Batch | None:
    """Return the batch that a memo names; None for any other text."""
    found = _MEMO.fullmatch(text)
    return Batch(found[1], found[2], int(found[3])) if found else None


def memo_instruction(batch: Batch, *, authority: Pubkey) -> Instruction:
    """Return the memo instruction, signed by the payer.

    Raises:
        errors.SettlementMissingError: the extra is not installed.
    """
    interface.require_installed()
    from solders.instruction import AccountMeta, Instruction
    from solders.pubkey import Pubkey

    signer = AccountMeta(authority, is_signer=True, is_writable=False)
    return Instruction(Pubkey.from_string(MEMO_PROGRAM), memo(batch).encode("ascii"), [signer])


def signed(instruction: Instruction, *, signer: Keypair, blockhash: Hash) -> Transaction:
    """Return the signed transaction with this instruction, small enough to be sent.

    Raises:
        errors.ChainError: it is larger than a packet.
    """
    from solders.message import Message
    from solders.transaction import Transaction

    message = Message.new_with_blockhash([instruction], signer.pubkey(), blockhash)
    transaction = Transaction([signer], message, blockhash)
    if len(bytes(transaction)) > MAX_TRANSACTION_BYTES:
        raise errors.ChainError(f"the transaction is larger than {MAX_TRANSACTION_BYTES} bytes")
    return transaction


def _count(batch: Batch) -> bytes:
    if not 0 < batch.receipt_count < _COUNT_END:
        raise errors.ChainError(f"a batch of {batch.receipt_count} receipts cannot be anchored")
    return batch.receipt_count.to_bytes(4, "little")
