"""Read limits of input and output back from the files of a cgroup."""

from __future__ import annotations

import pytest

from tests import proof_kit
from tests.unit.policy.compile import sample


@pytest.mark.parametrize("key", ["io_read_bps", "io_write_bps", "io_read_iops", "io_write_iops"])
def test_io_limit_is_read_back(key: str) -> None:
    case = proof_kit.case(sample.manifest(resources=f"{key} = 1000000"))
    assert getattr(case.prove().found.grants.resources, key) == 1_000_000
