"""Check the host memory that rule 6 counts for a run: all memory that it causes, its gates included."""

from __future__ import annotations

import pytest

from policy import data
from policy.compile.cgroup import overhead_mb
from policy.rules import budget, nine
from tests.unit.policy.compile import sample


@pytest.mark.parametrize(
    ("fields", "more_mb"),
    [
        ({"filesystem": "read-only-package"}, 0),
        ({"filesystem": "ephemeral"}, 8),
        ({"filesystem": "read-only-package", "network": "outbound-https-only"}, budget.GATES_MB),
        ({"filesystem": "ephemeral", "network": "full"}, 8 + budget.GATES_MB),
    ],
)
def test_what_run_may_take_of_its_machine(fields: dict[str, str], more_mb: int) -> None:
    manifest = sample.manifest(resources="memory_mb = 100\ndisk_mb = 8\npids_max = 9", **fields)
    effective = nine.requested(manifest, roles=data.roles())
    assert budget.host_memory_mb(effective, gvisor=True) == 100 + overhead_mb(9) + more_mb
    assert budget.host_memory_mb(effective, gvisor=False) == 100, "no sandbox, no scratch in memory, no gates"
