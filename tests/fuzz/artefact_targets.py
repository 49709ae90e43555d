"""Compiled artefacts: one of them changed, the others as they were compiled. What is still proved means the same."""

from __future__ import annotations

import functools
import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from policy import data, errors, prove
from policy.compile.artefacts import Artefacts
from policy.decompile import bpf, calls, conditions
from policy.decompile.network import nft, packets
from policy.grants import restore
from policy.grants.effective import Effective
from policy.rules import nine
from tests.fuzz.drive import Target
from tests.unit.policy.compile import sample

_MORE = (
    sample.entries(
        ("*.example.com", "[443]", "tls"),
        ("db.example.com", '[5432, "8000-8010"]', "tcp"),
        ("10.0.0.0/8", "[22]", "tcp"),
        ("2001:db8::/32", "[53]", "udp"),
        ("192.0.2.7", '["1-65535"]', "tls"),
    )
    + """
[permissions.filesystem]
read = ["/usr/share/doc", "/opt/a"]
[permissions.executables]
allow = ["/usr/bin/cat"]
[permissions.credentials]
grants = ["db"]
[permissions.skills]
side_effects = ["read"]
[spawn]
allowed = true
max_depth = 2
max_descendants = 3
[lifetime]
ttl_seconds = 60
"""
)
# What may be written in several ways that mean the same; of everything else the one accepted form is the compiled one.
_MANY_FORMS = frozenset({"seccomp.json", "seccomp.bpf", "firewall.nft", "provenance.json"})


@functools.cache
def _compiled() -> tuple[Effective, Mapping[str, bytes], prove.Facts]:
    found = sample.manifest(more=_MORE, network="full", resources="memory_mb = 100\nnet_bps = 100000\ncpu_weight = 50")
    facts = prove.Facts.of(found, sample.host(), "d" * 64)
    return nine.requested(found, roles=data.roles()), sample.compiled(found).files, facts


def _changed(name: str, also: Callable[[bytes], None]) -> Callable[[bytes], str]:
    def attempt(raw: bytes) -> str:
        effective, files, facts = _compiled()
        prove.prove(effective, Artefacts({**files, name: raw}), known=facts)
        if raw == files[name]:
            return "as compiled"
        assert name in _MANY_FORMS or _meaning(raw) == _meaning(files[name]), f"another {name} is proved"
        also(raw)
        return "another form"

    return attempt


def _meaning(raw: bytes) -> Any:
    """A document without what only people look at: the names of grants, and the order of their index."""
    document = json.loads(raw)
    if isinstance(document, dict) and "grants" in document and "gateway" in document:
        document["grants"] = sorted(str({**grant, "id": ""}) for grant in document["grants"])
    return document


def _nothing(raw: bytes) -> None:
    """There is no other reader to ask."""


X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOW = 0x7FFF0000
_NUMBERS = {number: name for name, number in data.syscalls("x86_64").numbers.items()}


