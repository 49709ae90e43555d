"""The compiled agent, built as set-up builds it, against Python's own JSON and CRC-32."""

from __future__ import annotations

import json
import re
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The static one of the package and a dynamic one."""
    dynamic = tmp_path_factory.mktemp("build") / "checksum"
    subprocess.run(
        [str(ROOT / "scripts" / "build_agents"), "--dynamic", str(dynamic)],
        check=True,
        timeout=120,
        capture_output=True,
    )
    return [ROOT / "agents" / "checksum" / "bin" / "checksum", dynamic]


def _run(binary: Path, line: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(binary)], input=line, capture_output=True, timeout=30, check=False)


def _fnv1a(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def _utf8(text: str) -> bytes:
    """As the agent sees it: half a surrogate pair is U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    text=st.text(st.characters(exclude_categories=())),
    ascii_only=st.booleans(),
    more=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
)
def test_it_reads_what_python_writes(binaries: list[Path], text: str, ascii_only: bool, more: object) -> None:
    # A pair of escapes that happen to be surrogates is one character in JSON; so Python's reader decides.
    document = {"id": "x", "more": more, "text": text, "parent": None}
    line = json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass") + b"\n"
    seen = json.loads(line.decode("utf-8", "surrogatepass"))["text"]
    data = _utf8(seen) if ascii_only else seen.encode("utf-8", "surrogatepass")
    for binary in binaries:
        done = _run(binary, line)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(b"\n") == 1
        answer = json.loads(done.stdout)
        assert answer["sources"] == []
        assert answer["text"].startswith(
            f"crc32 {zlib.crc32(data):08x}, fnv1a {_fnv1a(data):016x}, {len(data)} bytes: "
        )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"[]\n",
        b'"text"\n',
        b"{}\n",
        b'{"text":1}\n',
        b'{"text":"a"\n',
        b'{"text":"a"} x\n',
        b'{"text":"\\x"}\n',
        b'{"text":"\\u12"}\n',
        b'{"text":"\x01"}\n',
        b'{"text":"a\n',
        b'{"other":"a"}\n',
        b'{"a":' + b"[" * 100_000 + b"\n",
        b'{"text":"\\\x00"}\n',
        b'{"a":\x00,"text":"b"}\n',
        b'{"text":"' + b"a" * (5 << 20) + b'"}\n',
    ],
)
def test_it_refuses_what_is_no_intent(binaries: list[Path], line: bytes) -> None:
    for binary in binaries:
        done = _run(binary, line)
        assert done.returncode == 1
        assert done.stdout == b""
        assert re.fullmatch(rb"checksum: [a-z0-9A-Z ]+\n", done.stderr)


def test_same_source_gives_same_bytes(binaries: list[Path], tmp_path: Path) -> None:
    again = tmp_path / "again"
    subprocess.run(
        [str(ROOT / "scripts" / "build_agents"), "--dynamic", str(again)], check=True, timeout=120, capture_output=True
    )
    assert again.read_bytes() == binaries[1].read_bytes()


def test_second_build_changes_nothing(binaries: list[Path]) -> None:
    before = binaries[0].stat()
    done = subprocess.run([str(ROOT / "scripts" / "build_agents")], check=True, timeout=120, capture_output=True)
    after = binaries[0].stat()
    assert done.stdout == b""
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
