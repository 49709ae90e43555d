"""A whole daemon, asked what its OpenAPI document promises, by schemathesis: valid requests, and invalid ones.

Each answer must be one of the document's: its status, its type and its schema. What is invalid must be refused, what
is valid must not be, and nothing ends in a 5xx but the one documented 503. Every try follows from the document alone,
so that a run can be repeated; COVENANT_OPENAPI_EXAMPLES asks for more of them.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import hypothesis
import pytest
import schemathesis
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from covenant.adapters.http import openapi
from tests import daemon_kit

load_all_checks()
GRANTS = (
    *("memory.read", "memory.write", "memory.purge", "memory.repair.dry_run", "memory.repair.apply"),
    *("memory.compact.dry_run", "memory.compact.apply", "memory.backfill.dry_run", "memory.backfill.apply"),
    *("settlement.backfill.dry_run", "settlement.backfill.apply", "capabilities.purge", "audit.purge", "peers.purge"),
    *("peers.list", "peers.revoke", "a2a.compact", "a2a.repair.requeue", "a2a.repair.force_error"),
    *("chain.receipts", "chain.batches", "chain.flush", "tool.call.echo", "tool.call.clock", "tool.list"),
)
EXAMPLES = int(os.environ.get("COVENANT_OPENAPI_EXAMPLES", "6"))
# Without what it says of tokens: tokens that are none are tried in test_http.py, and here they would hide the rest.
SCHEMA = schemathesis.openapi.from_dict({**openapi.document(), "security": []})
OPERATIONS: dict[str, Any] = {one.label: one for one in map(operator.methodcaller("ok"), SCHEMA.get_all_operations())}
# What has a body always answers 503, and says so.
UNSERVED = "POST /a2a/peer-tasks"


class World:
    """A daemon in a thread of its own, and its operator, who holds every grant."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = 0
        self._ready, self._stop = threading.Event(), threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> World:
        self._thread.start()
        assert self._ready.wait(60)
        if self._failed is not None:
            raise self._failed
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as e:
            self._failed = e
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        async with daemon_kit.running(self.home, http_port=0) as daemon:
            self.port = daemon.http_port
            await daemon.grant(*GRANTS)
            self._ready.set()
            await anyio.to_thread.run_sync(self._stop.wait)

    def headers(self) -> dict[str, str]:
        """With the token as it is now: some of what is tried rotates it."""
        return {"Authorization": f"Bearer {(self.home / 'peers' / 'operator.token').read_text().strip()}"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("openapi") / "home") as one:
        yield one


def no_fault(ctx: Any, response: Any, case: Any) -> None:
    """A check as schemathesis has them."""
    assert response.status_code < 500 or (response.status_code, case.operation.label) == (503, UNSERVED)
    assert response.status_code != 401, "the operator is let in"


CHECKS = [
    no_fault,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
OF_MODE = {
    GenerationMode.POSITIVE: checks.positive_data_acceptance,
    GenerationMode.NEGATIVE: checks.negative_data_rejection,
}


def whole(value: Any) -> Any:
    """With 1.0 written as 1: JSON Schema calls both integers, which neither version 1 nor this daemon does."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def tried(world: World, label: str, mode: GenerationMode) -> int:
    """Ask as often as ``EXAMPLES`` says; how often that was."""
    count = 0

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        # What fails is told as it was found: to make it small takes hundreds of requests.
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        nonlocal count
        count += 1
        if mode is GenerationMode.POSITIVE:
            case.body = whole(case.body)
        response = case.call(base_url=world.url, headers=world.headers(), timeout=30)
        case.validate_response(response, checks=[*CHECKS, OF_MODE[mode]])

    ask()
    return count


def can_be_invalid(operation: Any) -> bool:
    """Whether the document asks for anything that a request could have otherwise."""
    return bool(operation.body or operation.query or operation.path_parameters)


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_operation_takes_what_it_says(world: World, label: str) -> None:
    assert tried(world, label, GenerationMode.POSITIVE) >= 1


@pytest.mark.parametrize("label", [label for label, one in OPERATIONS.items() if can_be_invalid(one)])
def test_every_operation_refuses_anything_else(world: World, label: str) -> None:
    assert tried(world, label, GenerationMode.NEGATIVE) >= 1
