"""``python -m tests.load [INTENTS] [CLIENTS]``: the storm, then the kill in its middle."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import anyio

from tests.load import harness


async def _main(intents: int, clients: int) -> None:
    with tempfile.TemporaryDirectory(prefix="covenant-load-") as made:
        base = Path(made)
        for name in ("storm", "kill"):
            (base / name).mkdir()
        rate = await harness.storm(base / "storm", intents=intents, clients=clients)
        print(f"storm: {intents} intents of {clients} clients, none lost, none doubled, {rate:.0f} a second")
        kept = await harness.kill(base / "kill", intents=intents, clients=clients)
        print(f"kill: {kept} acknowledged before it, none of them missing, all {intents} answered after it")


if __name__ == "__main__":
    given = [int(one) for one in sys.argv[1:]]
    intents, clients = (*given, *(2000, 64)[len(given) :])
    anyio.run(_main, intents, clients)
