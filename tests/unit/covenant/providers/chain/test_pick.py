"""The settlement transaction: its bytes, its addresses, its execution, and what there is without a chain."""

from __future__ import annotations

import hashlib
import importlib.util
from typing import Any

import pytest
from solders.hash import Hash
from solders.instruction import Instruction
from solders.keypair import Keypair
from solders.litesvm import LiteSVM
from solders.pubkey import Pubkey
from solders.system_program import ID as SYSTEM
from solders.transaction import Transaction
from solders.transaction_metadata import FailedTransactionMetadata, TransactionMetadata

from covenant.providers.chain import interface, transactions
from covenant.providers.chain.local_vm import LocalVm
from covenant.stores.settlement.interface import Batch
from policy import errors
from policy.audit_log import receipt_tree
from tests import extras_kit

PROGRAM = Pubkey.from_string("Stake11111111111111111111111111111111111111")
SIGNER = Keypair.from_seed(bytes(range(32)))
ROOT = receipt_tree.root([hashlib.sha256(bytes([n])).digest() for n in range(5)])
BATCH = Batch(receipt_tree.batch_id(ROOT).hex(), ROOT.hex(), 5)


def test_without_chain_it_is_said_what_is_missing() -> None:
    status = interface.OffChain().status()
    assert not status.ready
    assert status.missing == ("cluster", "rpc_url", "program_id", "covnt_mint", "signer")
    partly = interface.OffChain(interface.Config(cluster="devnet", rpc_url="http://127.0.0.1:8899")).status()
    assert (partly.cluster, partly.missing) == ("devnet", ("program_id", "covnt_mint", "signer"))


@pytest.mark.anyio
async def test_without_chain_nothing_is_anchored() -> None:
    with pytest.raises(errors.ChainError) as refused:
        await interface.OffChain().anchor(BATCH, now_ms=1)
    assert "program_id" in refused.value.hint


@pytest.mark.anyio
async def test_without_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == "solders" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert interface.OffChain().status().missing[-1] == "extra settlement"
    for attempt in (
        lambda: LocalVm(bytes(32)),
        lambda: transactions.memo_instruction(BATCH, authority=SIGNER.pubkey()),
        lambda: transactions.anchor_instruction(BATCH, program_id=PROGRAM, authority=SIGNER.pubkey()),
    ):
        with pytest.raises(errors.SettlementMissingError) as refused:
            attempt()
        assert refused.value.hint == extras_kit.command("settlement")


def test_instruction_has_its_name_batch_and_accounts() -> None:
    made = transactions.anchor_instruction(BATCH, program_id=PROGRAM, authority=SIGNER.pubkey())
    name = hashlib.sha256(b"global:anchor_receipt_batch").digest()[:8]
    batch_id = hashlib.sha256(b"covenant-receipts:" + ROOT.hex().encode()).digest()
    assert bytes(made.data) == name + batch_id + ROOT + b"\5\0\0\0"
    addresses = transactions.Addresses(PROGRAM)
    assert [(one.pubkey, one.is_signer, one.is_writable) for one in made.accounts] == [
        (addresses.config(), False, False),
        (addresses.receipt_batch(batch_id), False, True),
        (SIGNER.pubkey(), True, True),
        (SYSTEM, False, False),
    ]


def test_addresses_are_derived_from_version_1s_seeds() -> None:
    addresses = transactions.Addresses(PROGRAM)
    one, other = Keypair.from_seed(b"1" * 32).pubkey(), Keypair.from_seed(b"2" * 32).pubkey()
    expected = {
        addresses.config(): [b"config"],
        addresses.agent(one): [b"agent", bytes(one)],
        addresses.credits(one): [b"credits", bytes(one)],
        addresses.stake(one, other): [b"stake", bytes(one), bytes(other)],
        addresses.task(b"t" * 32): [b"task", b"t" * 32],
        addresses.receipt_batch(b"b" * 32): [b"receipt_batch", b"b" * 32],
    }
    assert len(expected) == 6
    for address, seeds in expected.items():
        found, bump = Pubkey.find_program_address(seeds, PROGRAM)
        assert address == found
        # An address that no key signs for: the hash of its seeds, taken until it is on no curve (Solana, PDA).
        digest = hashlib.sha256(b"".join(seeds) + bytes([bump]) + bytes(PROGRAM) + b"ProgramDerivedAddress").digest()
        assert bytes(found) == digest
        assert not found.is_on_curve()


