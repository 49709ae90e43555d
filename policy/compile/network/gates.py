"""gates.json: what the DNS gate resolves and where it puts the answers, and what the TLS gate lets through."""

from __future__ import annotations

from typing import Any

from policy.compile.artefacts import Provenance, built_in
from policy.compile.network import quoting
from policy.compile.network.firewall import DNS_PORT, TLS_PORT
from policy.compile.network.routes import Traced

TYPES = ("A", "AAAA", "HTTPS")
# The least that an agent needs: a name is also a message to the server that answers for it.
QUERIES_PER_SECOND, BURST = 20, 40
NAME_BYTES = 253
# A shorter time would end while the agent still holds the answer, a longer one outlives the owner's change.
TTL_SECONDS = (30, 3600)
_DNS = built_in("dns gate", "resolves granted names alone, within a rate and a length")
_TLS = built_in("tls gate", "wants a ClientHello, and a granted name in it where a name was granted")


def compile(traced: Traced, provenance: Provenance) -> dict[str, Any]:
    """gates.json; ``dns`` is None without a name grant, ``tls`` without a tls grant."""
    return {"version": 1, "dns": _dns(traced, provenance), "tls": _tls(traced, provenance)}


def _dns(traced: Traced, provenance: Provenance) -> dict[str, Any] | None:
    if not traced.found.names:
        return None
    provenance.add("gates.json:dns", _DNS)
    patterns: dict[str, dict[str, list[str]]] = {}
    for one in traced.found.names:
        provenance.add(f"gates.json:dns/name/{one.pattern}", traced.causes[one.key])
        sets = patterns.setdefault(one.pattern, {"v4": [], "v6": []})
        for version, name in zip(("v4", "v6"), one.sets, strict=False):
            sets[version].append(name)
    return {
        "listen": DNS_PORT,
        "types": list(TYPES),
        "queries_per_second": QUERIES_PER_SECOND,
        "burst": BURST,
        "name_bytes": NAME_BYTES,
        "ttl_seconds": list(TTL_SECONDS),
        "names": [{"pattern": pattern, "sets": sets} for pattern, sets in patterns.items()],
    }


def _tls(traced: Traced, provenance: Provenance) -> dict[str, Any] | None:
    rows = [row for row in traced.rows if row.protocol == "tls"]
    if not rows:
        return None
    provenance.add("gates.json:tls", _TLS)
    names, addresses = [], []
    for row in rows:
        ports = [list(span) for span in row.ports]
        if row.kind == "name":
            provenance.add(f"gates.json:tls/name/{row.host}", traced.causes[row.key])
            names.append({"pattern": row.host, "ports": ports})
        for first, last in map(_ends, row.where):
            provenance.add(f"gates.json:tls/address/{first}-{last}", traced.causes[row.key])
            addresses.append({"first": first, "last": last, "ports": ports})
    return {"listen": TLS_PORT, "names": names, "addresses": addresses}


def _ends(span: tuple[int, int]) -> tuple[str, str]:
    return quoting.address(span[0]), quoting.address(span[1])
