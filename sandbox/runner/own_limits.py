"""The directory of a run that its agent reads at /run/covenant: its limits, and its denials as they come (ADR 0075)."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from msgspec import structs

from policy.compile import mounts
from policy.explain import own_limits
from policy.manifest.process import TRUST_FILE
from sandbox.network.inject import gate
from sandbox.runner.spec import SandboxSpec

# The directory of the run's directory.
DIRECTORY: Final = "limits"
_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def given(job: SandboxSpec, directory: Path, stack: contextlib.ExitStack) -> SandboxSpec:
    """Make the directory in the run's ``directory``, and return the job with it among its sources.

    The agent's mount of it is read-only; ``job.tell_agent`` writes its denials, where there is one.
    """
    place = directory / DIRECTORY
    # The agent's user enters it by its own mount; on the host the run's directory is closed to everybody but root.
    place.mkdir(mode=0o755)
    fd = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    stack.callback(os.close, fd)
    os.chmod(place, 0o755)  # noqa: S103 - the agent lists it; the umask may have taken bits
    with os.fdopen(_made(own_limits.POLICY, fd), "wb") as stream:
        stream.write(job.files.own_limits)
    denials = _made(own_limits.DENIALS, fd)
    stack.callback(os.close, denials)
    if job.tell_agent is not None:
        stack.enter_context(job.tell_agent(denials))  # left before the file is closed
    sources = {**job.files.sources, mounts.OWN_LIMITS: fd}
    return structs.replace(job, files=structs.replace(job.files, sources=sources))


def trusted(job: SandboxSpec, directory: Path) -> gate.InjectTerms | None:
    """The terms of the run's injected secrets: its authority is trusted by a file of the run's ``directory``."""
    if job.inject is None:
        return None
    place = directory / DIRECTORY / PurePosixPath(TRUST_FILE).name
    return structs.replace(job.inject, trust=functools.partial(_trust, place, job.inject.bundles))


def _trust(place: Path, bundles: Sequence[str], pem: bytes) -> None:
    """Write what the agent trusts: the authorities of ``bundles``, and the run's own."""
    whole = b"".join(Path(one).read_bytes().rstrip() + b"\n" for one in bundles if Path(one).exists())
    with os.fdopen(os.open(place, _FILE, 0o444), "wb") as stream:
        stream.write(whole + pem)
        os.fchmod(stream.fileno(), 0o444)


def _made(name: str, directory: int) -> int:
    fd = os.open(name, _FILE, 0o444, dir_fd=directory)
    os.fchmod(fd, 0o444)
    return fd
