"""Check the laws of rule 8 and of serials for any owners and claimants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from policy.rules import succession
from policy.rules.case import Claimant, Owner
from policy.rules.succession import Beside, LiveSerial

KEYS = st.frozensets(st.sampled_from(["k1", "k2", "k3"]))
RUNS = st.sampled_from(["r1", "r2", "r3"])
PLACES = st.sampled_from(["a", "b"])
DIGESTS = st.sampled_from(["d1", "d2", "d3"])
SERIALS = st.integers(1, 4)

owners = st.builds(
    Owner,
    package=PLACES,
    payload_digest=DIGESTS,
    shown=st.booleans(),
    run_id=RUNS,
    serial=st.none() | SERIALS,
    signers=KEYS.filter(bool),
)
claimants = st.builds(
    Claimant, serial=SERIALS, signers=KEYS.filter(bool), listed=KEYS, above=st.frozensets(RUNS, max_size=2)
)


@given(owners, st.none() | claimants, DIGESTS, PLACES)
def test_only_higher_serial_supersedes(owner: Owner, claimant: Claimant | None, digest: str, place: str) -> None:
    found = succession.beside(owner, claimant, payload_digest=digest, package_name=place)
    if found is Beside.SUPERSEDES:
        assert claimant is not None
        assert owner.serial is not None
        assert claimant.serial > owner.serial
        assert owner.run_id not in claimant.above
        assert owner.payload_digest != digest
        # Not another operator: they share a signer, or no signer of the older may sign for the id any more.
        assert claimant.signers & owner.signers or not claimant.listed & owner.signers


@given(owners, claimants, claimants)
def test_no_two_supersede_each_other(owner: Owner, one: Claimant, asks: Claimant) -> None:
    first = structs.replace(owner, serial=one.serial, payload_digest="one")
    second = structs.replace(owner, serial=asks.serial, payload_digest="two")
    there = succession.beside(first, asks, payload_digest="two", package_name=None)
    back = succession.beside(second, one, payload_digest="one", package_name=None)
    assert not (there is Beside.SUPERSEDES and back is Beside.SUPERSEDES)


@given(owners, claimants, DIGESTS, PLACES, KEYS)
def test_more_listed_keys_never_supersede_more(
    owner: Owner, claimant: Claimant, digest: str, place: str, more: frozenset[str]
) -> None:
    wider = structs.replace(claimant, listed=claimant.listed | more)
    after = succession.beside(owner, wider, payload_digest=digest, package_name=place)
    if after is Beside.SUPERSEDES:
        assert succession.beside(owner, claimant, payload_digest=digest, package_name=place) is Beside.SUPERSEDES


@given(owners, claimants, DIGESTS, PLACES)
def test_superseded_run_ends_once_recorded(owner: Owner, claimant: Claimant, digest: str, place: str) -> None:
    """The record alone ends the run that loses by rule 8, so killing a process in between changes nothing."""
    if succession.beside(owner, claimant, payload_digest=digest, package_name=place) is Beside.SUPERSEDES:
        assert succession.ends(LiveSerial(owner.serial, claimant.serial), "end")
    assert not succession.ends(LiveSerial(claimant.serial, claimant.serial), "end"), "never the run that won"
    assert not succession.ends(LiveSerial(owner.serial, claimant.serial), "finish")
