"""The daemon's settings from its environment (Covenant version 1, section 3): read once, and refused if invalid.

An invalid value stops the start with its name. Variables of version 1 without effect here are listed in
``Settings.unused``, so that the log says so and no operator relies on them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

from covenant import homes
from policy import errors

T = TypeVar("T")
Choice = TypeVar("Choice", bound=str | None)

HTTP_PORT: Final = 8421
HTTP_ORIGINS: Final = ("http://localhost:3000",)
PUSH_URLS: Final = "COVENANT_A2A_PUSH_URLS"
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})

# The supervisor finds its tools by its own configuration, and a package names its backend. Payments, and delivery to
# agents of other hosts as in version 1, are not supported here.
_ELSEWHERE: Final = (
    "COVENANT_A2A_DELIVER_TIMEOUT_MS",
    "COVENANT_GVISOR_ROOTFS",
    "COVENANT_GVISOR_SCRATCH",
    "COVENANT_RUNSC",
    "COVENANT_RUNTIME_BACKEND",
)
_ELSEWHERE_PREFIXES: Final = ("COVENANT_X402_", "COVENANT_ACEDATA_", "COVENANT_HYRE_", "COVENANT_SAP_")


@dataclass(frozen=True, slots=True)
class Retry:
    """Retries of stale leases (COVENANT_A2A_AUTO_RETRY_*), off unless ``scheduler``."""

    scheduler: bool = False
    interval_ms: int = 60_000
    min_lease_age_ms: int = 300_000
    max_attempts: int = 3
    max_requeues: int = 1
    scan_limit: int = 100


@dataclass(frozen=True, slots=True)
class Projection:
    """Ending of runs that would exceed their budget (COVENANT_BUDGET_*)."""

    tick_ms: int = 250
    policy: Literal["none", "linear"] = "none"
    min_window_ms: int = 1000
    min_samples: int = 3
    preempt_grace_ms: int = 2000


@dataclass(frozen=True, slots=True)
class PeerRate:
    """The rate limit for a peer's requests that cost no credits (COVENANT_PEER_REQUESTS_*)."""

    requests_per_second: int = 20
    burst: int = 1000


@dataclass(frozen=True, slots=True)
class Settings:
    """The given settings, or version 1's defaults.

    ``http_port`` is None without HTTP, 0 for any free port. ``state`` and ``socket`` are COVENANT_STATE and
    COVENANT_SOCKET, by which the supervisor is found. ``unused`` are variables that are set and have no effect here.
    """

    home: Path
    state: Path | None = None
    socket: Path | None = None
    http_port: int | None = HTTP_PORT
    http_bind: str = "127.0.0.1"
    http_origins: tuple[str, ...] = HTTP_ORIGINS
    a2a_push_urls: tuple[str, ...] = ()
    runtime_backend: Literal["trusted-local", "linux-gvisor"] | None = None
    hermes_base_url: str | None = None
    hermes_api_key: str | None = None
    live_trace: bool = False
    deliver_timeout_ms: int = 10_000
    retry: Retry = Retry()
    projection: Projection = Projection()
    peer_rate: PeerRate = PeerRate()
    unused: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # The default repr would write the key of Hermes into a log.
        return f"Settings(home={str(self.home)!r})"


