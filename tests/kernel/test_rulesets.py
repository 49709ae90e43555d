"""A ruleset is checked once for each text, and one that the kernel refuses changes nothing, checked or not."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.kernel.net import netns, nft, nft_table
from sandbox.network import ruleset_cache
from sandbox.storage import json_cache

NFT = Path("/usr/sbin/nft")
GOOD = b"table inet probe {\n\tset hosts { type ipv4_addr; elements = { 192.0.2.1 }; }\n}\n"
# The first half is fine; the second names a set that is not there, which only the kernel can say.
HALF = GOOD + b"add element inet probe nowhere { 192.0.2.2 }\n"


@pytest.fixture
def space() -> Iterator[int]:
    (fd,) = netns.make()
    try:
        yield fd
    finally:
        os.close(fd)


def test_what_kernel_refuses_changes_nothing_with_or_without_its_check(
    space: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[bool] = []
    real = nft.apply

    def noted(binary: Path, text: bytes, *, checked: bool = True) -> None:
        checks.append(checked)
        real(binary, text, checked=checked)

    monkeypatch.setattr(nft, "apply", noted)
    (tmp_path / "closures").mkdir(mode=0o700)
    for _ in range(2):
        with pytest.raises(errors.KernelError):
            netns.within(space, lambda: ruleset_cache.apply(NFT, HALF, state=tmp_path))
    with pytest.raises(errors.KernelError):
        netns.within(space, lambda: real(NFT, HALF, checked=False))
    assert netns.within(space, lambda: nft_table.comment("probe")) is None
    # What was refused is not remembered; what was applied is, and by its text alone.
    for text in (GOOD, GOOD, GOOD + b"\n"):
        netns.within(space, functools.partial(ruleset_cache.apply, NFT, text, state=tmp_path))
    assert checks == [True, True, True, False, True]
    assert "192.0.2.1" in str(netns.within(space, lambda: nft.listed(NFT, "table", "inet", "probe")))
    # A record that others could have written is none.
    record = tmp_path / "closures" / ruleset_cache.CHECKED
    assert len(json_cache.read(record) or {}) == 2
    record.chmod(0o644)
    netns.within(space, lambda: ruleset_cache.apply(NFT, GOOD, state=tmp_path))
    assert checks[-1] is True
