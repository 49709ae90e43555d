"""Kernel output about a live run: its listing of rules and its configuration, changed anywhere.

The reader of a listing returns a text that the reader of rules accepts or refuses; it raises no other exception. A
configuration is reported as equal only if it is the compiled one.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from policy import errors
from policy.compile import bundle
from policy.compile.artefacts import Artefacts
from policy.compile.mounts import host_flags
from policy.decompile.live import Readout
from policy.decompile.network import live_nft, nft
from policy.grants.sets import addresses
from policy.prove import live
from tests.fuzz.drive import Target
from tests.unit.policy.compile import sample

RUN, UID = "1b4e28ba-2fa1-41d2-883f-0016d3cca427", 2_000_007
_NAMED = {"family": "inet", "table": "covenant"}
_AGENT = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "agent0"}}
_TO = {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": "@a4"}}
_PORTS = {"set": [80, {"range": [8000, 8010]}]}
_BY = {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": _PORTS}}
_ANSWER = {"elem": {"val": "93.184.216.34", "timeout": 60, "expires": 9}}
# As nft 1.0.6 lists it (tests/kernel/test_firewall.py has the real ones).
LISTING: list[dict[str, Any]] = [
    {"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
    {"table": {"family": "inet", "name": "covenant", "handle": 1}},
    {"counter": {**_NAMED, "name": "c_1", "handle": 2, "packets": 3, "bytes": 4}},
    {"set": {**_NAMED, "name": "a4", "type": "ipv4_addr", "handle": 3, "flags": ["interval"],
             "elem": ["10.0.0.1", {"range": ["10.2.0.5", "10.2.0.9"]}, {"prefix": {"addr": "10.1.0.0", "len": 16}}]}},
    {"set": {**_NAMED, "name": "n4", "type": "ipv4_addr", "handle": 4, "size": 1024, "flags": ["timeout"],
             "elem": [_ANSWER]}},
    {"chain": {**_NAMED, "name": "refuse", "handle": 5}},
    {"chain": {**_NAMED, "name": "forward", "handle": 6, "type": "filter", "hook": "forward", "prio": 0,
               "policy": "drop"}},
    {"rule": {**_NAMED, "chain": "refuse", "handle": 7, "expr": [{"reject": {"type": "icmpx", "expr": "x"}}]}},
    {"rule": {**_NAMED, "chain": "forward", "handle": 8, "expr": [_AGENT, _TO, _BY, {"counter": "c_1"},
                                                                  {"accept": None}]}},
    {"rule": {**_NAMED, "chain": "forward", "handle": 9, "expr": [_AGENT, {"goto": {"target": "refuse"}}]}},
    {"table": {"family": "netdev", "name": "walls", "handle": 1}},
]  # fmt: skip


def listing(raw: bytes) -> str:
    """A listing: what is read of it is a text, and what a name led to is public and ends."""
    found = live_nft.read(raw)
    assert live_nft.others(raw) == found.others
    assert found.text.startswith(b"table inet covenant {\n")
    for item in json.loads(raw)["nftables"]:
        body = item.get("set", {})
        if (body.get("family"), body.get("table"), body.get("flags")) == ("inet", "covenant", ["timeout"]):
            for element in body.get("elem", []):
                answer = addresses.parse(element["elem"]["val"])
                assert answer is not None
                assert any(first <= answer[0] <= last for first, last in addresses.PUBLIC)
    try:
        table = nft.parse(found.text)
    except errors.ArtefactError:
        return "a text that is not understood"
    return f"{len(table.sets)} sets {len(table.chains)} chains"


@functools.cache
def _compiled() -> Artefacts:
    return sample.compiled(sample.manifest())


def _started() -> bytes:
    return bundle.instantiate(_compiled(), run_id=RUN, uid=UID)


def configuration(raw: bytes) -> str:
    """The config.json of a run: only the compiled one, with this run's id and user, holds."""
    files = _compiled()
    runtime, mounts = files.json("runtime.json"), files.json("mounts.json")["mounts"]
    found = Readout(
        run_id=RUN,
        uid=UID,
        config=raw,
        flags=tuple(f"{name}={value}" for name, value in runtime["flags"].items()),
        runsc_sha256=runtime["runsc"]["sha256"],
        cgroup_version=2,
        limits={entry["file"]: entry["value"] for entry in files.json("cgroup.json")["v2"]},
        mounts={"/": ("ro", "nosuid", "nodev")}
        | {m["destination"]: host_flags(m["source"], m["options"]) for m in mounts if m["type"] == "bind"},
    )
    layers = live.compare(files, found)
    assert all(layer.holds for layer in layers if layer.name != "bundle")
    (layer,) = (layer for layer in layers if layer.name == "bundle")
    assert layer.holds == (raw == _started()), "another configuration holds"
    return layer.standing


TARGETS = (
    Target("live listing", listing, lambda: (json.dumps({"nftables": LISTING}).encode(),), share=3, json=True),
    Target("live configuration", configuration, lambda: (_started(),), (b"args", b"user", b"0"), share=1, json=True),
)
