"""``covenant export`` against a collector that fails, and as a service of root whose worker has no rights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from covenant.export import collector, cursor
from policy import errors
from sandbox.audit import follow_process
from tests.export_kit import Export, FakeCollector, expected, export, filled, soon
from tests.kernel.world import ROOT
from tests.unit.sandbox.audit.test_log import state

__all__ = ["export", "soon", "state"]


def _outage(
    export: Export, answers: list[web.Response], *, refused: str = "", headers: dict[str, str] | None = None
) -> FakeCollector:
    async def play() -> FakeCollector:
        made = FakeCollector()
        made.answers, made.refused = answers, refused
        runner, port = await made.serve()
        try:
            await export.once(otlp=f"http://127.0.0.1:{port}", headers=headers)
        finally:
            await runner.cleanup()
        return made

    return asyncio.run(play())


def test_collector_that_refuses_gets_every_row(state: Path, export: Export) -> None:
    filled(state, range(5))
    answers = [web.Response(status=status, headers={"Retry-After": "0"}) for status in (503, 429, 500, 307, 404)]
    made = _outage(export, answers, headers={"x-key": "k"})
    assert made.rows == expected(range(5))
    assert made.headers["x-key"] == "k"
    assert export.told[0].startswith("the collector takes no logs: it answered 503")
    assert "takes logs again" in export.told[-1]
    assert len(export.told) == 2
    # A second export has nothing to send but its sums.
    filled(state, range(5, 7))
    assert _outage(export, []).rows == expected(range(5, 7))


def test_collector_that_is_away_gets_every_row(state: Path, export: Export) -> None:
    filled(state, range(5))

    async def play() -> FakeCollector:
        made = FakeCollector()
        runner, port = await made.serve()
        await runner.cleanup()
        sending = asyncio.ensure_future(export.once(otlp=f"http://127.0.0.1:{port}"))
        await export.heard.wait()
        runner, _ = await made.serve(port)
        await sending
        await runner.cleanup()
        return made

    assert asyncio.run(play()).rows == expected(range(5))


def test_collector_that_stays_away_ends_a_single_export(state: Path, export: Export) -> None:
    """Nothing is lost: the next call sends what the first did not, and nothing twice."""
    filled(state, range(5))
    assert _outage(export, []).rows == expected(range(5))
    filled(state, range(5, 9))
    export.gives_up_after(0.05)
    with pytest.raises(errors.ExportTimeoutError, match=r"took nothing for 0\.05 s; the rows are kept in the log"):
        asyncio.run(export.once(otlp="http://127.0.0.1:9"))
    slow = [web.Response(status=429, headers={"Retry-After": "300"})]
    with pytest.raises(errors.ExportTimeoutError):
        _outage(export, [*slow, web.Response(status=503)])
    assert _outage(export, []).rows == expected(range(5, 9))


def test_command_without_collector_fails_with_a_fix(state: Path, tmp_path: Path) -> None:
    """The fix that is printed works: the same command, once the collector is there."""
    filled(state, range(3))

    def call(port: int, *more: str) -> subprocess.CompletedProcess[str]:
        url = f"http://127.0.0.1:{port}"
        words = ["export", "--log", "supervisor", "--otlp", url, "--cursors", str(tmp_path / "cursors"), *more]
        environment = {"COVENANT_HOME": str(tmp_path / "home"), "COVENANT_STATE": str(state), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "covenant", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    async def play() -> tuple[FakeCollector, list[subprocess.CompletedProcess[str]]]:
        made, done = FakeCollector(), list[subprocess.CompletedProcess[str]]()
        runner, port = await made.serve()
        await runner.cleanup()
        done.append(await asyncio.to_thread(call, port, "--once", "--timeout", "0.5"))
        runner, _ = await made.serve(port)
        done.append(await asyncio.to_thread(call, port, "--once", "--timeout", "60"))
        await runner.cleanup()
        return made, done

    made, [away, there] = asyncio.run(play())
    assert (away.returncode, away.stdout) == (1, "")
    assert "took nothing for 0.5 s; the rows are kept in the log" in away.stderr
    assert "[export_timeout]" in away.stderr
    assert "fix: repeat the command once it is reachable" in away.stderr
    assert (there.returncode, made.rows) == (0, expected(range(3))), there.stderr
    # Without --once an outage is waited for, and a bound has no sense.
    refused = call(9, "--timeout", "1")
    assert (refused.returncode, "--timeout is for --once" in refused.stderr) == (2, True)


def test_record_that_is_refused_by_itself_is_told(state: Path, export: Export) -> None:
    filled(state, range(9))
    made = _outage(export, [web.Response(status=413)], refused='"row 6"')
    assert made.rows == [row for row in expected(range(9)) if row != "row 6"]
    assert [text for text in export.told if "refused one of the logs (400)" in text] == export.told


def test_partial_success_is_told_and_not_repeated(state: Path, export: Export) -> None:
    filled(state, range(3))
    partly = {"partialSuccess": {"rejectedLogRecords": "2", "errorMessage": "too old"}}
    made = _outage(export, [web.json_response(partly)])
    assert made.rows == expected(range(3))
    assert export.told == ["the collector refused 2 of the logs, which are left out: too old"]


def test_answer_without_sense_stops_no_export(state: Path, export: Export) -> None:
    filled(state, range(3))
    said = ['{"partialSuccess": {"rejectedLogRecords": 1e999}}', '{"partialSuccess": [1]}', "[" * 60_000]
    for text in said:
        made = _outage(export, [web.Response(text=text)])
        assert made.rows == expected(range(3))
        for name in os.listdir(export.place):
            (export.place / name).unlink()
    assert export.told == []


@pytest.mark.parametrize("instead", ["link", "directory", ""])
def test_directory_that_is_replaced_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: str) -> None:
    """A user of the directory above replaces the new one before it is given to the worker."""
    place, other, makes = tmp_path / "export", tmp_path / "other", os.mkdir
    other.mkdir()

    def replaced(path: Path, mode: int) -> None:
        makes(path, mode)
        if instead:
            os.rmdir(path)
        if instead == "link":
            os.symlink(other, path)
        elif instead == "directory":
            makes(path, mode)
            os.chown(path, 1000, 1000)

    monkeypatch.setattr(os, "mkdir", replaced)
    if instead:
        with pytest.raises(errors.LedgerError):
            cursor.directory(place, 64_984)
    else:
        os.close(cursor.directory(place, 64_984))  # the control
    owners = {"link": os.geteuid(), "directory": 1000, "": 64_984}
    assert os.stat(place).st_uid == owners[instead]


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 0.0), ("7", 7.0), ("99999999999", 300.0), ("soon", 0.0), ("-5", 0.0)]
)
def test_pause_of_a_collector_is_bounded(text: str, seconds: float) -> None:
    assert collector.pause_of(text) == seconds


def test_worker_of_root_has_no_rights_and_outlives_kills(state: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The process as a service has it: killed with -9 between rows, its collector away meanwhile."""
    place = tmp_path_factory.mktemp("cursors") / "export"
    # Nothing beside what the unit keeps.
    unit = (ROOT / "packaging/systemd/covenant-export.service").read_text()
    (capabilities,) = re.findall(r"^CapabilityBoundingSet=(.*)", unit, re.MULTILINE)
    kept = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in capabilities.split())
    filled(state, range(3))

    async def started(port: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *("/usr/bin/setpriv", f"--bounding-set=-all,{kept}", sys.executable, "-m", "covenant"),
            *("export", "--otlp", f"http://127.0.0.1:{port}", "--cursors", place),
            env={
                "COVENANT_HOME": str(tmp_path_factory.getbasetemp() / "none"),
                "COVENANT_STATE": str(state),
                "PATH": "/usr/bin",
            },
            stderr=asyncio.subprocess.PIPE,
        )

    async def play() -> list[str]:
        made = FakeCollector()
        runner, port = await made.serve()
        process = await started(port)
        async with asyncio.timeout(60):
            await made.until(3)
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            _has_no_rights(Path("/proc") / child, state)
            process.kill()
            await process.wait()
            # The worker ends with its reader.
            await asyncio.to_thread(_gone, int(child))
            filled(state, range(3, 6))
            await runner.cleanup()
            process = await started(port)
            assert process.stderr is not None
            assert b"they wait in the log" in await process.stderr.readline()
            filled(state, range(6, 8))
            runner, _ = await made.serve(port)
            await made.until(8)
            process.terminate()
            assert await process.wait() == 0
            assert b"takes logs again" in await process.stderr.read()
        await runner.cleanup()
        return made.rows

    assert list(dict.fromkeys(asyncio.run(play()))) == expected(range(8))


def test_systemd_takes_every_line_of_the_unit(tmp_path: Path) -> None:
    unit = (ROOT / "packaging/systemd/covenant-export.service").read_text()
    kept = [line for line in unit.splitlines() if not line.startswith(("Documentation=", "After="))]
    (tmp_path / "covenant-export.service").write_text(
        "\n".join(kept).replace("/opt/covenant/bin/covenant", "/bin/true")
    )
    command = ["/usr/bin/systemd-analyze", "verify", "--man=no", "./covenant-export.service"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout + done.stderr == ""


def _has_no_rights(worker: Path, state: Path) -> None:
    said = dict(line.split(":\t", 1) for line in (worker / "status").read_text().splitlines() if ":\t" in line)
    assert said["Uid"].split() == said["Gid"].split() == [str(follow_process.WORKER_UID)] * 4
    assert said["Groups"].split() == []
    assert {said[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert said["NoNewPrivs"] == "1"
    open_files = [os.readlink(one) for one in (worker / "fd").iterdir()]
    assert not [one for one in open_files if one.startswith(str(state))]


def _gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], 30)[0]
        finally:
            os.close(fd)
