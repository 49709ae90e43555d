#!/usr/bin/env python3
"""Measure a capability check with 1, 1,000 and 100,000 grants: the decision alone, without its row in the log.

    .venv/bin/python benchmarks/capability_check.py [grants]

Beside each figure is a bare look-up in a dict of as many pairs of subject and action, from the same run. The benchmark
also prints how long the store takes to open. Last comes the time of a grant's first check, which verifies its
signature.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import anyio

from covenant.handlers.access import authorization
from covenant.handlers.access.authorization import RequestFacts
from covenant.keys.identity import Identity
from covenant.stores.capabilities import rows
from covenant.stores.capabilities.durable import DurableCapabilities
from covenant.stores.capabilities.interface import Grant
from policy import base58
from policy.capabilities.token import Token

_CHECKED = 2000
_IDENTITY = Identity(b"d" * 32)
_PLAIN: tuple[str, Any, RequestFacts] = ("intent.delegate", {}, RequestFacts())
_SCOPED: tuple[str, Any, RequestFacts] = (
    "memory.purge",
    {"version": 1, "tiers": ["working"], "before_ms": 9, "apply": True},
    RequestFacts(tier="working", before_ms=5, apply=True),
)


def written(directory: Path, count: int) -> list[Token]:
    """A file of grants, most of them to others and unverified; those that are checked bear signatures."""
    directory.mkdir(mode=0o700)
    tokens = []
    path = directory / "granted.jsonl"
    path.touch(0o600)
    with path.open("wb") as stream:
        for n in range(count):
            subject = base58.encode(n.to_bytes(4) + b"k" * 28)
            action, scope, _ = _SCOPED if n % 2 else _PLAIN
            token = Token(subject, action, scope, _IDENTITY.agent.pubkey, None)
            signature = _IDENTITY.grant(token) if n < _CHECKED else base58.encode(n.to_bytes(64))
            stream.write(rows.granted(Grant(token, signature, "a@b", "operator@local")) + b"\n")
            tokens.append(token)
    return tokens


def each_us(act: Callable[[Token], object], tokens: Sequence[Token]) -> float:
    """The median of what ``act`` takes, in microseconds, of five passes over the tokens."""
    passes = []
    for _ in range(5):
        start = time.perf_counter()
        for token in tokens:
            act(token)
        passes.append((time.perf_counter() - start) / len(tokens) * 1e6)
    return statistics.median(passes)


async def measure(count: int) -> None:
    """Print the figures of one size."""
    with tempfile.TemporaryDirectory() as place:
        tokens = written(Path(place) / "capabilities", count)
        start = time.perf_counter()
        store = await DurableCapabilities.open(Path(place) / "capabilities", _IDENTITY)
        opened = time.perf_counter() - start
        checked = tokens[: min(count, _CHECKED)]
        facts = {_PLAIN[0]: _PLAIN[2], _SCOPED[0]: _SCOPED[2]}

        def check(token: Token) -> None:
            found = authorization.decide(store, token.subject, token.action, facts[token.action], 5)
            if found.grant is None:
                raise AssertionError(found.reason)

        start = time.perf_counter()
        for token in checked:
            check(token)
        first = (time.perf_counter() - start) / len(checked) * 1e6
        bare = {(token.subject, token.action): token for token in tokens}
        looked = each_us(lambda token: bare[token.subject, token.action], checked)
        plain = each_us(check, checked[::2])
        scoped = each_us(check, checked[1::2] or checked)
        await store.close()
    print(
        f"{count:>7} grants: check {plain:5.2f} us, with three scope fields {scoped:5.2f} us,"
        f" bare dict {looked:5.2f} us; first check {first:6.1f} us; opened in {opened * 1000:7.1f} ms"
    )


def main() -> None:
    """Run it."""
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    for count in sorted({1, min(1000, most), most}):
        anyio.run(measure, count)


if __name__ == "__main__":
    main()
