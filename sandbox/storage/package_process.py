"""Open a package directory and read files of it, as a program: what waits for a file system that does not answer is
this process, and none that others wait for.

    python -I -m sandbox.storage.package_process PATH NAME:BYTES...      stdin is a stream socket

It sends a descriptor of the directory with the first byte, and then one JSON document: ``files`` by name, in base64, or
``error``. A name that the package does not have is left out. BYTES is the most that a file may have.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from policy import errors
from sandbox.storage import plain_file


def main(path: str, wanted: Iterable[str]) -> None:
    """Read the files and send what there is of them."""
    with socket.socket(fileno=0) as sock:
        directory, document = -1, dict[str, Any]()
        try:
            directory = _opened(path)
            document["files"] = files = dict[str, str]()
            for name, _, most in (one.rpartition(":") for one in wanted):
                if (raw := plain_file.read(directory, name, most=int(most))) is not None:
                    files[name] = base64.b64encode(raw).decode()
        except errors.CovenantError as e:
            document = {"error": e.to_json()}
        socket.send_fds(sock, [b" "], [] if directory < 0 else [directory])
        sock.sendall(json.dumps(document).encode())


def _opened(path: str) -> int:
    """Open the directory, no symlink.

    Raises:
        errors.PackageError: it cannot be opened.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise errors.PackageError(
            f"the package cannot be read: {e.strerror}",
            hint="name a directory of $COVENANT_HOME/agents, or an absolute path",
            where=str(Path(path)),
        ) from e


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
