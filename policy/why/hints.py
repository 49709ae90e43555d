"""Hints about a package, from its own files: what it will use, where no layer tells that it was refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from policy.manifest import text
from policy.manifest.agent import Manifest

# Modules of Python whose locks are POSIX semaphores, which the C library keeps in /dev/shm (sem_overview(7)).
_SEMAPHORES: Final = re.compile(rb"\b(?:multiprocessing|ProcessPoolExecutor)\b")
SHARED_MB: Final = 64


def of(files: Mapping[str, bytes], manifest: Manifest) -> Iterator[str]:
    """Yield a hint, with its lines of agent.toml, for each thing that the package uses and is not granted."""
    if manifest.agent.runtime != "python3" or manifest.sandbox.dev_shm_mb:
        return
    name = next((name for name in sorted(files) if name.endswith(".py") and _SEMAPHORES.search(files[name])), None)
    if name is not None:
        lines = f"[sandbox] dev_shm_mb = {SHARED_MB} and [resources] disk_mb = {manifest.resources.disk_mb + SHARED_MB}"
        if manifest.sandbox.filesystem == "read-only-package":
            lines = f'[sandbox] filesystem = "ephemeral", {lines.removeprefix("[sandbox] ")}'
        yield f"{text.quote(name)} uses multiprocessing, whose locks need /dev/shm, and no layer tells: write {lines}"
