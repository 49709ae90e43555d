"""The Merkle tree of RFC 6962: published roots and proofs, and every proof of small trees against the definition."""

from __future__ import annotations

import base64
import hashlib

import pytest

from policy.audit_log import merkle

# The eight leaves and their roots that certificate-transparency-go and its kin test with.
LEAVES = [
    bytes.fromhex(text)
    for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
SIZES = 34


def lines(count: int) -> list[bytes]:
    return [b"line %d" % n for n in range(count)]


def by_definition(leaves: list[bytes]) -> bytes:
    """The Merkle tree hash as RFC 6962, section 2.1, defines it."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return hashlib.sha256(b"\x01" + by_definition(leaves[:split]) + by_definition(leaves[split:])).digest()


def tree_of(leaves: list[bytes], cut: int = 0) -> merkle.Tree:
    before = merkle.Frontier()
    for leaf in leaves[:cut]:
        before.append(merkle.leaf_hash(leaf))
    tree = merkle.Tree(cut, before.hashes)
    for leaf in leaves[cut:]:
        tree.append(merkle.leaf_hash(leaf))
    return tree


def test_published_roots() -> None:
    frontier, tree = merkle.Frontier(), merkle.Tree()
    assert frontier.root() == tree.root() == hashlib.sha256(b"").digest()
    for size, leaf in enumerate(LEAVES, 1):
        frontier.append(merkle.leaf_hash(leaf))
        tree.append(merkle.leaf_hash(leaf))
        assert frontier.root().hex() == tree.root().hex() == ROOTS[size - 1]
    assert [tree.root(size).hex() for size in range(1, 9)] == ROOTS


def test_published_consistency_proof() -> None:
    """From the tests of transparency-dev/witness: the log `monkeys` from 5 to 8."""
    old = bytes.fromhex("e35b268c1522014ef412d2a54fa94838862d453631617b0307e5c77dcbeefc11")
    new = base64.b64decode("V8K9aklZ4EPB+RMOk1/8VsJUdFZR77GDtZUQq84vSbo=")
    proof = [
        bytes.fromhex(text)
        for text in (
            "b9e1d62618f7fee8034e4c5010f727ab24d8e4705cb296c374bf2025a87a10d2",
            "aac66cd7a79ce4012d80762fe8eec3a77f22d1ca4145c3f4cee022e7efcd599d",
            "89d0f753f66a290c483b39cd5e9eafb12021293395fad3d4a2ad053cfbcfdc9e",
            "29e40bb79c966f4c6fe96aff6f30acfce5f3e8d84c02215175d6e018a5dee833",
        )
    ]
    assert merkle.extends(5, 8, old, new, proof)
    for n in range(4):
        assert not merkle.extends(5, 8, old, new, [*proof[:n], *proof[n + 1 :]])
    assert not merkle.extends(5, 8, new, old, proof)
    assert not merkle.extends(4, 8, old, new, proof)


def test_every_root_is_definition() -> None:
    leaves = lines(SIZES)
    tree = tree_of(leaves)
    for size in range(SIZES + 1):
        assert tree.root(size) == by_definition(leaves[:size])


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 7, 8, 13, 16, 31])
def test_every_inclusion_proof_holds_and_none_else(cut: int) -> None:
    leaves = lines(SIZES)
    tree = tree_of(leaves, cut)
    for size in range(cut + 1, SIZES + 1):
        root = by_definition(leaves[:size])
        for index in range(cut, size):
            proof = merkle.Inclusion(index, size, merkle.leaf_hash(leaves[index]), tuple(tree.inclusion(index, size)))
            assert merkle.includes(proof, root)
            assert tree.leaf(index) == proof.leaf
            other = merkle.Inclusion(index, size, merkle.leaf_hash(b"other"), proof.path)
            assert not merkle.includes(other, root)
            if size > 1:
                assert not merkle.includes(merkle.Inclusion((index + 1) % size, size, proof.leaf, proof.path), root)
                assert not merkle.includes(merkle.Inclusion(index, size, proof.leaf, proof.path[1:]), root)
                assert not merkle.includes(merkle.Inclusion(index, size, proof.leaf, (*proof.path, root)), root)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 7, 8, 13, 16, 31])
def test_every_consistency_proof_holds_and_none_else(cut: int) -> None:
    leaves = lines(SIZES)
    tree = tree_of(leaves, cut)
    for size in range(cut, SIZES + 1):
        for old in range(cut, size + 1):
            before, after = by_definition(leaves[:old]), by_definition(leaves[:size])
            proof = tree.consistency(old, size)
            assert merkle.extends(old, size, before, after, proof)
            wrong = by_definition([*leaves[: max(0, old - 1)], b"other"])
            assert not merkle.extends(old, size, wrong, after, proof)
            if old and old != size:
                assert not merkle.extends(old, size, before, by_definition(leaves[: size - 1]), proof)
                assert not merkle.extends(old, size, before, after, [*proof, after])


def test_cut_tree_has_roots_of_whole() -> None:
    leaves = lines(SIZES)
    for cut in range(SIZES + 1):
        tree = tree_of(leaves, cut)
        for size in range(max(cut, 1), SIZES + 1):
            assert tree.root(size) == by_definition(leaves[:size])


def test_frontier_goes_on_from_its_hashes() -> None:
    leaves = lines(SIZES)
    for at in range(SIZES):
        first = merkle.Frontier()
        for leaf in leaves[:at]:
            first.append(merkle.leaf_hash(leaf))
        second = merkle.Frontier(first.size, first.hashes)
        for leaf in leaves[at:]:
            second.append(merkle.leaf_hash(leaf))
        assert second.root() == by_definition(leaves)
        assert first.copy().root() == by_definition(leaves[:at])


@pytest.mark.parametrize(("size", "count"), [(3, 1), (4, 2), (0, 1)])
def test_frontier_of_wrong_length_is_refused(size: int, count: int) -> None:
    with pytest.raises(ValueError, match="cannot cover"):
        merkle.Frontier(size, [b"x" * 32] * count)


def test_what_is_not_there_is_refused() -> None:
    tree = tree_of(lines(10), 4)
    for size in (3, 11):
        with pytest.raises(ValueError, match="tree has sizes"):
            tree.root(size)
        with pytest.raises(ValueError, match="tree has sizes"):
            tree.consistency(size)
    for index in (3, 10):
        with pytest.raises(ValueError, match="no leaf"):
            tree.leaf(index)
        with pytest.raises(ValueError, match="no leaf"):
            tree.inclusion(index)
    with pytest.raises(ValueError, match="cannot begin"):
        tree.consistency(9, 8)
    assert not merkle.includes(merkle.Inclusion(-1, 1, b"", ()), b"")
    assert not merkle.extends(3, 2, b"", b"", [])
    assert not merkle.extends(0, 2, b"x", b"y", [])
    assert merkle.extends(0, 2, merkle.EMPTY_ROOT, b"y", [])
