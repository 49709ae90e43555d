"""The kernel takes every compiled ruleset, and holds what it says: read back, it is the same sets and rules."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from policy.compile.network.firewall import MAX_BYTES_PER_SECOND
from policy.decompile.network import live_nft
from policy.manifest.agent import Manifest
from tests.kernel import ruleset_text
from tests.unit.policy.compile import sample

LOAD = 'nft -c -f "$1" && nft -f "$1" && nft -j list ruleset'


def load(ruleset: bytes, path: Path) -> subprocess.CompletedProcess[bytes]:
    """Check, load and list a ruleset in a network namespace that exists for this alone."""
    path.write_bytes(ruleset)
    return subprocess.run(["unshare", "-n", "sh", "-c", LOAD, "sh", path], capture_output=True, timeout=60)


def _full(*entries: tuple[str, str, str], resources: str = "") -> Manifest:
    return sample.manifest(network="full", more=sample.entries(*entries), resources=resources)


def _many(seed: int) -> Manifest:
    """As many entries as a manifest may have, of every kind, with few accesses among them."""
    rng = random.Random(seed)
    found: set[tuple[str, str, str]] = set()
    while len(found) < 256:
        block = f"{rng.randrange(1, 223)}.{rng.randrange(256)}.{rng.randrange(256)}.0/24"
        v6 = f"2a0{rng.randrange(10)}:{rng.randrange(1, 9999)}::/32"
        name = f"{rng.choice(['', '*.'])}h{rng.randrange(99999)}.example.com"
        ports = rng.choice(["[443]", "[80, 8080]", '["1-1023", 5432]'])
        found.add((rng.choice([block, v6, name]), ports, rng.choice(["tcp", "tls", "udp"])))
    return _full(*sorted(found))


CASES: dict[str, Callable[[], Manifest]] = {
    "https": lambda: sample.manifest(network="outbound-https-only"),
    "full": lambda: sample.manifest(network="full", resources="net_bps = 1000000"),
    "one address": lambda: _full(("192.0.2.7", "[5432]", "tcp")),
    "one IPv6 address": lambda: _full(("2001:db8::7", "[5432]", "udp")),
    "the ends of the line": lambda: _full(("0.0.0.0/1", "[1, 65535]", "tcp"), ("128.0.0.0/1", '["1-65535"]', "udp")),
    "the ends of IPv6": lambda: _full(("8000::/2", "[443]", "tls"), ("fe00::/7", '["2-3"]', "udp")),
    "a name by tls": lambda: _full(("api.example.com", "[443]", "tls")),
    "names by all": lambda: _full(
        ("*.example.com", "[443]", "tls"), ("a.example.com", "[80, 443]", "tcp"), ("b.example.org", "[123]", "udp")
    ),
    "names and addresses": lambda: _full(
        ("*.example.com", "[443]", "tls"), ("a.example.com", "[80]", "tcp"), ("10.0.0.0/8", "[443]", "tls"),
        ("10.1.0.0/16", "[22]", "tcp"), ("2001:db8::/32", '["6000-6100"]', "udp"),
        resources=f"net_bps = {MAX_BYTES_PER_SECOND + 1}",
    ),
    "sixty-four ranges": lambda: _full(("192.0.2.0/24", json.dumps([f"{n}-{n + 1}" for n in range(1, 256, 4)]), "tcp")),
    "a slow line": lambda: _full(("192.0.2.7", "[80]", "tcp"), resources="net_bps = 1"),
    "many": lambda: _many(1),
    "many more": lambda: _many(2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_kernel_holds_exactly_what_was_compiled(case: str, tmp_path: Path) -> None:
    ruleset = sample.compiled(CASES[case]()).files["firewall.nft"]
    done = load(ruleset, tmp_path / "firewall.nft")
    assert done.returncode == 0, done.stderr.decode()[:2000]
    assert ruleset_text.listed(done.stdout) == ruleset_text.written(ruleset.decode())
    assert live_nft.read(done.stdout) == live_nft.Listing(ruleset, b"[]\n"), "attestation reads the same text back"


def test_control_kernel_refuses_what_highest_rate_is_held_below(tmp_path: Path) -> None:
    ruleset = sample.compiled(_full(("192.0.2.7", "[80]", "tcp"), resources="net_bps = 20_000_000_000")).files[
        "firewall.nft"
    ]
    assert load(ruleset, tmp_path / "firewall.nft").returncode == 0
    higher = ruleset.replace(str(MAX_BYTES_PER_SECOND).encode(), b"20000000000")
    assert higher != ruleset
    assert b"Value too large" in load(higher, tmp_path / "firewall.nft").stderr


def test_control_changed_ruleset_reads_back_as_another(tmp_path: Path) -> None:
    ruleset = sample.compiled(CASES["names and addresses"]()).files["firewall.nft"]
    for old, new in ((b"{ 22 }", b"{ 23 }"), (b"10.0.0.0-10.255.255.255", b"10.0.0.0-10.255.255.254")):
        assert old in ruleset
        done = load(ruleset.replace(old, new), tmp_path / "firewall.nft")
        assert ruleset_text.listed(done.stdout) != ruleset_text.written(ruleset.decode())
