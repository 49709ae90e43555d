"""The file of denials that an agent reads: after the log, while it is open, and never in the way of the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from policy import errors
from policy.denials import Denial, Row
from policy.why.ask import Sight
from sandbox.audit.agent_denials import AgentDenials
from sandbox.audit.denials import DenialLog

NAME, OTHER = Denial("syscall", "sync", "not_granted"), Denial("syscall", "getcpu", "not_granted")


def sight() -> Sight:
    raise errors.ArtefactError("none here")


def opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def test_rows_come_after_log_while_file_is_open(tmp_path: Path) -> None:
    path, order = tmp_path / "denials", []
    fd = opened(path)
    log = DenialLog(lambda row: order.append((row, path.read_text())))
    with log.telling(AgentDenials(fd, sight)):
        log.told(NAME)
        assert [json.loads(line)["target"] for line in path.read_text().splitlines()] == ["sync"]
    os.close(fd)
    log.told(OTHER)
    log.flush()
    assert order[0] == (Row(NAME, 1), "")
    assert [row.denial for row, _ in order] == [NAME, OTHER]
    assert len(path.read_text().splitlines()) == 1


def test_file_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    rows: list[Row] = []
    log = DenialLog(rows.append)
    full = os.open("/dev/full", os.O_WRONLY)
    with log.telling(AgentDenials(full, sight)):
        log.told(NAME)
        log.told(OTHER)
    os.close(full)
    assert [row.denial for row in rows] == [NAME, OTHER]


def test_row_that_log_refuses_is_not_told(tmp_path: Path) -> None:
    def broken(row: Row) -> None:
        raise errors.LedgerError("full")

    fd = opened(tmp_path / "denials")
    log = DenialLog(broken)
    with log.telling(AgentDenials(fd, sight)), pytest.raises(errors.LedgerError):
        log.told(NAME)
    os.close(fd)
    assert (tmp_path / "denials").read_bytes() == b""
