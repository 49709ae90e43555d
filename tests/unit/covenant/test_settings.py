"""The daemon's environment: version 1's names and defaults, and a refusal by name of what cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant import settings as covenant_settings
from policy import errors


def read(home: Path, **given: str) -> covenant_settings.Settings:
    return covenant_settings.read({"COVENANT_HOME": str(home), **given})


def test_without_anything_it_has_version_1s_defaults(covenant_home: Path) -> None:
    settings = read(covenant_home)
    assert (settings.http_bind, settings.http_port) == ("127.0.0.1", 8421)
    assert settings.http_origins == ("http://localhost:3000",)
    assert settings.retry == covenant_settings.Retry(False, 60_000, 300_000, 3, 1, 100)
    assert settings.projection == covenant_settings.Projection(250, "none", 1000, 3, 2000)
    assert settings.peer_rate == covenant_settings.PeerRate(20, 1000)
    assert (settings.live_trace, settings.deliver_timeout_ms, settings.hermes_base_url) == (False, 10_000, None)
    assert settings.unused == ()


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_booleans(covenant_home: Path, word: str) -> None:
    assert read(covenant_home, COVENANT_LIVE_TRACE=word).live_trace is True
    assert read(covenant_home, COVENANT_LIVE_TRACE="no").live_trace is False


# Of each number a value that no other has, and where it is found.
NUMBERS = {
    "COVENANT_HTTP_PORT": (8500, ("http_port",)),
    "COVENANT_A2A_AUTO_RETRY_INTERVAL_MS": (5001, ("retry", "interval_ms")),
    "COVENANT_A2A_AUTO_RETRY_MIN_LEASE_AGE_MS": (502, ("retry", "min_lease_age_ms")),
    "COVENANT_A2A_AUTO_RETRY_MAX_ATTEMPTS": (53, ("retry", "max_attempts")),
    "COVENANT_A2A_AUTO_RETRY_MAX_REQUEUES": (54, ("retry", "max_requeues")),
    "COVENANT_A2A_AUTO_RETRY_SCAN_LIMIT": (55, ("retry", "scan_limit")),
    "COVENANT_A2A_DELIVER_TIMEOUT_MS": (506, ("deliver_timeout_ms",)),
    "COVENANT_BUDGET_PROJECTION_TICK_MS": (507, ("projection", "tick_ms")),
    "COVENANT_BUDGET_PROJECTION_MIN_WINDOW_MS": (508, ("projection", "min_window_ms")),
    "COVENANT_BUDGET_PROJECTION_MIN_SAMPLES": (59, ("projection", "min_samples")),
    "COVENANT_BUDGET_PREEMPT_GRACE_MS": (510, ("projection", "preempt_grace_ms")),
    "COVENANT_PEER_REQUESTS_PER_SECOND": (61, ("peer_rate", "requests_per_second")),
    "COVENANT_PEER_REQUESTS_BURST": (62, ("peer_rate", "burst")),
}


def test_each_variable_is_setting_of_its_name(covenant_home: Path) -> None:
    given = {name: str(value) for name, (value, _) in NUMBERS.items()}
    settings = read(
        covenant_home,
        **given,
        COVENANT_A2A_AUTO_RETRY_SCHEDULER="1",
        COVENANT_BUDGET_PROJECTION_POLICY="linear",
        COVENANT_HTTP_ORIGINS=" https://a.example , http://b.example,",
        COVENANT_A2A_PUSH_URLS=" https://a.example/hook , http://127.0.0.1:9,",
        COVENANT_STATE="/s",
        COVENANT_SOCKET="/x.sock",
        HERMES_API_BASE_URL="http://127.0.0.1:1",
    )
    for name, (value, path) in NUMBERS.items():
        found: Any = settings
        for part in path:
            found = getattr(found, part)
        assert found == value, name
    assert (settings.retry.scheduler, settings.projection.policy) == (True, "linear")
    assert settings.http_origins == ("https://a.example", "http://b.example")
    assert settings.a2a_push_urls == ("https://a.example/hook", "http://127.0.0.1:9")
    assert (settings.state, settings.socket) == (Path("/s"), Path("/x.sock"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COVENANT_HTTP_PORT", "65536"),
        ("COVENANT_HTTP_PORT", "-1"),
        ("COVENANT_HTTP_PORT", "8421x"),
        ("COVENANT_HTTP_PORT", "٣"),
        ("COVENANT_PEER_REQUESTS_PER_SECOND", "0"),
        ("COVENANT_PEER_REQUESTS_BURST", "0"),
        ("COVENANT_HTTP_BIND_ADDR", "192.0.2.1"),
        ("COVENANT_HTTP_BIND_ADDR", "::"),
        ("COVENANT_HTTP_BIND_ADDR", "example.org"),
        ("COVENANT_LIVE_TRACE", "2"),
        ("COVENANT_BUDGET_PROJECTION_POLICY", "quadratic"),
        ("COVENANT_BUDGET_PROJECTION_TICK_MS", "0"),
        ("COVENANT_A2A_AUTO_RETRY_MAX_ATTEMPTS", "9" * 30),
        ("COVENANT_RUNTIME_BACKEND", "Linux-gVisor"),
        ("HERMES_API_BASE_URL", "file:///etc/passwd"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(covenant_home: Path, name: str, value: str) -> None:
    with pytest.raises(errors.SettingError) as caught:
        read(covenant_home, **{name: value})
    assert caught.value.where == name
    assert name in caught.value.message


def test_http_can_be_off_or_anywhere_on_loopback(covenant_home: Path) -> None:
    assert read(covenant_home, COVENANT_HTTP_PORT="off").http_port is None
    assert read(covenant_home, COVENANT_HTTP_PORT="0").http_port == 0
    assert read(covenant_home, COVENANT_HTTP_BIND_ADDR="::1").http_bind == "::1"


def test_what_has_no_effect_is_said(covenant_home: Path) -> None:
    settings = read(covenant_home, COVENANT_RUNSC="/x", COVENANT_SAP_RPC="y", COVENANT_X402_KEY="z")
    assert settings.unused == ("COVENANT_RUNSC", "COVENANT_SAP_RPC", "COVENANT_X402_KEY")
    checked = {"COVENANT_A2A_DELIVER_TIMEOUT_MS": "5000", "COVENANT_RUNTIME_BACKEND": "linux-gvisor"}
    assert read(covenant_home, **checked).unused == tuple(checked)


def test_key_does_not_come_into_log(covenant_home: Path) -> None:
    settings = read(covenant_home, HERMES_API_KEY="hunter2", HERMES_API_BASE_URL="http://127.0.0.1:1/")
    assert settings.hermes_base_url == "http://127.0.0.1:1"
    assert settings.hermes_api_key == "hunter2"
    assert "hunter2" not in f"{settings!r}{settings!s}"