def read(environment: Mapping[str, str]) -> Settings:
    """Read the settings from an environment.

    Raises:
        errors.SettingError: a variable has an invalid value.
        errors.HomeError: COVENANT_HOME cannot be used.
    """
    get = _Reader(environment)
    state, socket = environment.get("COVENANT_STATE"), environment.get("COVENANT_SOCKET")
    return Settings(
        home=homes.home(environment),
        state=Path(state).absolute() if state else None,
        socket=Path(socket).absolute() if socket else None,
        http_port=get.port("COVENANT_HTTP_PORT"),
        http_bind=get.loopback("COVENANT_HTTP_BIND_ADDR"),
        http_origins=_origins(environment.get("COVENANT_HTTP_ORIGINS")),
        a2a_push_urls=tuple(filter(None, (word.strip() for word in environment.get(PUSH_URLS, "").split(",")))),
        runtime_backend=get.one_of("COVENANT_RUNTIME_BACKEND", ("trusted-local", "linux-gvisor"), None),
        hermes_base_url=get.url("HERMES_API_BASE_URL"),
        hermes_api_key=environment.get("HERMES_API_KEY") or None,
        live_trace=get.flag("COVENANT_LIVE_TRACE"),
        deliver_timeout_ms=get.number("COVENANT_A2A_DELIVER_TIMEOUT_MS", 10_000, least=1),
        retry=Retry(
            scheduler=get.flag("COVENANT_A2A_AUTO_RETRY_SCHEDULER"),
            interval_ms=get.number("COVENANT_A2A_AUTO_RETRY_INTERVAL_MS", 60_000, least=1000),
            min_lease_age_ms=get.number("COVENANT_A2A_AUTO_RETRY_MIN_LEASE_AGE_MS", 300_000),
            max_attempts=get.number("COVENANT_A2A_AUTO_RETRY_MAX_ATTEMPTS", 3),
            max_requeues=get.number("COVENANT_A2A_AUTO_RETRY_MAX_REQUEUES", 1),
            scan_limit=get.number("COVENANT_A2A_AUTO_RETRY_SCAN_LIMIT", 100),
        ),
        projection=Projection(
            tick_ms=get.number("COVENANT_BUDGET_PROJECTION_TICK_MS", 250, least=10),
            policy=get.one_of("COVENANT_BUDGET_PROJECTION_POLICY", ("none", "linear"), "none"),
            min_window_ms=get.number("COVENANT_BUDGET_PROJECTION_MIN_WINDOW_MS", 1000),
            min_samples=get.number("COVENANT_BUDGET_PROJECTION_MIN_SAMPLES", 3),
            preempt_grace_ms=get.number("COVENANT_BUDGET_PREEMPT_GRACE_MS", 2000),
        ),
        peer_rate=PeerRate(
            requests_per_second=get.number("COVENANT_PEER_REQUESTS_PER_SECOND", 20, least=1),
            burst=get.number("COVENANT_PEER_REQUESTS_BURST", 1000, least=1),
        ),
        unused=tuple(
            sorted(name for name in environment if name in _ELSEWHERE or name.startswith(_ELSEWHERE_PREFIXES))
        ),
    )


def _origins(given: str | None) -> tuple[str, ...]:
    """Split the list; invalid origins are ignored later, with a warning (version 1)."""
    return HTTP_ORIGINS if given is None else tuple(word.strip() for word in given.split(",") if word.strip())


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def _given(self, name: str, default: T, read: Callable[[str], T]) -> T:
        value = self._environment.get(name, "").strip()
        return read(value) if value else default

    def flag(self, name: str) -> bool:
        def read(value: str) -> bool:
            if value.lower() in _YES | _NO:
                return value.lower() in _YES
            raise _wrong(name, value, "1, true, yes, on or 0, false, no, off")

        return self._given(name, False, read)

    def number(self, name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
        def read(value: str) -> int:
            if value.isascii() and value.isdigit() and len(value) < 20 and least <= int(value) <= most:
                return int(value)
            raise _wrong(name, value, f"a number from {least} to {most}")

        return self._given(name, default, read)

    def port(self, name: str) -> int | None:
        def read(value: str) -> int | None:
            return None if value.lower() == "off" else self.number(name, HTTP_PORT, most=65535)

        default: int | None = HTTP_PORT
        return self._given(name, default, read)

    def loopback(self, name: str) -> str:
        def read(value: str) -> str:
            try:
                address = ipaddress.ip_address(value)
            except ValueError:
                raise _wrong(name, value, "an address") from None
            if not address.is_loopback:
                raise _wrong(name, value, "an address of the loopback: HTTP is for this machine alone")
            return str(address)

        return self._given(name, "127.0.0.1", read)

    def one_of(self, name: str, choices: tuple[Choice, ...], default: Choice) -> Choice:
        def read(value: str) -> Choice:
            for choice in choices:
                if choice == value:
                    return choice
            raise _wrong(name, value, " or ".join(str(each) for each in choices))

        return self._given(name, default, read)

    def url(self, name: str) -> str | None:
        def read(value: str) -> str | None:
            if value.startswith(("http://", "https://")) and len(value) < 2048 and value.isprintable():
                return value.rstrip("/")
            raise _wrong(name, value, "a URL of http or https")

        return self._given(name, None, read)


def _wrong(name: str, value: str, wanted: str) -> errors.SettingError:
    return errors.SettingError(f"`{value[:64]}` is no value of {name}", hint=f"{name} is {wanted}", where=name)
