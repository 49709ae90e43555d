"""What fuzzing the log, the configuration and the command line found, kept as tests (tests/fuzz)."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.cli import times
from policy import audit, errors, ledger
from sandbox import config

PUBLIC = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32).public_key()


@pytest.mark.parametrize("index", [10**9, 2**62, 2**63, 10**40])
def test_a_made_up_index_is_a_failure_and_no_cost(index: int) -> None:
    """verify enumerated every record up to the greatest index that a chain file claims: memory, or an OverflowError."""
    line = json.dumps({"id": "e", "timestamp_ms": 1, "issuer": "x", "kind": {"type": "t"}}).encode()
    entry, _ = ledger.Head().advance(line, event_id="e", timestamp_ms=1)
    anchor = ledger.Anchor.parse(entry)
    assert anchor is not None
    forged = dataclasses.replace(anchor, index=index).line()
    started = time.process_time()
    report = audit.verify(line + b"\n", entry + b"\n" + forged + b"\n", None, PUBLIC)
    assert not report.valid
    assert ("chain", "changed", 1) in {(f.file, f.change, f.index) for f in report.failures}
    assert time.process_time() - started < 1


def test_records_that_were_lost_are_still_listed_one_by_one() -> None:
    """The control: an index within reach is a record that is missing."""
    head, chain = ledger.Head(), []
    for i in range(4):
        entry, head = head.advance(b"%d" % i, event_id=f"e{i}", timestamp_ms=i)
        chain.append(entry)
    report = audit.verify(b"", chain[3] + b"\n", None, PUBLIC)
    assert {(f.change, f.index) for f in report.failures if f.file == "both" and f.change} == {
        ("removed", 0), ("removed", 1), ("removed", 2),
    }  # fmt: skip


@pytest.mark.parametrize("text", [b"grace_seconds = " + b"1" * 5000, b"a" * 5000 + b" = 1", b'"\\u001b[31m" = 1'])
def test_a_configuration_that_is_no_toml_of_ours_is_refused_shortly(text: bytes) -> None:
    """An integer of thousands of digits is a plain ValueError of tomllib, and went past as one."""
    with pytest.raises(errors.ConfigError) as refused:
        config.parse(text, file="config.toml", state=pathlib.Path("/state"))
    assert len(refused.value.message) < 400
    assert refused.value.message.isprintable()


@pytest.mark.parametrize("raw", [b"00 " * 32, b"\t".join([b"00"] * 32), b"00" * 31 + b"0 0", b"00" * 33, b""])
def test_the_key_of_the_log_has_one_spelling(raw: bytes) -> None:
    with pytest.raises(errors.LedgerError):
        ledger.read_public_key(raw)
    assert ledger.read_public_key(ledger.public_key_file(PUBLIC)) == PUBLIC


def test_a_duration_is_quoted_without_its_control_characters() -> None:
    with pytest.raises(errors.UsageError) as refused:
        times.duration_ms("1\x1b[31m" + "d" * 3000, option="--expires")
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 300
