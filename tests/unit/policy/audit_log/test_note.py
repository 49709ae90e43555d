"""Check signed notes, checkpoints and cosignatures: vectors of other programs pass, and no changed note does."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import errors
from policy.audit_log import note

# golang.org/x/mod/sumdb/note, the example of its documentation.
PETER_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PETER_SEED = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
PETER_TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
PETER_LINE = (
    "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
# Made by github.com/transparency-dev/formats 0.1.1 and published as a vector of its cosignatures.
LOG_KEY = "example.com/vector-log+4516a1da+ARGkVJ4QEa2MOOLGBO6i7NVSJ1FQ97tIX+w+Ku0RZ6Em"
WITNESS_KEY = "witness.example.com/vector+416f103d+BK/QmJFVP3SKJOqAMhFxBQPtylo3sjwWibyFDAlZKK8B"
WITNESS_SEED = base64.b64decode("BJEX3xv88eoQIKT4E+GkxZcXaJCYlQfi/GJ3NDFmZIW8")[1:]
VECTOR_TEXT = "example.com/vector-log\n1234\nSBNJTRN+FjG7owHVrKtue7eqdM4RhdRWVl71HXN2d7I=\n"
LOG_LINE = (
    "\u2014 example.com/vector-log "
    "RRah2qlLrSlk6J8DA1HmNewppUM15Quhs5cAIb1KjBsV3otVirJTW8AFVsQtJkTW1Zny7GuoAxZpI6bUPcpM68QOIgE=\n"
)
WITNESS_LINE = (
    "\u2014 witness.example.com/vector "
    "QW8QPQAAAABqwLUbDdj7sDNRIVjmjYgqFI6y4UJhPg/UAA8J8wAdqSd3q4PedRhkgXA4xFN/Jg5uWn7ZkBA+H/UHQs5d9hITdXmQAA==\n"
)
WITNESS_TIME = 1791014171
# c2sp.org/tlog-cosignature, its example; the specification publishes no keys for it.
SPEC = (
    "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
    "\u2014 example.com/behind-the-sofa "
    "Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
    "\u2014 witness.example.com/w1 "
    "jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2oyin1nPZqhf5nNo0xUe+mbIUBkBIfZ+qnA==\n"
)


def private(seed: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed)


def vector() -> note.Note:
    return note.Note.parse(f"{VECTOR_TEXT}\n{LOG_LINE}{WITNESS_LINE}".encode())


def test_example_of_reference_is_made_and_verified() -> None:
    made = note.Note(PETER_TEXT, (note.sign(PETER_TEXT, "PeterNeumann", private(PETER_SEED)),))
    assert made.raw == f"{PETER_TEXT}\n{PETER_LINE}".encode()
    verifier = note.Verifier.parse(PETER_KEY)
    assert verifier.text == PETER_KEY
    [found] = note.Note.parse(made.raw).verified([verifier])
    assert (found.verifier, found.time_s) == (verifier, None)


def test_cosignature_of_another_program_is_verified_and_made_same() -> None:
    log, witness = note.Verifier.parse(LOG_KEY), note.Verifier.parse(WITNESS_KEY)
    found = vector().verified([log, witness])
    assert [(one.verifier, one.time_s) for one in found] == [(log, None), (witness, WITNESS_TIME)]
    made = note.cosign(VECTOR_TEXT, witness.name, private(WITNESS_SEED), WITNESS_TIME)
    assert made.line == WITNESS_LINE
    assert vector().raw == f"{VECTOR_TEXT}\n{LOG_LINE}{WITNESS_LINE}".encode()


def test_example_of_specification_reads_as_it_says() -> None:
    parsed = note.Note.parse(SPEC.encode())
    checkpoint = note.Checkpoint.parse(parsed.text)
    assert (checkpoint.origin, checkpoint.size) == ("example.com/behind-the-sofa", 20852163)
    assert checkpoint.text == parsed.text
    assert [one.name for one in parsed.signatures] == ["example.com/behind-the-sofa", "witness.example.com/w1"]
    assert int.from_bytes(parsed.signatures[1].blob[4:12], "big") == 1679315147
    assert parsed.raw == SPEC.encode()


def test_unknown_keys_are_passed_over_and_known_ones_must_verify() -> None:
    log, witness = note.Verifier.parse(LOG_KEY), note.Verifier.parse(WITNESS_KEY)
    assert [one.verifier for one in vector().verified([witness])] == [witness]
    with pytest.raises(errors.NoteError, match="no signature of a known key"):
        vector().verified([note.Verifier.parse(PETER_KEY)])
    other_text = note.Note(VECTOR_TEXT.replace("1234", "1235"), vector().signatures)
    for verifier in (log, witness):
        with pytest.raises(errors.NoteError, match="does not verify"):
            other_text.verified([verifier])


def test_cosignature_binds_its_time() -> None:
    line = vector().signatures[1]
    later = note.NoteSignature(line.name, line.blob[:4] + (WITNESS_TIME + 1).to_bytes(8, "big") + line.blob[12:])
    changed = vector().with_signature(later)
    assert len(changed.signatures) == 2
    with pytest.raises(errors.NoteError, match="does not verify"):
        changed.verified([note.Verifier.parse(WITNESS_KEY)])


def test_log_signature_is_no_cosignature() -> None:
    """One key has one name for both types; the key id tells them apart, and neither signature passes for the other."""
    key = private(PETER_SEED)
    as_log = note.Verifier("a/b", note.SIGNATURE, key.public_key())
    as_witness = note.Verifier("a/b", note.COSIGNATURE, key.public_key())
    signed = note.Note(VECTOR_TEXT, (note.sign(VECTOR_TEXT, "a/b", key),))
    with pytest.raises(errors.NoteError, match="no signature of a known key"):
        signed.verified([as_witness])
    assert note.Verifier.parse(as_witness.text) == as_witness
    assert as_log.key_id != as_witness.key_id


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"text\n",
        b"text\n\n",
        b"text\n\n\xe2\x80\x94 name AAAAAAAA",
        b"text\n\n- name AAAAAAAAAAA=\n",
        b"text\n\n\xe2\x80\x94 na+me AAAAAAAAAAA=\n",
        b"text\n\n\xe2\x80\x94 name AAAAAA==\n",
        b"text\n\n\xe2\x80\x94 name AAAAAAAAAAA\n",
        b"text\n\n\xe2\x80\x94 name AAAAAAAAAAB=\n",
        b"text\n\n\xe2\x80\x94 name  AAAAAAAAAAA=\n",
        b"te\x01xt\n\n\xe2\x80\x94 name AAAAAAAAAAA=\n",
        b"te\xffxt\n\n\xe2\x80\x94 name AAAAAAAAAAA=\n",
        b"x" * note.MAX_BYTES + b"\n\n\xe2\x80\x94 name AAAAAAAAAAA=\n",
        b"text\n\n" + b"\xe2\x80\x94 name AAAAAAAAAAA=\n" * (note.MAX_SIGNATURES + 1),
    ],
)
def test_what_is_no_note_is_refused(raw: bytes) -> None:
    with pytest.raises(errors.NoteError):
        note.Note.parse(raw)


@pytest.mark.parametrize(
    "text",
    [
        "origin\n1\n",
        "origin\n1\nSBNJTRN+FjG7owHVrKtue7eqdM4RhdRWVl71HXN2d7I=",
        "\n1\nSBNJTRN+FjG7owHVrKtue7eqdM4RhdRWVl71HXN2d7I=\n",
        "origin\n01\nSBNJTRN+FjG7owHVrKtue7eqdM4RhdRWVl71HXN2d7I=\n",
        "origin\n-1\nSBNJTRN+FjG7owHVrKtue7eqdM4RhdRWVl71HXN2d7I=\n",
        "origin\n\u0661\nSBNJTRN+FjG7owHVrKtue7eqdM4RhdRWVl71HXN2d7I=\n",
        "origin\n9223372036854775808\nSBNJTRN+FjG7owHVrKtue7eqdM4RhdRWVl71HXN2d7I=\n",
        "origin\n1\nSBNJTRN=\n",
        "origin\n1\nSBNJTRN+FjG7owHVrKtue7eqdM4RhdRWVl71HXN2d7I=\n\n",
    ],
)
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(errors.NoteError):
        note.Checkpoint.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "name+c74f20a3",
        PETER_KEY.replace("c74f20a3", "c74f20a4"),
        PETER_KEY.replace("PeterNeumann", "Peter Neumann"),
        PETER_KEY.replace("+AR", "+AX"),
        PETER_KEY[:-4],
        "PeterNeumann+c74f20a3+" + base64.b64encode(b"\x06" + b"x" * 32).decode(),
    ],
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(errors.NoteError):
        note.Verifier.parse(text)
