"""Check the report of the log to a caller: only the rows of its request's runs, and a bounded number of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.audit_log import chain, events
from sandbox.audit import run_report
from sandbox.audit.log import Ledger
from sandbox.audit.run_report import RunReportReader

PUBKEY = "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"
ASKER = {"display": "uid7@local", "pubkey": PUBKEY}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "audit", head=tmp_path / "audit-head" / "head.json") as made:
        yield made


class Family:
    """Writes rows as shims do: a child's rows are issued by its parent's agent and run."""

    def __init__(self, log: Ledger) -> None:
        self._log = log

    def write(self, kind: str, run_id: str | None, parent: str | None = None, **fields: Any) -> str:
        """Write one row; fields that are not given are null or empty."""
        blank: dict[str, Any] = {"text": "", "int": 0, "bool": False, "texts": [], "objects": [], "digest": "0" * 64}
        table = {name: blank.get(wanted) for name, wanted in events.KINDS[kind].items()}
        issuer = ASKER if parent is None else {"display": f"agent@{parent}", "pubkey": PUBKEY}
        return self._log.append(kind, {**table, "run_id": run_id, **fields}, issuer=issuer, now_ms=1)

    def run(self, parent: str | None = None, *, cpu_ms: int | None = 5, ended: bool = True) -> str:
        """Write the start of a run, and its end if ``ended``; return its id."""
        run_id = str(uuid.uuid4())
        self.write("run_state", run_id, parent, state="Provisioned")
        self.write("run_started", run_id, parent)
        if ended:
            self.end(run_id, parent, cpu_ms=cpu_ms)
        return run_id

    def end(self, run_id: str, parent: str | None = None, *, cpu_ms: int | None = 5) -> None:
        """Write the run's last row."""
        self.write("run_ended", run_id, parent, cpu_ms=cpu_ms, memory_peak_bytes=100, wall_ms=3)


def runs_in(told: run_report.RunReport) -> set[str | None]:
    """Return the runs that the rows are about."""
    found = [events.begins(line) for _, line in told.rows if line is not None]
    return {one.run_id for one in found if one is not None}


def test_prices_of_the_whole_family_are_summed(log: Ledger) -> None:
    family = Family(log)
    retold = RunReportReader(log)
    top = family.run(ended=False)
    child = family.run(top)
    other = family.run()
    family.write("model_asked", top, credits=7)
    family.write("web_asked", top, credits=2)
    family.write("model_asked", child, top, credits=30)
    family.write("model_asked", other, credits=1000)
    retold.began(top, None)
    assert retold.read().credits == 39
    assert retold.read().document("0" * 64)["family"]["credits"] == 39


def test_family_is_told_as_its_rows_stand_and_nobody_elses(log: Ledger) -> None:
    family = Family(log)
    family.run()
    retold = RunReportReader(log)
    top = family.run(ended=False)
    family.run()
    child = family.run(top)
    grandchild = family.run(child, cpu_ms=None)
    family.end(top, cpu_ms=40)
    retold.began(top, None)
    told = retold.read()
    assert runs_in(told) == {top, child, grandchild}
    lines = list(log.rows((0, 0, 0)))
    assert told.rows == [one for one in lines if any(run.encode() in one[1] for run in (top, child, grandchild))]
    for anchor, line in told.rows:
        place = chain.Anchor.parse(anchor)
        assert place is not None
        assert line is not None
        assert lines[place.index][1] == line
        assert place.event_hash_hex == chain.event_hash(line)
    assert (told.runs, told.unended, told.cpu_ms, told.wall_ms, told.memory_byte_ms) == (3, 0, 45, 9, 900)
    assert told.uncounted == 1  # the grandchild's CPU time was not counted
    assert told.document("")["family"]["uncounted"] == 1
    assert told.whole
    assert retold.lost == set()


def test_run_that_has_not_ended_is_counted_as_such(log: Ledger) -> None:
    family, retold = Family(log), RunReportReader(log)
    top = family.run()
    child = family.run(top, ended=False)
    retold.began(top, None)
    told = retold.read()
    assert (told.runs, told.unended, told.cpu_ms) == (2, 1, 5)
    assert retold.lost == {child}
    family.end(child, top)
    assert (retold.read().unended, retold.lost) == (0, set())


def test_what_is_refused_before_there_is_run_is_told_by_its_own_row_alone(log: Ledger) -> None:
    family, retold = Family(log), RunReportReader(log)
    family.write("manifest_rejected", None, code="another")
    retold.refused(family.write("manifest_rejected", None, code="ours"))
    (row,) = retold.read().rows
    assert row[1] is not None
    assert b'"code":"ours"' in row[1]


def test_row_that_names_run_in_its_text_is_not_of_it(log: Ledger) -> None:
    family, retold = Family(log), RunReportReader(log)
    top = family.run()
    text = f'","kind":{{"type":"run_state","run_id":"{top}"'
    family.write("intent_dispatched", str(uuid.uuid4()), intent_text=text, status="ok")
    retold.began(top, None)
    assert runs_in(retold.read()) == {top}


def test_rows_from_before_instance_got_its_intent_are_told_too(log: Ledger) -> None:
    family, mark = Family(log), log.mark
    instance = str(uuid.uuid4())
    family.write("run_state", instance, state="Provisioned")
    family.run()
    retold = RunReportReader(log)
    family.write("run_started", instance)
    retold.began(instance, mark)
    assert len(retold.read().rows) == 2


