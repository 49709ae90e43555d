"""The chain that may keep the roots of batches. Nothing is on one unless the daemon is given a chain that is ready.

``OffChain`` is the default: it says what is missing, and anchors nothing. ``covenant.providers.chain.local_vm``
executes the transaction in a machine of its own, where ``secrets.toml`` says so; a cluster is a third implementation of
``Chain``, of which there is none yet.
"""

from __future__ import annotations

import os
from typing import Literal

from covenant.providers.chain.interface import Chain, OffChain


def pick(name: Literal["off", "litesvm"]) -> Chain:
    """The chain that ``settlement.chain`` of ``secrets.toml`` names.

    Raises:
        errors.SettlementMissingError: it needs the extra, which is not installed.
    """
    if name == "off":
        return OffChain()
    # Needs no more than its extra when it is asked for.
    from covenant.providers.chain import local_vm

    # Whoever pays there is nobody: the machine gives it what it needs, and forgets it.
    return local_vm.LocalVm(os.urandom(32))
