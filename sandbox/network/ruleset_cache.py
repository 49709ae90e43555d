"""A compiled ruleset, checked by ``nft -c`` once and applied in one transaction each time.

nft sends a file as one transaction, of which the kernel takes all or nothing, so the check changes nothing about what
an apply may do; what it adds is that no part of a new ruleset reaches the kernel's commit at all. It costs twice an
apply, since the kernel waits a grace period to drop what it checked. So it is made for each text, nft and kernel once.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Final

from sandbox.kernel.net import nft
from sandbox.storage import json_cache

# Below ``closures``: texts that were checked, the youngest last.
CHECKED: Final = "rulesets.json"
_KEPT = 256


def apply(binary: Path, text: bytes, *, state: Path) -> None:
    """Apply a ruleset in the calling thread's network namespace, checked before where it was not yet.

    Raises:
        errors.KernelError: nft or the kernel refuses it; nothing was changed.
    """
    info = binary.stat()
    which = [hashlib.sha256(text).hexdigest(), str(binary), info.st_ino, info.st_ctime_ns, os.uname().release]
    key = hashlib.sha256(json.dumps(which).encode()).hexdigest()
    path = state / "closures" / CHECKED
    known = json_cache.read(path) or {}
    nft.apply(binary, text, checked=key not in known)
    if key not in known:
        json_cache.write(path, {**dict(list(known.items())[1 - _KEPT :]), key: True})
