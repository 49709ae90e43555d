"""Check that ends are in the metrics and ``doctor``, and that ``agents list`` says what a signature is worth."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from covenant.adapters.http import metrics
from covenant.cli.run import doctor
from covenant.handlers import expiry as expiries
from covenant.handlers.server import Server
from policy.signing import expiry
from sandbox.storage import other_mounts
from tests import cli_daemon_kit, prometheus_text, server_kit, signing_kit
from tests.cli_kit import call, document, done

DAY = 86_400_000


@pytest.fixture
def home(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    for name in ("ann", "bob"):
        done("keys", "new", name, "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("trust", "add", "bob", "--sign-with", "ann")
    for agent_id, key, expires in (("soon", "ann", "5d"), ("later", "bob", "90d"), ("bare", "", "")):
        place = covenant_home / "agents" / agent_id
        place.mkdir(parents=True, mode=0o700)
        for name, data in signing_kit.FILES.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(data.replace(b'id = "hello"', f'id = "{agent_id}"'.encode()))
        if key:
            done("manifest", "sign", place, "--key", key, "--expires", expires)
    return covenant_home


def _signed(one: cli_daemon_kit.Daemon) -> None:
    """Have the double's runners verify signatures as the daemon's own do."""
    from covenant.runtime import package_signatures

    async def verify(card: object) -> None:
        package_signatures.verify(
            card,  # type: ignore[arg-type]
            home=one.home,
            state=one.home / "supervisor",
            host="here",
            now_ms=lambda: int(time.time() * 1000),
        )

    one.server.runners._signed = verify


def test_agents_list_shows_revoked_and_unsigned(home: Path) -> None:
    with cli_daemon_kit.running(home) as one:
        _signed(one)
        listed = {row["id"]: row for row in document("agents", "list")["agents"]}
        assert {name: row["signature"] for name, row in listed.items()} == {
            "soon": "ok",
            "later": "ok",
            "bare": "unsigned",
        }
        assert "signature ends" in done("agents", "list")
        done("trust", "revoke", "--key", "bob", "--reason", "lost", "--sign-with", "ann", "--yes")
        rows = {row["id"]: row for row in document("agents", "list")["agents"]}
        assert rows["later"]["signature"] == "revoked"
        shown = done("agents", "list")
        assert "revoked: " in shown
        assert "unsigned: " in shown


def test_ends_are_in_metrics_and_doctor(home: Path) -> None:
    with cli_daemon_kit.running(home) as one:
        soon = int(time.time() * 1000) + 3 * DAY
        done("capabilities", "grant", "memory.read", "--expires-at", str(soon))
        operator = server_kit.caller(one.server.identity.agent, operator=True)
        text = one.portal.call(metrics.text, one.server, operator)
        assert 'covenant_expiry_timestamp_seconds{name="soon",what="envelope"}' in text
        assert 'what="grant"' in text
        peer = ("peers", "enroll", "ada@laptop")
        done(*peer, "--expires-at", str(soon))
        token = 'covenant_expiry_timestamp_seconds{name="ada@laptop",what="token"}'
        assert token in one.portal.call(metrics.text, one.server, operator)
        assert "covenant_clock_behind_seconds 0.0" in text
        guest = server_kit.caller(one.server.identity.agent)
        # A peer, such as Prometheus, sees the first end of each kind, and no name.
        told = prometheus_text.parse(one.portal.call(metrics.text, one.server, guest))
        assert told["covenant_expiry_timestamp_seconds"].keys() == {
            f'name="",what="{what}"' for what in ("envelope", "grant", "token")
        }
        assert told["covenant_expiry_timestamp_seconds"]['name="",what="token"'] == soon / 1000
        assert told["covenant_clock_behind_seconds"] == {"": 0}
        (check,) = [row for row in doctor.of_the_home() if row.name == "daemon's expiry"]
        assert check.status == "degraded"
        assert "envelope `soon` expires in 4 days" in check.found
        assert "memory.read` expires in" in check.found
        assert "token `ada@laptop` expires in 2 days" in check.found
        assert "later" not in check.found
        # The fix.
        done("manifest", "renew", home / "agents" / "soon", "--key", "ann", "--expires", "90d")
        one.portal.call(one.server.agents.reload)
        (check,) = [row for row in doctor.of_the_home() if row.name == "daemon's expiry"]
        assert "soon" not in check.found
    done("manifest", "renew", home / "agents" / "soon", "--key", "ann", "--expires", "3d")
    (check,) = doctor.of_the_home()
    assert check.found == "envelope `soon` expires in 2 days"


def test_daemon_warns_two_weeks_ahead(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cli_daemon_kit.running(home) as one:
        now_ms = one.server.now_ms()
        for days, action in ((13, "memory.read"), (15, "memory.write")):
            done("capabilities", "grant", action, "--expires-at", str(now_ms + days * DAY))
        caplog.clear()

        async def warn() -> None:
            with anyio.move_on_after(60) as limit, pytest.MonkeyPatch.context() as patch:

                async def stop(seconds: float) -> None:
                    limit.cancel()
                    await anyio.lowlevel.checkpoint()

                patch.setattr(anyio, "sleep", stop)
                await expiries.warn(one.server)

        one.portal.call(warn)
    warned = [record.getMessage() for record in caplog.records if record.name == expiries.__name__]
    assert warned == [
        "envelope `soon` expires in 4 days: renew it",
        "grant `operator@local memory.read` expires in 12 days: renew it",
    ]


def test_look_that_fails_ends_no_daemon(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch of ends meets a limit of open files, and warns once there is room."""
    names, fails = other_mounts.names, [True]

    def full(place: Path) -> frozenset[str]:
        if fails:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return names(place)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == expiries.__name__]

    async def warn(server: Server) -> None:
        monkeypatch.setattr(other_mounts, "names", full)
        async with anyio.create_task_group() as group:
            group.start_soon(expiries.warn, server)
            with anyio.fail_after(60):
                while not any("Too many open files" in line for line in said()):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                fails.clear()
                caplog.clear()
                while "envelope `soon` expires in 4 days: renew it" not in said():  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()

    monkeypatch.setattr(expiries, "_AGAIN_SECONDS", 0.05)
    with cli_daemon_kit.running(home) as one:
        one.portal.call(warn, one.server)


def test_expiry_words() -> None:
    now = 1_800_000_000_000
    words = [expiry.Expiry("trust_root", "", now + left).line(now) for left in (-1, 1, DAY, 13 * DAY)]
    assert words == [
        "trust root has expired",
        "trust root expires within a day",
        "trust root expires in 1 days",
        "trust root expires in 13 days",
    ]
    found = [expiry.Expiry("token", "a", now + 14 * DAY), expiry.Expiry("token", "b", now + 13 * DAY)]
    assert [one.name for one in expiry.soon(found, now)] == ["b"]
    assert call("doctor", "--help").exit_code == 0
