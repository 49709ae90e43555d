"""Output of a running agent, the log, the machine's files and its tools."""

from __future__ import annotations

import json
import pathlib
import struct
import types
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.cli import times
from policy import base58, contract, errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import verify
from sandbox import config
from sandbox.kernel.runsc import start_trace
from sandbox.rootfs import elf, loader_patch
from tests.fuzz.drive import Target
from tests.unit.sandbox import tiny_elf

_KEY = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
_PUBLIC = _KEY.public_key()


def result(raw: bytes) -> str:
    """The agent's one line: what is taken are texts that can be written down again."""
    read = contract.parse_result(raw)
    assert isinstance(read.text, str)
    assert all(isinstance(source, str) for source in read.sources)
    json.dumps([read.text, read.sources, read.files, read.runtime_events], ensure_ascii=False).encode()
    assert raw.strip().count(b"\n") == 0
    return f"{min(len(read.sources), 3)} sources"


def b58(raw: bytes) -> str:
    """Base58 of 32 bytes has one spelling."""
    text = raw.decode("utf-8", "surrogateescape")
    assert base58.encode(base58.decode(text, length=32)) == text
    return "a key"


def b58_bytes(raw: bytes) -> str:
    """Any bytes come back from their base58."""
    assert base58.decode(base58.encode(raw[:64]), length=len(raw[:64])) == raw[:64]
    return "bytes"


def anchor(raw: bytes) -> str:
    """A line of the chain file is what its writer would write, or nothing."""
    read = audit_log_chain.Anchor.parse(raw)
    if read is None:
        raise ValueError("no anchor")
    assert read.line() == raw
    assert audit_log_chain.Anchor.parse(read.line()) == read
    return "an anchor"


def head(raw: bytes) -> str:
    """The head file: only a head that was signed is ever read."""
    read = audit_log_chain.read_head(raw, _PUBLIC)
    audit_log_chain.head_is_whole(raw, _PUBLIC)
    if read is None:
        raise ValueError("no head")
    assert read in _HEADS
    return f"{read.count} records"


def public_key(raw: bytes) -> str:
    """The key file of the log."""
    read = audit_log_chain.read_public_key(raw)
    assert read.public_bytes_raw().hex().encode() == raw.decode().strip().lower().replace(" ", "").encode()
    return "a key"


def log(raw: bytes) -> str:
    """The three files of a log, joined by NUL: valid only when all three are as they were written."""
    events, _, rest = raw.partition(b"\0")
    chain, _, signed = rest.partition(b"\0")
    report = verify.verify(events, chain, signed, _PUBLIC)
    json.dumps(report.to_json())
    if not report.valid:
        assert report.failures
        raise ValueError("; ".join(sorted({f"{f.kind} {f.file} {f.change}" for f in report.failures}))[:100])
    lines = events.split(b"\n")[:-1]
    assert (b"\n".join(lines), len(lines)) in _WRITTEN
    return f"{len(lines)} records"


def _log(records: int) -> tuple[bytes, bytes, list[audit_log_chain.Head]]:
    heads, events, chain = [audit_log_chain.Head()], b"", b""
    for i in range(records):
        line = json.dumps({"id": f"e{i}", "timestamp_ms": 1000 + i, "issuer": "x", "kind": {"type": "t"}}).encode()
        entry, after = heads[-1].advance(line, event_id=f"e{i}", timestamp_ms=1000 + i)
        heads.append(after)
        events += line + b"\n"
        chain += entry + b"\n"
    return events, chain, heads


_EVENTS, _CHAIN, _HEADS = _log(5)
_LINES = _EVENTS.split(b"\n")[:-1]
_WRITTEN = {(b"\n".join(_LINES[:n]), n) for n in range(len(_LINES) + 1)}


def _head_file(count: int) -> bytes:
    slots = {
        audit_log_chain.slot_offset(h): audit_log_chain.sign_head(h, _KEY)
        for h in _HEADS[max(0, count - 1) : count + 1]
    }
    return slots[0] + slots.get(audit_log_chain.SLOT_BYTES, b"")


def program(raw: bytes) -> str:
    """An ELF file: everything that is read lies within it."""
    read = elf.parse(raw, name="x")
    assert elf.parse(memoryview(raw), name="x") == read
    for segment in read.segments:
        assert not segment.file_size or segment.offset + segment.file_size <= len(raw)
    for text in (read.interpreter, *read.needed, *read.rpath, *read.runpath):
        assert text.isascii()
        assert text.isprintable() or not text
    assert read.arch in ("x86_64", "aarch64")
    return f"{read.arch} {read.kind} {min(len(read.segments), 4)} {bool(read.interpreter)} {min(len(read.needed), 3)}"


def loader(raw: bytes) -> str:
    """A patched loader: as long, an ELF file still, and entered elsewhere, inside its code."""
    out = loader_patch.patch(raw)
    assert len(out) == len(raw)
    before, after = elf.parse(raw, name="x"), elf.parse(out, name="x")
    assert after.entry != before.entry
    assert any(s.vaddr <= after.entry < s.vaddr + s.file_size and s.flags & elf.PF_X for s in after.segments)
    changed = [i for i in range(len(raw)) if raw[i] != out[i]]
    assert len(changed) <= loader_patch.TRAMPOLINE_SIZE + 24
    return "patched"


