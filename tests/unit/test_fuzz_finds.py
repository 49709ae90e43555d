"""Keep as tests the faults that fuzzing the log, the configuration and the command line found (tests/fuzz)."""

from __future__ import annotations

import base64
import json
import pathlib
import time
import zlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from covenant.cli import times
from policy import errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import verify
from policy.decompile.network import gates
from sandbox import config
from sandbox.rootfs import loader_patch

PUBLIC = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32).public_key()


@pytest.mark.parametrize("index", [10**9, 2**62, 2**63, 10**40])
def test_made_up_index_is_failure_and_no_cost(index: int) -> None:
    """verify once enumerated all records up to a chain file's greatest index: it ran out of memory or overflowed."""
    line = json.dumps({"id": "e", "timestamp_ms": 1, "issuer": "x", "kind": {"type": "t"}}).encode()
    entry, _ = audit_log_chain.Head().advance(line, event_id="e", timestamp_ms=1)
    anchor = audit_log_chain.Anchor.parse(entry)
    assert anchor is not None
    forged = structs.replace(anchor, index=index).line()
    started = time.process_time()
    report = verify.verify(line + b"\n", entry + b"\n" + forged + b"\n", None, PUBLIC)
    assert not report.valid
    assert ("chain", "changed", 1) in {(f.file, f.change, f.index) for f in report.failures}
    assert time.process_time() - started < 1


def test_records_that_were_lost_are_still_listed_one_by_one() -> None:
    """The control: an index within the log's range is a missing record."""
    head, chain = audit_log_chain.Head(), []
    for i in range(4):
        entry, head = head.advance(b"%d" % i, event_id=f"e{i}", timestamp_ms=i)
        chain.append(entry)
    report = verify.verify(b"", chain[3] + b"\n", None, PUBLIC)
    assert {(f.change, f.index) for f in report.failures if f.file == "both" and f.change} == {
        ("removed", 0), ("removed", 1), ("removed", 2),
    }  # fmt: skip


@pytest.mark.parametrize("text", [b"grace_seconds = " + b"1" * 5000, b"a" * 5000 + b" = 1", b'"\\u001b[31m" = 1'])
def test_configuration_no_toml_of_ours_is_refused_shortly(text: bytes) -> None:
    """An integer of thousands of digits is a plain ValueError of tomllib, which the reader once did not catch."""
    with pytest.raises(errors.ConfigError) as refused:
        config.parse(text, file="config.toml", state=pathlib.Path("/state"))
    assert len(refused.value.message) < 400
    assert refused.value.message.isprintable()


@pytest.mark.parametrize("raw", [b"00 " * 32, b"\t".join([b"00"] * 32), b"00" * 31 + b"0 0", b"00" * 33, b""])
def test_key_of_log_has_one_spelling(raw: bytes) -> None:
    with pytest.raises(errors.LedgerError):
        audit_log_chain.read_public_key(raw)
    assert audit_log_chain.read_public_key(audit_log_chain.public_key_file(PUBLIC)) == PUBLIC


def test_duration_is_quoted_without_its_control_characters() -> None:
    with pytest.raises(errors.UsageError) as refused:
        times.duration_ms("1\x1b[31m" + "d" * 3000, option="--expires")
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 300


def test_loader_whose_neighbour_lies_behind_end_of_file_has_no_room() -> None:
    """The trampoline was once written past the end of the file, which grew by it."""
    packed = (
        "c-pIX^>JfjWMqH=W(GS35U-Wd0nB$`zyuBq7C?0n08-0}CW}nBL5)VI83bVVF)*+I@e8Q%3p5*L&}f);CLm@5VpXVsDkG}C1Te`4"
        "XE88vKxzG)%p@}t{hSotoXot^3f&3|GhH(iz2ba5BL)VbTr!Ah24ZRDLYON4L7wiOejtr-`_XA`C@l-6MWHk-Y*?V~<AU-Pv4krF"
        "08t<tm;"
    )
    with pytest.raises(errors.NotEnforceableError, match="no room"):
        loader_patch.patch(zlib.decompress(base64.b85decode(packed)))


def test_range_of_tls_gate_stands_once_and_in_order() -> None:
    """A repeated block was once accepted and proved equal to a single one."""
    blocks: list[dict[str, object]] = [
        {"first": f"192.0.2.{n}", "last": f"192.0.2.{n}", "ports": [[443, 443]]} for n in (7, 9)
    ]

    def read(*addresses: dict[str, object]) -> gates.Gates:
        document = {"dns": None, "tls": {"addresses": addresses, "listen": 8443, "names": []}, "version": 1}
        raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        return gates.read({"gates.json": raw})

    assert len(read(*blocks).addresses) == 2
    for wrong in ((blocks[0], blocks[0]), (blocks[1], blocks[0])):
        with pytest.raises(errors.ArtefactError, match="stands twice, or not in order"):
            read(*wrong)
