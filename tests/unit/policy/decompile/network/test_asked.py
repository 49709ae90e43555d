"""Names that an operator is asked about, read back: they are no grant, and a spoiled artefact is refused or told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from policy import errors
from policy.compile.targets import all as targets_all
from policy.data import target_table
from policy.decompile import read as reading
from policy.grants.network import Network
from tests.unit.policy.compile import sample, targets_kit

HTTPS = ((443, 443),)
ENTRY = '[[permissions.network]]\nhost = "{}"\nports = [443]\nprotocol = "tls"\n'
MORE = ENTRY.format("api.example.com") + ENTRY.format("*.example.com") + 'on_deny = "ask"\nask_seconds = 20\n'
GRANTED = Network.of([("api.example.com", HTTPS, "tls")], [("*.example.com", HTTPS, "tls")])
Files = dict[str, bytes]


def compiled() -> Files:
    return dict(sample.compiled(sample.manifest(more=MORE, network="outbound-https-only")).files)


def test_asked_names_are_read_back_as_asked() -> None:
    found = reading.read(compiled())
    assert found.grants.network == found.reached.listed == GRANTED
    (row,) = json.loads(compiled()["gates.json"])["dns"]["asked"]
    assert (row["pattern"], row["seconds"], len(row["sets"]["v4"])) == ("*.example.com", 20, 1)


def _edited(change: Callable[[Any, Any], None]) -> Files:
    files = compiled()
    gates, network = json.loads(files["gates.json"]), json.loads(files["network.json"])
    change(gates, network)
    files["gates.json"], files["network.json"] = (
        json.dumps(one, sort_keys=True, separators=(",", ":")).encode() + b"\n" for one in (gates, network)
    )
    return files


def _granted(gates: Any, network: Any) -> None:
    """The asked pattern stands among the granted ones everywhere."""
    (held,) = gates["dns"].pop("asked")
    gates["dns"]["names"].insert(0, {"inward": [], "pattern": held["pattern"], "sets": held["sets"]})
    gates["tls"]["names"] = [*gates["tls"].pop("asked"), *gates["tls"]["names"]]
    for row in network["grants"]:
        row["kind"] = "name"


def test_asked_name_among_granted_ones_is_wider() -> None:
    found = reading.read(_edited(_granted)).grants.network
    assert not found.is_subset(GRANTED)
    assert GRANTED.is_subset(found)


def _sets(gates: Any, network: Any) -> None:
    gates["dns"]["names"][0]["sets"] = gates["dns"]["asked"][0]["sets"]


SPOILED: dict[str, Callable[[Any, Any], None]] = {
    "sets of the granted name": _sets,
    "only the DNS gate asks": lambda gates, network: gates["tls"].pop("asked"),
    "only the TLS gate asks": lambda gates, network: gates["dns"].pop("asked"),
    "another pattern": lambda gates, network: gates["dns"]["asked"][0].update(pattern="*.example.net"),
    "every name": lambda gates, network: gates["dns"]["asked"][0].update(pattern="*"),
    "no sets": lambda gates, network: gates["dns"]["asked"][0].update(sets={"v4": [], "v6": []}),
    "too long": lambda gates, network: gates["dns"]["asked"][0].update(seconds=111),
    "no time": lambda gates, network: gates["dns"]["asked"][0].update(seconds=0),
    "nothing asked": lambda gates, network: gates["dns"].update(asked=[]),
    "a key more": lambda gates, network: gates["dns"]["asked"][0].update(inward=[]),
    "another port": lambda gates, network: gates["tls"]["asked"][0].update(ports=[[1, 65535]]),
    "another kind": lambda gates, network: network["grants"][-1].update(kind="name"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_artefact_is_refused(name: str) -> None:
    with pytest.raises(errors.ArtefactError):
        reading.read(_edited(SPOILED[name]))


@pytest.mark.parametrize("target", [name for name in target_table.targets() if name != targets_all.NATIVE])
def test_other_targets_lose_the_question(target: str) -> None:
    manifest = sample.manifest(more=MORE, network="outbound-https-only")
    (lost,) = [one for one in targets_kit.losses(target, manifest).values() if one.field == "network.asked"]
    assert (lost.kind, lost.details) == ("lost-grant", ("*.example.com tls 443",))
    output = targets_kit.compiled(target, manifest, accepted=targets_kit.restrictions(target, manifest))
    others = b"".join(raw for name, raw in output.files.items() if name != "loss.json")
    assert b"*.example.com" not in others