def _asked(raw: bytes, times: int) -> Iterator[tuple[int, list[int]]]:
    """Calls to ask a filter for: numbers and arguments at the ends of what rules look at."""
    rng = random.Random(raw)
    words = (0, 1, 2, 0x5412, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
    for _ in range(times):
        number = rng.choice((rng.randrange(470), rng.choice(list(_NUMBERS)), 2**30 + rng.randrange(500)))
        yield number, [rng.choice((*words, rng.getrandbits(32), rng.getrandbits(64))) for _ in range(6)]


def _filter(raw: bytes) -> None:
    """Another filter that is proved decides every call that is asked as the compiled one does."""
    compiled = _compiled()[1]["seccomp.bpf"]
    for number, arguments in _asked(raw, 40):
        for arch in (X86, I386, ARM):
            asked: Any = {"number": number, "arch": arch, "arguments": arguments}
            assert bpf.decide(raw, **asked) == bpf.decide(compiled, **asked), asked


def _rules(raw: bytes) -> None:
    """Another firewall that is proved does the same with every packet that is asked."""
    compiled, other = nft.parse(_compiled()[1]["firewall.nft"]), nft.parse(raw)
    rng = random.Random(raw)
    edges = [end + step for one in compiled.sets.values() for span in one.spans for end in span for step in (-1, 0, 1)]
    for _ in range(40):
        packet = packets.Packet(
            rng.choice(edges),
            rng.choice(("tcp", "udp", "icmp")),
            rng.choice((22, 53, 80, 443, 5432, 8000, 8010, 8011, 8443, 1, 65535)),
            rng.choice(("agent0", "uplink0", "")),
            rng.choice(("agent0", "uplink0", "")),
            established=rng.random() < 0.1,
            dnat=rng.random() < 0.2,
            uid=rng.choice((None, 0, 64998)),
        )
        for hook in ("forward", "input", "output", "prerouting"):
            assert packets.verdict(other, hook, packet) == packets.verdict(compiled, hook, packet), (hook, packet)


def firewall(raw: bytes) -> str:
    """firewall.nft alone: what is read names only what is there."""
    table = nft.parse(raw)
    assert nft.parse(raw) == table
    for chain in table.chains.values():
        for rule in chain.rules:
            assert rule.addresses is None or rule.addresses in table.sets
            assert not rule.verdict.chain or rule.verdict.chain in table.chains
            assert 1 <= rule.line <= raw.count(b"\n")
    return f"{len(table.sets)} sets {len(table.chains)} chains"


def written(raw: bytes) -> str:
    """effective.json as grants: what is taken is what those grants are written as."""
    document = json.loads(raw)
    found = restore.effective(document)
    assert json.dumps(found.canonical(), sort_keys=True) == json.dumps(document, sort_keys=True)
    assert restore.effective(found.canonical()) == found
    assert found.is_subset(Effective.top())
    return found.network.mode


def _written() -> list[bytes]:
    values = (Effective.top(), Effective.bottom(), _compiled()[0])
    return [json.dumps(value.canonical(), sort_keys=True).encode() for value in values]


def filter_alone(raw: bytes) -> str:
    """seccomp.bpf alone: what is read off all calls at once is what the interpreter does with each."""
    found = calls.read_bpf(raw, "x86_64", _NUMBERS)
    for number, arguments in _asked(raw, 12):
        name = _NUMBERS.get(number)
        rule = found.allowed.get(name) if name else None
        passes = rule is not None and conditions.holds(rule, arguments)
        asked: Any = {"number": number, "arguments": arguments}
        assert (bpf.decide(raw, arch=X86, **asked) == ALLOW) == passes, asked
        assert bpf.decide(raw, arch=I386, **asked) != ALLOW
    return f"{min(len(found.allowed), 20)} calls"


def _small_filter() -> bytes:
    steps = [
        (0x20, 0, 0, 4),
        (0x15, 1, 0, X86),
        (0x06, 0, 0, 0x50001),
        (0x20, 0, 0, 0),
        (0x15, 0, 1, 0),
        (0x06, 0, 0, ALLOW),
        (0x15, 0, 4, 16),
        (0x20, 0, 0, 24),
        (0x54, 0, 0, 0xFFFF),
        (0x15, 1, 0, 0x5412),
        (0x06, 0, 0, ALLOW),
        (0x06, 0, 0, 0x50001),
    ]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def _artefact(name: str, share: int, *, tree: bool = True, also: Callable[[bytes], None] = _nothing) -> Target:
    return Target(
        name, _changed(name, also), lambda: (_compiled()[1][name],), _WORDS.get(name, ()), share=share, json=tree
    )


_WORDS: dict[str, tuple[bytes, ...]] = {
    "firewall.nft": (
        b"\t\taccept\n",
        b"\t\tdrop\n",
        b" accept",
        b" drop",
        b" return",
        b'iifname "agent0" ',
        b'oifname "uplink0" ',
        b"ip daddr @",
        b"ip6 daddr @",
        b"tcp dport { 22 } ",
        b"udp dport { 53 } ",
        b"meta l4proto tcp ",
        b"ct state established,related ",
        b"ct status dnat ",
        b"meta skuid 64998 ",
        b"\n}\n",
        b"\t}\n",
        b"policy accept;",
        b"policy drop;",
        b"0.0.0.0-255.255.255.255",
        b"redirect to :8443",
    ),
    "seccomp.bpf": (
        b"\x06\x00\x00\x00\x00\x00\xff\x7f",
        b"\x20\x00\x00\x00\x04\x00\x00\x00",
        b"\x15\x00\x00\x01",
        b"\x3e\x00\x00\xc0",
    ),
}

TARGETS = (
    *(_artefact(name, 1) for name in ("config.json", "cgroup.json", "mounts.json", "network.json", "gates.json")),
    *(_artefact(name, 1) for name in ("credentials.json", "supervision.json", "runtime.json", "effective.json")),
    _artefact("provenance.json", 1),
    _artefact("seccomp.json", 1),
    _artefact("seccomp.bpf", 1, tree=False, also=_filter),
    _artefact("firewall.nft", 1, tree=False, also=_rules),
    Target(
        "written grants",
        written,
        _written,
        (b"*", b"10.0.0.0/8", b"/srv", b"any public host"),
        refusals=(errors.CovenantError, json.JSONDecodeError, UnicodeDecodeError),
        share=4,
        json=True,
    ),
    Target("firewall alone", firewall, lambda: (_compiled()[1]["firewall.nft"],), _WORDS["firewall.nft"], share=3),
    Target("filter alone", filter_alone, lambda: (_small_filter(),), _WORDS["seccomp.bpf"], share=2),
)
