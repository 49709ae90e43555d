"""A supervisor without its state names the command that makes the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy import errors
from sandbox.serve import main


def test_absent_state_is_refused_with_its_fix(tmp_path: Path) -> None:
    state = tmp_path / "absent"
    with pytest.raises(errors.HomeError) as caught:
        main.serve(state)
    assert caught.value.message == f"there is no directory `{state}`"
    assert caught.value.hint == f"install -d -m 0700 {state}, or name another: covenant-supervisor --state DIRECTORY"