def test_first_and_last_are_told_of_more_than_may_be(log: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "MOST_ROWS", 12)
    monkeypatch.setattr(run_report, "LAST_ROWS", 4)
    family, retold = Family(log), RunReportReader(log)
    top = family.run(ended=False)
    for number in range(30):
        family.write("run_state", top, state="Running", reason=str(number))
    family.end(top)
    retold.began(top, None)
    told = retold.read()
    kinds = [events.begins(line or b"").kind for _, line in told.rows]  # type: ignore[union-attr]
    assert len(kinds) == 12
    assert (kinds[1], kinds[-1], told.left_out, told.cpu_ms) == ("run_started", "run_ended", 33 - 12, 5)


def test_rows_are_bounded_in_bytes_and_one_long_is_told_by_its_hash(
    log: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_report, "MOST_BYTES", 40_000)
    monkeypatch.setattr(run_report, "LAST_BYTES", 10_000)
    family, retold = Family(log), RunReportReader(log)
    top = family.run(ended=False)
    long = family.write("run_state", top, state="Running", reason="x" * run_report.ROW_BYTES)
    for _ in range(30):
        family.write("run_state", top, state="Running", reason="y" * 3_000)
    retold.began(top, None)
    told = retold.read()
    assert sum(len(anchor) + len(line or b"") for anchor, line in told.rows) <= 40_000
    assert told.left_out + len(told.rows) == 33
    anchors = [chain.Anchor.parse(anchor) for anchor, line in told.rows if line is None]
    assert [one.event_id for one in anchors if one] == [long]


def test_log_that_grew_by_more_than_is_looked_through_is_said_to_be_read_in_part(
    log: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, whole, part = Family(log), RunReportReader(log), RunReportReader(log)
    top = family.run(ended=False)
    for _ in range(5):
        family.run()
    family.end(top)
    whole.began(top, None)
    part.began(top, None)
    assert whole.read().whole
    monkeypatch.setattr(run_report, "LOOKED_BYTES", 4_000)
    told = part.read()
    assert not told.whole
    assert runs_in(told) == {top}
    assert told.cpu_ms == 0
    assert part.lost == set()  # the reader has not seen that its end is missing


def test_however_often_it_is_looked_no_request_has_more_read_than_is_looked_through(
    log: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated requests while other runs write many rows do not make the supervisor read more than the limit."""
    seen: list[tuple[bytes, bytes]] = []
    rows = Ledger.rows

    def counted(self: Ledger, since: run_report.Mark) -> Iterator[tuple[bytes, bytes]]:
        for one in rows(self, since):
            seen.append(one)
            yield one

    monkeypatch.setattr(Ledger, "rows", counted)
    family, retold = Family(log), RunReportReader(log)
    top = family.run(ended=False)
    retold.began(top, None)
    assert retold.read().whole
    once = len(seen)
    assert (retold.read().runs, len(seen)) == (1, once)  # rows are not read twice
    monkeypatch.setattr(run_report, "LOOKED_BYTES", 20_000)
    for _ in range(10):
        for _ in range(3):
            family.run()
        retold.read()
    assert not retold.read().whole
    assert sum(len(anchor) + len(line) for anchor, line in seen[:-1]) <= 20_000 + 11 * len(b"".join(seen[-1]))


def test_what_is_too_far_back_is_not_looked_for_and_said_to_be_missing(
    log: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance waited for long: many rows of others follow the rows it wrote before it got an intent."""
    family, mark = Family(log), log.mark
    instance = str(uuid.uuid4())
    family.write("run_state", instance, state="Provisioned")
    for _ in range(10):
        family.run()
    retold = RunReportReader(log)
    family.write("run_started", instance)
    retold.began(instance, mark)
    monkeypatch.setattr(run_report, "LOOKED_BYTES", 4_000)
    told = retold.read()
    assert (len(told.rows), told.whole, retold.lost) == (1, False, {instance})


@pytest.mark.parametrize("waited", [False, True])
def test_how_long_rows_of_others_are_takes_nothing_from_family(
    log: Ledger, monkeypatch: pytest.MonkeyPatch, *, waited: bool
) -> None:
    """Also for a run that began before its request. Its own rows count in full, and so do all rows in between."""
    family, mark = Family(log), log.mark
    text = "é" * 10_000
    for _ in range(10 * waited):
        family.write("intent_dispatched", str(uuid.uuid4()), intent_text=text, status="ok")
    retold = RunReportReader(log)
    top = family.run(ended=False)
    for _ in range(10):
        family.write("intent_dispatched", str(uuid.uuid4()), intent_text=text, status="ok")
    family.end(top)

    def told() -> run_report.RunReport:
        retold.began(top, mark if waited else None)
        return retold.read()

    monkeypatch.setattr(run_report, "LOOKED_BYTES", 50_000)
    monkeypatch.setattr(run_report, "OTHERS_BYTES", 1_000)
    found = told()
    assert (found.whole, found.runs, found.cpu_ms, len(found.rows)) == (True, 1, 5, 3)
    monkeypatch.setattr(run_report, "PASSED_BYTES", 300_000)
    assert not told().whole
    monkeypatch.undo()
    family.write("intent_dispatched", top, intent_text=text, status="ok")
    monkeypatch.setattr(run_report, "LOOKED_BYTES", 50_000)
    monkeypatch.setattr(run_report, "OTHERS_BYTES", 1_000)
    assert not told().whole
