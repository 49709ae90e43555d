"""Check that a process with secrets leaves no core and cannot be traced: the vault's client and the run's server."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from policy import errors
from sandbox.broker.credentials import Credentials, Scope, Tellers
from sandbox.broker.vault_process import Fetcher
from sandbox.kernel import libc
from sandbox.kernel.proc.secret_memory import Locked
from sandbox.vault.backend import OpenedSecret
from tests.unit.sandbox.kernel.proc.test_secret_memory import PR_GET_DUMPABLE, status_of

GUARDED, OPEN = "0 (1, 1)", "1"


def guard() -> str:
    """Return the guard of the calling process: its dumpable flag and its limit of core files."""
    dumpable = libc.prctl(PR_GET_DUMPABLE)
    return f"{dumpable} {resource.getrlimit(resource.RLIMIT_CORE)}"


def undo_the_guard() -> None:
    """Reset the guard of this process: another test may have set it in pytest's process for good."""
    libc.prctl(libc.PR_SET_DUMPABLE, 1)
    with contextlib.suppress(ValueError):  # only root can raise it again
        resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096))
    assert guard().startswith(OPEN), "the control"


class Vault:
    """A vault with one secret under any name: the guard of the process that opens it."""

    @contextlib.contextmanager
    def opened(self, agent_id: str, name: str) -> Iterator[OpenedSecret]:
        raw = guard().encode()
        with Locked(len(raw)) as value:
            value.view[:] = raw
            yield OpenedSecret(1, value)


def asks_a_vault() -> None:
    found: list[str] = []

    def then(value: OpenedSecret | errors.VaultError | None) -> None:
        assert isinstance(value, OpenedSecret)
        found.append(bytes(value.value.view).decode())

    undo_the_guard()
    with Fetcher(lambda: cast("Any", Vault()), "probe", seconds=20) as fetcher:
        fetcher.ask("probe", "db", then)
        assert fetcher.settle({}) is None
    assert found == [GUARDED]
    # The guard is not inherited: the parent has a secret of this vault only for the duration of a call.
    assert guard().startswith(OPEN)


def serves_secrets() -> None:
    undo_the_guard()
    Credentials(Scope("probe", ("db",), 60), cast("Any", None), cast("Tellers", None))
    assert guard() == GUARDED


@pytest.mark.parametrize("who", [asks_a_vault, serves_secrets])
def test_whoever_holds_secrets_of_run_leaves_no_core_and_is_nobodys_to_trace(who: Callable[[], None]) -> None:
    """Also if the vault's backend sets no guard, such as a server's backend."""
    assert status_of(who) == 0
