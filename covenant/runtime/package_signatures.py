"""Verify an operator's signature of a package, as far as an unprivileged process can.

Only agents without a sandbox need it here: the supervisor verifies every other one itself. If the machine has a
supervisor, it is asked about these as well, and nothing is verified while it does not listen. Otherwise the root is the
operator's working copy below the home, which decides nothing. The copy may lack a newer root or a revocation, the
highest accepted serial, and the greatest time ever seen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio.to_thread

from covenant.keys import trust_root
from covenant.runtime import packages
from covenant.runtime.packages import Card
from policy import decide, errors
from policy.signing import trust
from sandbox.storage import package_reader as reader


def verify(card: Card, *, home: Path, state: Path, host: str, now_ms: Callable[[], int]) -> None:
    """Refuse a card whose package, in its present state, has no signature of the root's operators for this ``host``.

    Raises:
        errors.CovenantError: it is unsigned or wrongly signed; or the package differs from the card's.
    """
    with packages.opened(card) as directory:
        package = reader.read(directory)
    with trust_root.opened(home, state) as held:
        trusted = trust.verify(
            package,
            held.root,
            now_ms=now_ms(),
            audience=host,
            serials=held.state or trust.NoSerials(),
            greatest_time_ms=held.state.greatest_time_ms() if held.state else 0,
        )
    manifest = decide.manifest_of(package)
    if manifest != card.manifest:
        raise errors.StaleAgentError(f"the manifest of agent `{card.id}` was changed", where=card.where)
    trust.authorise(trusted, agent_id=manifest.agent.id, role=manifest.agent.role, operator=manifest.agent.operator)


async def ask_or_verify(card: Card, *, ask: Callable[[Card], Awaitable[bool]], verify: Callable[[Card], None]) -> None:
    """Have the supervisor verify the package (``ask``); ``verify`` it here only if this machine has none.

    Raises:
        errors.CovenantError: the responsible verifier refuses it.
    """
    if not await ask(card):
        await anyio.to_thread.run_sync(verify, card)
