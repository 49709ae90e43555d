"""Whether an operator signed a package, as far as a process without rights can say.

Only agents that no sandbox holds need it here: the supervisor verifies every other one itself. Where the machine has
one it is asked about these as well, and while it does not listen nothing is verified. Elsewhere the root is that of the
operator's working copy below the home, which decides nothing there: what that cannot know is a root or a revocation
that the copy has not, the highest serial that was accepted, and the greatest time ever seen.
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
    """Refuse a card whose package, as it lies there now, no operator of the root signed for this ``host``.

    Raises:
        errors.CovenantError: it is not signed, or not so; or the package is another than the card's.
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
    """Have the supervisor verify the package (``ask``); ``verify`` it here only where this machine has none.

    Raises:
        errors.CovenantError: whichever of the two was to say refuses it.
    """
    if not await ask(card):
        await anyio.to_thread.run_sync(verify, card)
