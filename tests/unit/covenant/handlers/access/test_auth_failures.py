"""However often strangers are refused, few rows say so, and every refusal is counted in one of them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from covenant.handlers.access.auth_failures import Refusals
from covenant.stores.audit.interface import AuditLog
from policy import errors
from tests import server_kit

pytestmark = pytest.mark.anyio

MORE = re.compile(r"([1-9][0-9]*) more were refused and not written one by one; the last: (.*)")


class Rows:
    """A log that keeps the rows that it is given."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.came = anyio.Event()
        self.full = False

    async def append(self, kind: str, fields: Any, issuer: Any = None) -> str:
        assert (kind, fields["transport"]) == ("authentication_failed", "ipc")
        if self.full:
            raise errors.StoreFullError("there is no room", where="here")
        self.reasons.append(fields["reason"])
        if MORE.fullmatch(fields["reason"]):
            self.came.set()
        return "id"


def made(rows: Rows, home: Path, group: Any, *, most: int = 3, seconds: float = 3600.0) -> Refusals:
    log: AuditLog = rows  # type: ignore[assignment]  # of a log it has what is asked here
    return Refusals(server_kit.make(home=home, audit=log), "ipc", group, most=most, seconds=seconds)


async def test_first_are_written_one_by_one_and_rest_is_number(tmp_path: Path) -> None:
    rows = Rows()
    async with anyio.create_task_group() as group:
        refusals = made(rows, tmp_path, group)
        for n in range(3):
            await refusals.write(f"refusal {n}")
        assert rows.reasons == [f"refusal {n}" for n in range(3)]
        for n in range(3, 1000):
            await refusals.write(f"refusal {n}")
        assert len(rows.reasons) == 3
        # The daemon ends before the hour does: what was counted is written all the same.
        group.cancel_scope.cancel()
    assert len(rows.reasons) == 4
    assert MORE.fullmatch(rows.reasons[3]).groups() == ("997", "refusal 999")  # type: ignore[union-attr]


async def test_number_comes_by_itself_once_time_is_over(tmp_path: Path) -> None:
    rows = Rows()
    async with anyio.create_task_group() as group:
        refusals = made(rows, tmp_path, group, most=1, seconds=0.05)
        told = 0
        with anyio.fail_after(60):
            while not rows.came.is_set():
                await refusals.write("no")
                told += 1
                await anyio.lowlevel.checkpoint()
    assert sum(int(found[1]) if (found := MORE.fullmatch(reason)) else 1 for reason in rows.reasons) == told


async def test_log_without_room_ends_nothing_but_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = Rows()
    rows.full = True
    with caplog.at_level(logging.ERROR):
        async with anyio.create_task_group() as group:
            refusals = made(rows, tmp_path, group, most=1, seconds=3600.0)
            with pytest.raises(errors.StoreFullError):
                await refusals.write("one")
            await refusals.write("two")
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert "1 refusals cannot be written" in caplog.text
