"""Read gates.json: the one form of each list, and the form beside it that is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from policy import errors
from policy.decompile import documents
from policy.decompile.network import gates, nft
from tests import proof_kit

HTTPS, MORE = [[443, 443]], [[444, 444]]
# The rest of the document is what the compiler writes for an agent with a network.
COMPILED = proof_kit.CASES["network"]().artefacts.json("gates.json")
NAME = COMPILED["dns"]["names"][0]
WHOLE: dict[str, Any] = {
    **COMPILED,
    "dns": {
        **COMPILED["dns"],
        "listen": 5353,
        "names": [
            {**NAME, "pattern": "*.example.com", "sets": {"v4": ["a4", "b4"], "v6": []}},
            {**NAME, "pattern": "example.net", "sets": {"v4": ["c4"], "v6": ["c6"]}},
        ],
    },
    "tls": {
        **COMPILED["tls"],
        "addresses": [
            {"first": "10.0.0.1", "last": "10.0.0.9", "ports": HTTPS},
            {"first": "10.0.0.11", "last": "10.0.0.11", "ports": HTTPS},
            {"first": "255.255.255.255", "last": "255.255.255.255", "ports": HTTPS},
            {"first": "::", "last": "::", "ports": HTTPS},
            {"first": "2001:db8::", "last": "2001:db8::9", "ports": HTTPS},
            {"first": "10.0.0.3", "last": "10.0.0.3", "ports": [[444, 444], [446, 65535]]},
        ],
        "listen": 8443,
        "names": [{"pattern": "*", "ports": [[0, 1]]}, {"pattern": "example.net", "ports": HTTPS}],
    },
}


def read(document: Any) -> gates.Gates:
    return gates.read({gates.GATES: documents.dumps(document)})


def test_gates_are_read() -> None:
    found = read(WHOLE)
    assert (found.dns_port, found.tls_port) == (5353, 8443)
    assert found.dns == {"*.example.com": (("a4", "b4"), ()), "example.net": (("c4",), ("c6",))}
    assert found.tls == {"*": ((0, 1),), "example.net": ((443, 443),)}
    four = 10 << 24
    assert found.addresses[0] == (four + 1, four + 9, ((443, 443),))
    assert found.addresses[3][0] == nft.BASE_V6
    assert found.addresses[5] == (four + 3, four + 3, ((444, 444), (446, 65535)))
    assert read({**WHOLE, "dns": None, "tls": None}) == gates.Gates()
    for port in (1, 65535):
        document = copy.deepcopy(WHOLE)
        document["dns"]["listen"] = document["tls"]["listen"] = port
        assert (read(document).dns_port, read(document).tls_port) == (port, port)


def blocks(*found: tuple[str, str, Any]) -> Callable[[dict[str, Any]], None]:
    listed = [{"first": first, "last": last, "ports": ports} for first, last, ports in found]
    return lambda d: d["tls"].update(addresses=listed)


def ports(*found: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d["tls"]["names"][1].update(ports=list(found))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (blocks(("10.0.0.1", "10.0.0.9", HTTPS), ("10.0.0.9", "10.0.0.11", HTTPS)), "stands twice, or not in order"),
        (blocks(("10.0.0.1", "10.0.0.9", HTTPS), ("10.0.0.3", "10.0.0.4", HTTPS)), "stands twice, or not in order"),
        (blocks(("10.0.0.3", "10.0.0.3", HTTPS), ("10.0.0.1", "10.0.0.1", HTTPS)), "stands twice, or not in order"),
        (blocks(("10.0.0.1", "10.0.0.1", [[444, 444]]), ("10.0.0.3", "10.0.0.3", HTTPS)), "not in order"),
        (
            blocks(("10.0.0.1", "10.0.0.1", HTTPS), ("10.0.0.3", "10.0.0.9", HTTPS), ("10.0.0.5", "10.0.0.6", HTTPS)),
            "not in order",
        ),
        (
            blocks(("10.0.0.1", "10.0.0.1", HTTPS), ("10.0.0.3", "10.0.0.3", MORE), ("10.0.0.9", "10.0.0.9", HTTPS)),
            "not in order",
        ),
        (blocks(("10.0.0.2", "10.0.0.1", HTTPS)), "no range of addresses"),
        (blocks(("10.0.0.1", "::1", HTTPS)), "no range of addresses"),
        (blocks(("255.255.255.255", "::", HTTPS)), "no range of addresses"),
        (blocks(("10.0.0.01", "10.0.0.9", HTTPS)), "no address"),
        (blocks(("0::1", "::1", HTTPS)), "is not how ::1 is written"),
        (ports([443]), "no ports"),
        (ports([443, 442]), "no ports"),
        (ports([-1, 0]), "no ports"),
        (ports([443, 65536]), "no ports"),
        (ports(["443", 443]), "no ports"),
        (ports([443, True]), "no ports"),
        (ports([1, 2], [3, 4]), "no ports"),
        (ports([3, 4], [1, 1]), "no ports"),
        (ports([1, 2, 3]), "no ports"),
        (lambda d: d["tls"]["names"].reverse(), "stands twice, or not in order"),
        (lambda d: d["tls"]["names"].append({"pattern": "example.net", "ports": HTTPS}), "stands twice"),
        (lambda d: d["dns"]["names"].reverse(), "stands twice, or not in order"),
        (lambda d: d["dns"]["names"][0]["sets"].update(v4=["a4", "a4"]), "a set stands twice"),
        (lambda d: d["dns"]["names"][0].update(pattern="a..b"), "no pattern of names"),
        (lambda d: d["dns"].update(listen=0), "from 1 to 65535"),
        (lambda d: d["dns"].update(listen=65536), "from 1 to 65535"),
        (lambda d: d["tls"].update(listen=0), "from 1 to 65535"),
        (lambda d: d["tls"].update(listen=65536), "from 1 to 65535"),
        (lambda d: d["dns"].update(burst=41), "burst"),
        (lambda d: d["dns"].update(name_bytes=254), "name_bytes"),
        (lambda d: d["dns"].update(queries_per_second=21), "queries_per_second"),
        (lambda d: d["dns"].update(ttl_seconds=[29, 3600]), "ttl_seconds"),
        (lambda d: d["dns"].update(types=["A", "AAAA", "HTTPS", "TXT"]), "types"),
        (lambda d: d.update(version=0), "version"),
        (lambda d: d.update(more=1), "more"),
    ],
)
def test_gates_of_another_form_are_refused(edit: Callable[[dict[str, Any]], None], says: str) -> None:
    document = copy.deepcopy(WHOLE)
    edit(document)
    with pytest.raises(errors.ArtefactError) as caught:
        read(document)
    assert says in f"{caught.value.where} {caught.value}"


def test_blocks_that_touch_stay_apart() -> None:
    """Neighbours are two blocks here: each has the grant of its own that let it in."""
    document = copy.deepcopy(WHOLE)
    blocks(("10.0.0.1", "10.0.0.9", HTTPS), ("10.0.0.10", "10.0.0.11", HTTPS))(document)
    assert len(read(document).addresses) == 2
