"""The table of the daemon's actions is whole, and an unknown action leads to the one that may be meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policy.capabilities import actions
from policy.manifest import text

HANDLERS = Path(__file__).parents[4] / "covenant" / "handlers"
# A kind of task, and what only the operator may do, without a grant.
_NO_ACTIONS = {"a2a.message", "peers.enroll"}


def test_every_action_of_a_handler_is_known() -> None:
    closed = "|".join(sorted({actions.namespace(one) for one in actions.NAMED}))
    literal = re.compile(rf'"((?:{closed}|tool\.call)\.[a-z0-9_.]*)(?=["{{])')
    found = {one for path in HANDLERS.rglob("*.py") for one in literal.findall(path.read_text())} - _NO_ACTIONS
    assert {"memory.read", "memory.repair.", "a2a.compact", "tool.call."} <= found
    begun = tuple(one for one in found if one.endswith(".") and any(known.startswith(one) for known in actions.NAMED))
    unknown = [one for one in found if one not in begun and not actions.known(one)]
    assert unknown == []


def test_known_actions_are_well_formed() -> None:
    assert all(map(actions.well_formed, actions.NAMED))
    assert len(set(actions.NAMED)) == len(actions.NAMED)
    assert all(actions.known(begins + "x") for begins in actions.OPEN)


@pytest.mark.parametrize(
    ("action", "meant"),
    [
        ("memroy.read", "memory.read"),
        ("memory.reed.working", "memory.read.working"),
        ("a2a.sent.ada@laptop", "a2a.send.ada@laptop"),
        ("tool.cal.a.b", "tool.call.a.b"),
        ("secrets.access.mail", "secret.access.mail"),
        ("tool.web_serch", "tool.web_search"),
        ("weather.read", ""),
        ("tool", ""),
    ],
)
def test_unknown_action_leads_to_the_nearest(action: str, meant: str) -> None:
    assert not actions.known(action)
    assert text.nearest(action, (*actions.may_mean(action), "tool.web_search")) == meant


def test_only_namespaces_of_the_daemon_are_closed() -> None:
    assert actions.closed("audit.read")
    assert not any(map(actions.closed, ("tool.web_search", "intent.subscribe", "agent.spawn", "weather.read")))
