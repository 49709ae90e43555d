"""A sealed secret opens at its own place, under its own key, from its own bytes, and in no other way."""

from __future__ import annotations

import os

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sandbox.kernel.proc.secret_memory import Locked
from sandbox.vault import sealing
from sandbox.vault.sealing import Box, Place

# Wider than names and ids may be: what keeps places apart may not lean on what they are made of.
TEXTS = st.one_of(st.sampled_from(["", "a", "b", "ab", "a.b", "1", "a\0", "secret", "data-key"]), st.text(max_size=12))
VAULTS = st.sampled_from(["00" * 16, "01" * 16])
PLACES = st.builds(Place, VAULTS, TEXTS, TEXTS, st.integers(0, 12))
VALUES = st.binary(min_size=1, max_size=40)


@pytest.fixture(scope="module")
def master() -> Locked:
    made = Locked(sealing.KEY_BYTES)
    made.fill_random()
    return made


def sealed(master: Locked, place: Place, value: bytes) -> tuple[Box, Box]:
    nonces = os.urandom(sealing.NONCE_BYTES), os.urandom(sealing.NONCE_BYTES)
    return sealing.encrypt(master, place, memoryview(value), nonces)


def opened(master: Locked, place: Place, wrapped: Box, box: Box) -> bytes | None:
    try:
        with sealing.decrypted(master, place, wrapped, box) as value:
            return bytes(value.view)
    except sealing.WrongKeyError:
        return None


@given(PLACES, PLACES, VALUES)
def test_no_two_places_open_each_others_record(master: Locked, one: Place, other: Place, value: bytes) -> None:
    wrapped, box = sealed(master, one, value)
    assert opened(master, one, wrapped, box) == value
    if one != other:
        assert opened(master, other, wrapped, box) is None


@given(PLACES, PLACES)
def test_what_place_is_bound_to_is_its_own(one: Place, other: Place) -> None:
    bounds = {place.bound(purpose) for place in (one, other) for purpose in ("secret", "data-key")}
    assert len(bounds) == (2 if one == other else 4)


@given(PLACES, VALUES, VALUES)
def test_halves_of_two_records_of_one_place_do_not_fit(master: Locked, place: Place, a: bytes, b: bytes) -> None:
    """The value of an older version put beside the data key of a newer."""
    (wrapped_a, box_a), (wrapped_b, box_b) = sealed(master, place, a), sealed(master, place, b)
    assert opened(master, place, wrapped_a, box_b) is None
    assert opened(master, place, wrapped_b, box_a) is None
    assert opened(master, place, box_a, wrapped_a) is None


@given(PLACES, VALUES, st.data())
def test_every_other_byte_is_refused(master: Locked, place: Place, value: bytes, data: st.DataObject) -> None:
    boxes = list(sealed(master, place, value))
    which = data.draw(st.integers(0, 1))
    nonce, ciphertext = bytearray(boxes[which].nonce), bytearray(boxes[which].ciphertext)
    part = data.draw(st.sampled_from([nonce, ciphertext]))
    part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    boxes[which] = Box(bytes(nonce), bytes(ciphertext))
    assert opened(master, place, *boxes) is None


@given(PLACES, VALUES, st.integers(0, 60), st.integers(0, 60))
def test_what_is_cut_short_is_refused(master: Locked, place: Place, value: bytes, first: int, second: int) -> None:
    wrapped, box = sealed(master, place, value)
    cut = Box(wrapped.nonce, wrapped.ciphertext[:first]), Box(box.nonce, box.ciphertext[:second])
    assume(cut != (wrapped, box))
    assert opened(master, place, *cut) is None


@settings(max_examples=40)
@given(PLACES, VALUES)
def test_another_key_opens_nothing_until_record_is_rewrapped(master: Locked, place: Place, value: bytes) -> None:
    wrapped, box = sealed(master, place, value)
    with Locked(sealing.KEY_BYTES) as other:
        other.fill_random()
        assert opened(other, place, wrapped, box) is None
        again = sealing.rewrap(master, other, place, wrapped, os.urandom(sealing.NONCE_BYTES))
        assert opened(other, place, again, box) == value
        assert opened(master, place, again, box) is None


@given(st.binary(max_size=60), st.binary(max_size=60), VAULTS, VAULTS)
def test_seal_is_of_one_document_of_one_vault(master: Locked, a: bytes, b: bytes, one: str, other: str) -> None:
    mac = sealing.seal(master, one, a)
    assert sealing.is_sealed(master, other, b, mac) == ((one, a) == (other, b))
