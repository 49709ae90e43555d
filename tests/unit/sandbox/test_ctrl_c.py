"""Check Ctrl-C: it reaches the terminal's process alone; its workers have their own sessions and continue."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.kernel.net import nft
from sandbox.kernel.runsc import command
from sandbox.serve.api import run as api_run
from sandbox.shim import signals

SAYS = "#!/bin/sh\ncut -d' ' -f6 /proc/self/stat > {out}\n"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_text(SAYS.format(out=tmp_path / "session"))
    path.chmod(0o755)
    return path


def test_who_takes_rules_away_and_who_is_asked_to_end_container_are_in_sessions_of_their_own(
    program: Path, tmp_path: Path
) -> None:
    nft._run(program, [])
    first = (tmp_path / "session").read_text()
    assert command.kill(str(program), root=tmp_path, container="a", signal_name="TERM", timeout_seconds=10)
    assert len({first, (tmp_path / "session").read_text(), f"{os.getsid(0)}\n"}) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_shared_on_uplink_is_taken_away_whole(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The shim removes it even if it gets a signal meanwhile, before its answer or after."""
    gone: list[str] = []

    def taken() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        gone.append("all of it")

    class Nothing:
        def __enter__(self) -> Any:
            return SimpleNamespace(ledger=None)

        def __exit__(self, *exc: object) -> None:
            pass

    def run(*what: Any) -> str:
        next(one for one in what if isinstance(one, contextlib.ExitStack)).callback(taken)
        if fails:
            raise RuntimeError("it is over")
        return "answer"

    said: list[str] = []
    session: Any = SimpleNamespace(
        caller=SimpleNamespace(uid=0), directory=lambda _: 0, opened=Nothing, answer=said.append
    )
    monkeypatch.setattr(api_run, "RunReportReader", lambda _: None)
    monkeypatch.setattr(api_run, "_run", run)
    monkeypatch.setattr(api_run, "document", lambda answer: answer)
    asked: Any = SimpleNamespace(user=None, rows=False, workspace=False)
    with signals.detach_from_terminal(), pytest.raises(RuntimeError if fails else KeyboardInterrupt):
        api_run.run(session, asked)
    assert (gone, said) == (["all of it"], [] if fails else ["answer"])
