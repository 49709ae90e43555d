"""Select the chain that stores the roots of batches. Nothing is anchored unless the daemon has a chain that is ready.

``OffChain`` is the default: it lists missing settings, and anchors nothing. ``covenant.providers.chain.local_vm``
executes the transaction in a local machine if ``secrets.toml`` says so. A cluster would be a third implementation of
``Chain``; there is none yet.
"""

from __future__ import annotations

import os
from typing import Literal

from covenant.providers.chain.interface import Chain, OffChain


def pick(name: Literal["off", "litesvm"]) -> Chain:
    """Return the chain that ``settlement.chain`` of ``secrets.toml`` names.

    Raises:
        errors.SettlementMissingError: it needs the extra, which is not installed.
    """
    if name == "off":
        return OffChain()
    # Imported here, because only this chain needs the extra.
    from covenant.providers.chain import local_vm

    # A random payer: the machine funds it, and forgets it.
    return local_vm.LocalVm(os.urandom(32))
