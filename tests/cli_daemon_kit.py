"""A daemon in a thread for tests of the command line. A double runs its agents; its clock is the machine's."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.from_thread
import pytest
from anyio.from_thread import BlockingPortal
from click.testing import Result

from covenant.cli import common
from covenant.handlers.server import Server
from covenant.runtime.runner import Runners
from policy import errors
from tests import daemon_kit, v1_client
from tests.cli_kit import call, done
from tests.mailbox_kit import MANIFEST, Runs

# Fields that hold data of a client's choice.
OPEN = frozenset({"metadata", "scope", "inputSchema", "_meta", "before", "after"})
# Actions that the tests of verbs need beyond those that `bootstrap` grants.
ACTIONS = (
    "memory.read",
    "memory.purge",
    "memory.repair.dry_run",
    "memory.repair.apply",
    "memory.compact.dry_run",
    "memory.compact.apply",
    "memory.backfill.dry_run",
    "memory.backfill.apply",
    "settlement.backfill.dry_run",
    "settlement.backfill.apply",
    "capabilities.purge",
    "audit.purge",
    "peers.purge",
    "chain.receipts",
    "chain.batches",
    "chain.flush",
    "tool.call.echo",
    "tool.call.clock",
    "a2a.compact",
    "a2a.repair.requeue",
    "a2a.repair.force_error",
    "a2a.send.hello@agent",
    "a2a.send.operator@local",
    "a2a.respond.operator@local",
)


@dataclass
class Daemon:
    """One that runs in a thread, and the runner behind its agents."""

    home: Path
    runs: Runs
    server: Server
    # Into its loop.
    portal: BlockingPortal
    # Where its HTTP listens, if it does.
    http_port: int | None = None


def package(home: Path, agent_id: str, manifest: str = "") -> None:
    """Put a package below the home."""
    place = home / "agents" / agent_id
    place.mkdir(parents=True, mode=0o700)
    (place / "agent.toml").write_text(manifest or MANIFEST.format(id=agent_id, required='["tool.web_search"]'))


@contextlib.contextmanager
def granted(home: Path, **settings: Any) -> Iterator[Daemon]:
    """A daemon of ``home`` whose operator holds what the verbs need."""
    with running(home, **settings) as one, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COVENANT_HOME", str(home))
        for action in ("memory.write", "tool.web_search", *ACTIONS):
            done("capabilities", "grant", action)
        yield one


@contextlib.contextmanager
def running(home: Path, **settings: Any) -> Iterator[Daemon]:
    """A daemon of ``home`` while the block lasts."""
    runs = Runs()

    def prepare(server: Server) -> None:
        server.runners = Runners({"python3": runs})

    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(daemon_kit.running(home, prepare=prepare, **settings)) as one,
    ):
        yield Daemon(home, runs, one.server, portal, one.running.http_port)


def answered(*arguments: str, status: int = 0) -> dict[str, Any]:
    """The one document of a verb with ``--json`` that ends with this status."""
    result = call(*arguments, "--json")
    found = exit_status(result)
    assert found == status, (found, result.output, result.exception)
    if isinstance(result.exception, errors.CovenantError):
        return result.exception.to_json()
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def exit_status(result: Result) -> int:
    """Return the exit status of the verb. The console script sets the status of a refusal."""
    if isinstance(result.exception, errors.UsageError):
        return common.EXIT_USAGE
    return common.EXIT_FAILED if isinstance(result.exception, errors.CovenantError) else result.exit_code


def keys(value: Any, at: str = "") -> set[str]:
    """The names in a document, with where they stand: ``tasks[].task.id``; ``OPEN`` ones are not looked into."""
    if isinstance(value, dict):
        below = [keys(each, f"{at}.{name}" if at else name) for name, each in value.items() if name not in OPEN]
        return {f"{at}.{name}" if at else name for name in value}.union(*below)
    if isinstance(value, list):
        return set[str]().union(*(keys(each, f"{at}[]") for each in value))
    return set()


class Envelopes:
    """The names in the documents of verbs, as a file has them; written anew where COVENANT_REGENERATE is set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.anew = bool(os.environ.get("COVENANT_REGENERATE"))
        self.known: dict[str, list[str]] = json.loads(path.read_text()) if path.exists() else {}

    def hold(self, name: str, document: dict[str, Any]) -> None:
        """The document of ``name`` has the names that it had, and no others; a client of version 1 decodes it."""
        v1_client.CLI.get(document.get("kind") or document["schema"], v1_client.anything)(document)
        found = sorted(keys(document))
        if self.anew:
            self.known[name] = found
            self.path.write_text(json.dumps(dict(sorted(self.known.items())), indent=2) + "\n")
        assert found == self.known.get(name), f"{name}: see {self.path.name}"
