"""Check attestation of the host: a record of an earlier version, and an nft that does not list its rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.decompile import host_rules
from sandbox.attest import network
from sandbox.attest.network import Network
from sandbox.attest.network_view import ListingCache, Space
from sandbox.kernel.net import dump, nft
from sandbox.kernel.procfs import Name

SPACE = Space(3, 4, 5, ("device 1 lo",))
RUN = host_rules.Run("cv-12345678", "eth0", ((1, 1),), ((2, 9), (12, 12)))
MADE = Network(Name(1, 2), 3, SPACE, SPACE, "eth0", "/usr/sbin/nft", run=RUN, touching=("a rule",))


def test_record_of_network_is_read_as_written() -> None:
    assert Network.from_json(MADE.to_json()) == MADE


def test_record_of_earlier_version_has_no_host_rules() -> None:
    written = MADE.to_json()
    del written["run"], written["touching"]
    found = Network.from_json(written)
    assert (found.run, found.touching) == (None, ())


def test_host_rules_are_listed_once_for_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, asked = [7], list[tuple[Any, ...]]()
    monkeypatch.setattr(dump, "cookie", lambda: "here")
    monkeypatch.setattr(dump, "generation", lambda: numbers[0])

    def listed(*what: Any) -> bytes:
        asked.append(what)
        return b'{"nftables": []}'

    monkeypatch.setattr(nft, "listed", listed)
    look = network.host_listing
    seen, binary, path = ListingCache(), Path("/usr/sbin/nft"), tmp_path / "host.json"
    first = look(binary, path, seen)
    assert [look(binary, path, seen), look(binary, path, ListingCache())] == [first, first]
    assert len(asked) == 1
    numbers[0] = 8
    look(binary, path, seen)
    assert len(asked) == 2


def test_nft_that_lists_nothing_says_how_to_mend_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "cookie", lambda: "here")
    monkeypatch.setattr(dump, "generation", lambda: 7)
    works: list[bool] = []

    def listed(binary: Path, *what: str) -> bytes:
        if not works:
            raise errors.KernelError("nft -j list ruleset: no", where=str(binary))
        return b'{"nftables": []}'

    monkeypatch.setattr(nft, "listed", listed)
    place = tmp_path / "host.json"
    with pytest.raises(errors.KernelError) as raised:
        network.host_listing(Path("/usr/sbin/nft"), place, ListingCache())
    assert (raised.value.where, "nft -j list ruleset" in str(raised.value.hint)) == ("/usr/sbin/nft", True)
    works.append(True)
    assert network.host_listing(Path("/usr/sbin/nft"), place, ListingCache())[1]