def test_transaction_is_signed_fits_packet_and_reads_back() -> None:
    instruction = transactions.anchor_instruction(BATCH, program_id=PROGRAM, authority=SIGNER.pubkey())
    made = transactions.signed(instruction, signer=SIGNER, blockhash=Hash.default())
    raw = bytes(made)
    assert len(raw) < transactions.MAX_TRANSACTION_BYTES
    again = Transaction.from_bytes(raw)
    again.verify()
    assert bytes(again.message.instructions[0].data) == transactions.anchor_data(BATCH)
    big = Instruction(PROGRAM, b"x" * 1500, instruction.accounts)
    with pytest.raises(errors.ChainError, match="larger"):
        transactions.signed(big, signer=SIGNER, blockhash=Hash.default())


def test_memo_says_batch_and_nothing_else_is_one() -> None:
    text = transactions.memo(BATCH)
    assert transactions.read_memo(text) == BATCH
    for other in ("", text + " ", text.upper(), text.replace("v1", "v2"), f"x{text}", f"Memo (len 9): {text}"):
        assert transactions.read_memo(other) is None


@pytest.mark.parametrize("count", [0, 2**32])
def test_batch_whose_number_has_no_place_is_refused(count: int) -> None:
    batch = Batch(BATCH.batch_id, BATCH.merkle_root, count)
    with pytest.raises(errors.ChainError):
        transactions.memo(batch)
    with pytest.raises(errors.ChainError):
        transactions.anchor_data(batch)


def _execute(instruction: Instruction, *, paid: bool = True) -> TransactionMetadata | FailedTransactionMetadata:
    vm = LiteSVM()
    if paid:
        vm.airdrop(SIGNER.pubkey(), 10**9)
    made = transactions.signed(instruction, signer=SIGNER, blockhash=vm.latest_blockhash())
    return vm.send_transaction(made)


def test_program_of_machine_carries_root() -> None:
    """The memo program itself repeats the text and names who signed: not we, but what was executed."""
    done = _execute(transactions.memo_instruction(BATCH, authority=SIGNER.pubkey()))
    assert isinstance(done, TransactionMetadata)
    logs = done.logs()
    assert any(BATCH.merkle_root in line for line in logs)
    assert f"Program log: {SIGNER.pubkey()}" in logs
    assert f"Program {transactions.MEMO_PROGRAM} success" in logs


def test_machine_refuses_what_nobody_pays_for_and_program_not_there() -> None:
    memo = transactions.memo_instruction(BATCH, authority=SIGNER.pubkey())
    assert isinstance(_execute(memo, paid=False), FailedTransactionMetadata)
    absent = Keypair.from_seed(b"9" * 32).pubkey()
    anchored = transactions.anchor_instruction(BATCH, program_id=absent, authority=SIGNER.pubkey())
    assert isinstance(_execute(anchored), FailedTransactionMetadata)


@pytest.mark.anyio
async def test_root_is_anchored_in_machine() -> None:
    vm = LocalVm(bytes(range(32)))
    status = vm.status()
    assert status.ready
    assert (status.cluster, status.missing) == ("litesvm", ())
    anchor = await vm.anchor(BATCH, now_ms=12)
    assert (anchor.chain, anchor.cluster, anchor.confirmed_at) == ("solana", "litesvm", 12)
    assert anchor.slot > 0
    other = await vm.anchor(Batch(BATCH.batch_id, BATCH.merkle_root, 6), now_ms=12)
    assert other.tx_sig != anchor.tx_sig


@pytest.mark.anyio
async def test_machine_that_kept_another_root_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    true_memo = transactions.memo

    def wrong(batch: Batch) -> str:
        return true_memo(Batch(batch.batch_id, "00" * 32, batch.receipt_count))

    monkeypatch.setattr(transactions, "memo", wrong)
    with pytest.raises(errors.ChainError, match="does not name"):
        await LocalVm(bytes(range(32))).anchor(BATCH, now_ms=1)


@pytest.mark.anyio
async def test_transaction_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "MEMO_PROGRAM", str(Keypair.from_seed(b"9" * 32).pubkey()))
    with pytest.raises(errors.ChainError, match="failed"):
        await LocalVm(bytes(range(32))).anchor(BATCH, now_ms=1)
