"""A local key signs for any agent id, so a run under it has no token by which the daemon knows that agent."""

from __future__ import annotations

import types
from typing import Any

import pytest

from policy import errors
from sandbox.lifecycle import model_terms
from sandbox.lifecycle.types import Request


def _terms(*, dev: str, typed: bool, agents: tuple[str, ...]) -> None:
    nothing: Any = None
    request = Request(nothing, "", {}, dev=dev, typed=typed)
    decision: Any = types.SimpleNamespace(effective=types.SimpleNamespace(agents=agents))
    model_terms.of(decision, nothing, nothing, request, None)


def test_dev_run_has_no_token_of_an_agent() -> None:
    with pytest.raises(errors.VaultError, match="no token of an agent") as refused:
        _terms(dev="asker", typed=False, agents=("other",))
    assert refused.value.details["grant"] == "services.agents"


@pytest.mark.parametrize(
    ("dev", "typed", "agents"), [("", False, ("a",)), ("asker", True, ("a",)), ("asker", False, ())]
)
def test_other_runs_go_on_to_the_providers(dev: str, *, typed: bool, agents: tuple[str, ...]) -> None:
    with pytest.raises(AttributeError, match="state"):  # of the configuration, which is none here
        _terms(dev=dev, typed=typed, agents=agents)