def settings(raw: bytes) -> str:
    """config.toml: absolute programs, numbers in their ranges."""
    read = config.parse(raw, file="config.toml", state=pathlib.Path("/state"))
    for path in (read.runsc, read.nft, read.python3, read.node):
        assert path.is_absolute()
        assert ".." not in path.parts
    assert read.state == pathlib.Path("/state")
    assert read.uid_first >= 65_536
    assert 1 <= read.uid_count <= 65_536
    return " ".join(sorted(read.model_fields_set))


def duration(raw: bytes) -> str:
    """`90d` and the like."""
    text = raw.decode("utf-8", "surrogateescape")
    found = times.duration_ms(text, option="--x")
    assert found % 1000 == 0
    assert 1000 <= found <= 3650 * 86_400_000
    assert text.isascii()
    return text[-1]


class _Peer:
    """The sandbox's end of the trace socket, with one message to give after its greeting."""

    def __init__(self, message: bytes) -> None:
        self.messages = [b"\x08\x01", message]

    def recv(self, size: int) -> bytes:
        return self.messages.pop(0)[:size]

    def send(self, data: bytes) -> int:
        return len(data)

    def fileno(self) -> int:
        return -1


def started(raw: bytes) -> str:
    """A message of the trace: the start of the container is told from everything else by its header alone."""
    watch = start_trace.StartTrace.__new__(start_trace.StartTrace)
    peer: Any = _Peer(raw)
    watch._connection, watch._greeted = peer, False
    watch._epoll = types.SimpleNamespace(unregister=lambda _: None)  # type: ignore[assignment]
    assert watch.poll() is False
    seen = watch.poll()
    wanted = len(raw) >= 8 and struct.unpack_from("<H", raw, 2)[0] == 1
    assert seen == wanted
    if not seen:
        raise ValueError("not the start")
    return "started"


def _elves() -> list[bytes]:
    return [
        tiny_elf.build(),
        tiny_elf.build(
            interpreter="/lib64/ld-linux-x86-64.so.2", needed=("libc.so.6", "libm.so.6"), runpath="$ORIGIN/lib"
        ),
        tiny_elf.build(machine=183, kind=elf.ET_EXEC, rpath="/a:/b"),
        tiny_elf.build(padding=4096),
    ]


_RESULTS = (b'{"text":"hello","sources":["a","b"],"files":[{"path":"x"}],"runtime_events":[]}\n', b'{"text":"\\u00e9"}')
_CONFIG = b"""
host = "a.example"
runsc = "/usr/bin/runsc"
uid_first = 2000000
uid_count = 16
path_owners = [1000]
grace_seconds = 3
"""
_REFUSED = (errors.CovenantError, ValueError)
_WORDS = (
    *(bytes([i, 0]) for i in range(8)),
    b"\x7fELF",
    b"\xff" * 8,
    bytes(8),
    struct.pack("<Q", 2**63),
    struct.pack("<I", 2**31),
)

TARGETS = (
    Target(
        "result", result, lambda: _RESULTS, (b'"text":', b'"sources":[', b"\\ud800", b"1" * 5000, b"[" * 2000), share=10
    ),
    Target("result tree", result, lambda: _RESULTS, share=8, json=True),
    Target(
        "base58",
        b58,
        lambda: (base58.encode(b"\x00" * 2 + b"\x07" * 30).encode(), base58.encode(bytes(range(32))).encode()),
        (b"1", b"z"),
        _REFUSED,
        share=14,
    ),
    Target("base58 of bytes", b58_bytes, lambda: (b"\0\0a", bytes(32)), (b"\0",), _REFUSED, share=6),
    Target("anchor", anchor, lambda: _CHAIN.split(b"\n")[:-1], (b'"index":', b"0" * 64), (ValueError,), share=10),
    Target("anchor tree", anchor, lambda: _CHAIN.split(b"\n")[:-1], (b"0" * 64,), (ValueError,), share=8, json=True),
    Target(
        "log head",
        head,
        lambda: [_head_file(n) for n in (0, 1, 5)],
        (b'"marks":', b"0" * 64, b" "),
        (ValueError,),
        share=4,
    ),
    Target(
        "log key", public_key, lambda: (audit_log_chain.public_key_file(_PUBLIC),), (b"00", b"\n"), _REFUSED, share=4
    ),
    Target(
        "log",
        log,
        lambda: (b"\0".join((_EVENTS, _CHAIN, _head_file(5))),),
        (b"\n", b"\0", *_LINES),
        (ValueError,),
        share=4,
    ),
    Target("elf", program, _elves, _WORDS, share=14),
    Target("loader", loader, _elves, _WORDS, share=8),
    Target(
        "config.toml",
        settings,
        lambda: (_CONFIG,),
        (b"state", b"self", b'"/a/../b"', b"true", b"1" * 5000, b"[a]", b"\n"),
        share=6,
    ),
    Target("duration", duration, lambda: (b"90d", b"45s", b"3650d"), (b"d", b"h", "\u0661".encode()), share=8),
    Target(
        "trace message",
        started,
        lambda: (b"\x08\x00\x01\x00\x00\x00\x00\x00x", bytes(8)),
        _WORDS,
        (ValueError,),
        share=6,
    ),
)
