"""Receipts in their tree: what is in it can be proved, and nothing else."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from policy.audit_log import receipt_tree
from policy.audit_log.receipt_tree import Leaf

LEAVES = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40, unique=True)
PAYER = "4vJ9JU1bJJE96FWSJKvHsmmFADCg4gpZQff4P3bkLKi"
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def _naive(leaves: list[bytes]) -> bytes:
    while len(leaves) > 1:
        leaves += leaves[-1:] * (len(leaves) % 2)
        leaves = [hashlib.sha256(leaves[i] + leaves[i + 1]).digest() for i in range(0, len(leaves), 2)]
    return leaves[0]


@given(leaves=LEAVES)
def test_root_is_pairwise_with_last_taken_twice(leaves: list[bytes]) -> None:
    assert receipt_tree.root(leaves) == _naive(list(leaves))


@given(leaves=LEAVES, data=st.data())
def test_every_leaf_is_proved_and_nothing_beside_it(leaves: list[bytes], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(leaves) - 1))
    proof = receipt_tree.prove(leaves, index)
    assert proof.root == receipt_tree.root(leaves)
    assert receipt_tree.verify(leaves[index], proof)
    other = data.draw(st.binary(min_size=32, max_size=32).filter(lambda b: b != leaves[index]))
    assert not receipt_tree.verify(other, proof)
    assert not receipt_tree.verify(leaves[index], structs.replace(proof, root=other))
    elsewhere = data.draw(st.integers(-1, len(leaves) + 1).filter(lambda n: n != index))
    assert not receipt_tree.verify(leaves[index], structs.replace(proof, index=elsewhere))
    assert not receipt_tree.verify(leaves[index], structs.replace(proof, path=(*proof.path, other)))
    if proof.path:
        assert not receipt_tree.verify(leaves[index], structs.replace(proof, path=proof.path[1:]))


@given(leaves=LEAVES.filter(lambda found: len(found) % 2 and len(found) > 1))
def test_copy_of_last_leaf_is_no_leaf(leaves: list[bytes]) -> None:
    with pytest.raises(ValueError, match="twice"):
        receipt_tree.root([*leaves, leaves[-1]])
    proof = receipt_tree.prove(leaves, len(leaves) - 1)
    forged = structs.replace(proof, index=len(leaves), count=len(leaves) + 1)
    assert not receipt_tree.verify(leaves[-1], forged)


@given(
    receipt_id=TEXT,
    resource=st.sampled_from(("compute", "memory")),
    numbers=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    record=st.none() | TEXT,
)
def test_leaf_is_compact_json_in_version_1s_order(
    receipt_id: str, resource: str, numbers: tuple[int, int], record: str | None
) -> None:
    leaf = Leaf(receipt_id, "1" * 44, resource, *numbers, record)
    raw = leaf.json()
    document = json.loads(raw)
    names = ["id", "payer", "resource", "credits_consumed", "settled_at"]
    assert list(document) == names + ["memory_record_id"] * (record is not None)
    assert list(document.values())[:5] == [receipt_id, "1" * 44, resource, *numbers]
    assert raw == json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    assert leaf.digest() == hashlib.sha256(raw).digest()


def test_bytes_of_batch_do_not_change() -> None:
    leaves = [
        Leaf("3f2504e0-4f89-41d3-9a0c-0305e82c3301", "4vJ9JU1bJJE96FWSJKvHsmmFADCg4gpZQff4P3bkLKi", "compute", 3, 17),
        Leaf(
            "3f2504e0-4f89-41d3-9a0c-0305e82c3302", "4vJ9JU1bJJE96FWSJKvHsmmFADCg4gpZQff4P3bkLKi", "memory", 1, 18, "m"
        ),
    ]
    assert leaves[1].json() == (
        b'{"id":"3f2504e0-4f89-41d3-9a0c-0305e82c3302","payer":"4vJ9JU1bJJE96FWSJKvHsmmFADCg4gpZQff4P3bkLKi",'
        b'"resource":"memory","credits_consumed":1,"settled_at":18,"memory_record_id":"m"}'
    )
    root = receipt_tree.root([leaf.digest() for leaf in leaves])
    both = hashlib.sha256(leaves[0].json()).digest() + hashlib.sha256(leaves[1].json()).digest()
    assert root == hashlib.sha256(both).digest()
    named = hashlib.sha256(f"covenant-receipts:{root.hex()}".encode()).digest()
    assert receipt_tree.batch_id(root) == named


def test_no_batch_is_empty_and_no_proof_of_what_is_not_there() -> None:
    with pytest.raises(ValueError, match="at least one"):
        receipt_tree.root([])
    with pytest.raises(IndexError):
        receipt_tree.prove([b"a" * 32], 1)


def test_no_leaf_can_pass_for_node() -> None:
    assert len(Leaf("", "", "", 0, 0).json()) > 64
