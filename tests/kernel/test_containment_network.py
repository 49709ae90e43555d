"""Every network probe of agents/hostile/network: blocked without a grant, answered with one.

The control runs all probes between namespaces without a rule, where each achieves what its name says. Under Covenant
each combination is one sandbox, observed from outside. No mark of a probe and no ungranted packet is seen there, even
if the probe reports otherwise. The walls are tested alone against the same probes in a sandbox with every right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import hostile_combinations as combinations
from tests.kernel.conftest import leftovers
from tests.kernel.hostile_combinations import COMBINATIONS, Combination, Suite


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[Suite]:
    with combinations.opened(tmp_path_factory.mktemp("containment"), warm=warm) as made:
        yield made


@pytest.mark.parametrize("package", combinations.PACKAGES)
def test_without_rule_every_probe_gets_out(suite: Suite, package: str) -> None:
    assert suite.control(package) == {}


@pytest.mark.parametrize("combination", COMBINATIONS, ids=[one.name for one in COMBINATIONS])
def test_nothing_gets_out_not_granted(suite: Suite, combination: Combination) -> None:
    assert suite.covenant(combination) == {}
    assert leftovers(suite.world) == []


def test_sandbox_with_every_right_does_not_pass_gateway(suite: Suite) -> None:
    assert suite.walls() == {}
    links = suite.spaces.run("host", "ip", "-o", "link")
    assert "cv-" not in links
