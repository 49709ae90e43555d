"""The result of a call in a process that is forked as the shim forks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from sandbox.shim import process


def returned(call: Callable[[], Any]) -> Any:
    """Return the result of ``call`` in a forked process, by JSON."""
    ours, its = os.pipe2(os.O_CLOEXEC)

    def work() -> None:
        os.write(its, json.dumps(call()).encode())

    child = process.fork(work, keep=[its])
    os.close(its)
    with os.fdopen(ours, "rb") as stream:
        said = stream.read()
    assert child.reap() == 0
    child.close()
    return json.loads(said)
