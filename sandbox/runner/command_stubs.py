"""Stubs of commands: a script of the root's own interpreter for each granted command, in /usr/bin.

A stub sends its arguments and its stdin to the run's service gate, and passes output and exit status on. It has no
rights and no secret: the call is decided outside (sandbox.broker.command_calls). In a root of layers it stands over a
program of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from policy.compile.artefacts import Artefacts
from policy.host import Closure
from sandbox.rootfs import closure_files

_PYTHON: Final = """#!/usr/bin/python3 -IS
import base64, os, socket, sys
words = " ".join("." + base64.b64encode(os.fsencode(one)).decode() for one in sys.argv[1:])
given = b"" if sys.stdin is None or os.isatty(0) else sys.stdin.buffer.read()
body = f"{words}\\n{base64.b64encode(given).decode()}\\n".encode()
head = f"POST /command/NAME HTTP/1.1\\r\\nHost: tools.covenant\\r\\nContent-Type: TYPE\\r\\n"
head += f"Connection: close\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
with socket.create_connection(("tools.covenant", 80)) as line:
    line.sendall(head.encode() + body)
    answer = b"".join(iter(lambda: line.recv(65536), b""))
first, _, rest = answer.partition(b"\\r\\n\\r\\n")
if not first.startswith(b"HTTP/1.1 200 "):
    sys.stderr.write(f"covenant: NAME was not called: {rest.decode(errors='replace')}\\n")
    sys.exit(126)
status, out, err, _ = rest.split(b"\\n")
os.set_blocking(1, True)
sys.stdout.buffer.write(base64.b64decode(out))
sys.stdout.flush()
sys.stderr.buffer.write(base64.b64decode(err))
sys.exit(int(status))
"""
_BASH: Final = """#!/bin/bash
export LC_ALL=C
words=""
for one in "$@"; do words+=".$(printf %s "$one" | base64 -w0) "; done
given=""
if [ ! -t 0 ]; then given="$(base64 -w0)"; fi
body="${words% }"$'\\n'"$given"$'\\n'
exec 9<>/dev/tcp/tools.covenant/80 || exit 126
printf 'POST /command/NAME HTTP/1.1\\r\\nHost: tools.covenant\\r\\nContent-Type: TYPE\\r\\n' >&9
printf 'Connection: close\\r\\nContent-Length: %d\\r\\n\\r\\n%s' "${#body}" "$body" >&9
IFS= read -r first <&9
while IFS= read -r line <&9 && [ "$line" != $'\\r' ]; do :; done
case "$first" in "HTTP/1.1 200 "*) ;; *) { printf 'covenant: NAME was not called: '; cat <&9; } >&2; exit 126 ;; esac
IFS= read -r status <&9
IFS= read -r out <&9
IFS= read -r err <&9
printf %s "$out" | base64 -d
printf %s "$err" | base64 -d >&2
exit "$status"
"""
TYPE: Final = "application/x-covenant-command"
DIRECTORY: Final = "/usr/bin"


def closures(directory: Path, names: Sequence[str], artefacts: Artefacts) -> list[Closure]:
    """Return the stubs as closures; their copies are in ``directory``.

    An agent of python3 or node on this host's closure has none but Python's; a root of layers has bash.
    """
    root = artefacts.json("mounts.json")["root"]
    script = _BASH if root.get("image") is not None else _PYTHON
    files = {
        f"{DIRECTORY}/{name}": script.replace("NAME", name).replace("TYPE", TYPE).encode() for name in sorted(names)
    }
    return [closure_files.derived(directory, "command", files, mode=closure_files.PROGRAM_MODE)]
