"""``covenant models usage``: sums by agent or run, from the supervisor's log or the daemon's copies of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.audit.log import Ledger
from tests import cli_kit, copied_log_kit

FIRST, SECOND = "11111111-aaaa-4aaa-8aaa-aaaaaaaaaaaa", "22222222-bbbb-4bbb-8bbb-bbbbbbbbbbbb"
NONE = "no request of `{}` to a model, search, page or collector is in the log\n"


@pytest.fixture
def home(covenant_home: Path) -> Path:
    """A log of two runs of agent `one` and one of agent `two`."""
    base = covenant_home / "supervisor"
    base.mkdir(mode=0o700, parents=True)
    with Ledger.open(base / "audit", head=base / "audit-head" / "head.json") as log:
        for run_id, agent_id, tokens in ((FIRST, "one", 5), (SECOND, "one", 7), (FIRST[::-1], "two", 11)):
            fields = {
                "run_id": run_id,
                "agent_id": agent_id,
                "operator": "ann",
                "provider": "near",
                "model": "test-1",
                "path": "/v1/chat/completions",
                "stream": False,
                "status": 200,
                "input_tokens": tokens,
                "output_tokens": 1,
                "counted": True,
                "whole": True,
                "duration_ms": 3,
                "credits": 2,
            }
            log.append("model_asked", fields, issuer=copied_log_kit.ISSUER, now_ms=1_700_000_000_000)
    return covenant_home


def _tokens(*subject: str) -> dict[str, int]:
    return {one["agent_id"]: one["input_tokens"] for one in cli_kit.document("models", "usage", *subject)["usage"]}


@pytest.mark.parametrize("copies", [False, True])
def test_usage_is_summed_by_agent_or_run(copies: bool, home: Path) -> None:
    if copies:
        copied_log_kit.leave_copies(home, run_id=FIRST, row_type="model_asked")
    assert _tokens() == {"one": 12, "two": 11}
    assert _tokens("one") == {"one": 12}
    assert _tokens(FIRST) == {"one": 5}
    assert _tokens(SECOND[:8]) == {"one": 7}
    # A shorter text could be how an agent's id and many runs begin.
    assert _tokens(SECOND[:7]) == {}
    assert cli_kit.done("models", "usage", "three") == NONE.format("three")


def test_missing_log_is_named(covenant_home: Path) -> None:
    assert "COVENANT_STATE" in cli_kit.refused("ledger", "models", "usage").hint
