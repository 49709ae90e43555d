"""Who holds secrets leaves no core, and is nobody's to trace: who asks a vault for them, and who serves them."""

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
from sandbox.vault.backend import Opened
from tests.unit.sandbox.kernel.proc.test_secret_memory import PR_GET_DUMPABLE, status_of

GUARDED, OPEN = "0 (1, 1)", "1"


def guard() -> str:
    """How the process that this is called in is guarded: whether it is dumpable, and its limit of core files."""
    dumpable = libc.prctl(PR_GET_DUMPABLE)
    return f"{dumpable} {resource.getrlimit(resource.RLIMIT_CORE)}"


def undo_the_guard() -> None:
    """This process is as one that holds nothing; another test of pytest's own may have guarded it, for good."""
    libc.prctl(libc.PR_SET_DUMPABLE, 1)
    with contextlib.suppress(ValueError):  # only root raises it again
        resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096))
    assert guard().startswith(OPEN), "the control"


class Vault:
    """Has one secret under any name: how the process that opens it is guarded."""

    @contextlib.contextmanager
    def opened(self, agent_id: str, name: str) -> Iterator[Opened]:
        raw = guard().encode()
        with Locked(len(raw)) as value:
            value.view[:] = raw
            yield Opened(1, value)


def asks_a_vault() -> None:
    found: list[str] = []

    def then(value: Opened | errors.VaultError | None) -> None:
        assert isinstance(value, Opened)
        found.append(bytes(value.value.view).decode())

    undo_the_guard()
    with Fetcher(lambda: cast("Any", Vault()), "probe", seconds=20) as fetcher:
        fetcher.ask("probe", "db", then)
        assert fetcher.settle({}) is None
    assert found == [GUARDED]
    # Not because whoever forked it is: that process never has a secret of this vault's but for the moment of a call.
    assert guard().startswith(OPEN)


def serves_secrets() -> None:
    undo_the_guard()
    Credentials(Scope("probe", ("db",), 60), cast("Any", None), cast("Tellers", None))
    assert guard() == GUARDED


@pytest.mark.parametrize("who", [asks_a_vault, serves_secrets])
def test_whoever_holds_secrets_of_a_run_leaves_no_core_and_is_nobodys_to_trace(who: Callable[[], None]) -> None:
    """Also where the vault's backend guards nobody, as that of a server does not."""
    assert status_of(who) == 0
