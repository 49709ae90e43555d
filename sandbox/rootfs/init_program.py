"""The init of a run whose agent may start programs: a static program of some 600 bytes, the first process of its root.

It starts the agent, reaps orphans, passes signals on, and exits with the agent's status (docs/adr/0072). ``init.S``
beside this module is its source. tests/unit/sandbox/rootfs/test_init_program.py assembles the source and compares the
bytes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from pathlib import Path
from typing import Final

from policy.compile import init
from policy.host import Closure, ClosureFile
from sandbox.rootfs import closure_files
from sandbox.storage import atomic_file

CODE: Final = bytes.fromhex(
    # _start: block every signal, fork
    "488b0424 488d6c2410 4c8d6cc410 bf7d000000 4883f802 0f8cd8000000 4881ec80000000 48c70424ffffffff"
    "bf02000000 4889e6 488d542408 41ba08000000 b80e000000 0f05"
    "bf11000000 31f6 31d2 4531d2 4531c0 b838000000 0f05 4189c4 85c0 0f8495000000 bf7d000000 0f8883000000"
    # close every descriptor
    "31ff beffffff7f 31d2 b8b4010000 0f05"
    # reap: wait4, rt_sigtimedwait, kill
    "48c7c7ffffffff 488d742410 ba01000000 4531d2 b83d000000 0f05 4439e0 7439 85c0 7fdc"
    "4889e7 31f6 31d2 41ba08000000 b880000000 0f05 83f8fc 74c3 bf7d000000 85c0 782d 83f811 74b5"
    "4489e7 89c6 b83e000000 0f05 eba7"
    # ended, exit
    "8b7c2410 89f8 c1ef08 81e7ff000000 83e07f 7406 8db880000000 b8e7000000 0f05"
    # child: with a terminal, a foreground group of its own
    "31ff be01540000 488d542420 b810000000 0f05 85c0 753f 31ff 31f6 b86d000000 0f05 85c0 7530"
    "b827000000 0f05 89442410 31ff be10540000 488d542410 b810000000 0f05 85c0 740e 31ff be01000000 b86d000000 0f05"
    # start: the old mask, execve
    "bf02000000 488d742408 31d2 41ba08000000 b80e000000 0f05 488b7d00 4889ee 4c89ea b83b000000 0f05"
    "bf7e000000 83f8fe 0f856bffffff bf7f000000 e961ffffff"
)
_ADDRESS, _PAGE = 0x400000, 0x1000
_CODE_AT = 64 + 2 * 56


def build() -> bytes:
    """Return the program: an ELF file of one segment, with a stack that holds no code."""
    size = _CODE_AT + len(CODE)
    head = struct.pack(
        *("<4s5B7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0, 0, 2, 62, 1),
        *(_ADDRESS + _CODE_AT, 64, 0, 0, 64, 56, 2, 0, 0, 0),
    )
    for kind, flags, address, length, align in (
        (1, 5, _ADDRESS, size, _PAGE),  # PT_LOAD, read and execute
        (0x6474E551, 6, 0, 0, 16),  # PT_GNU_STACK, read and write
    ):
        head += struct.pack("<IIQQQQQQ", kind, flags, 0, address, address, length, length, align)
    return head + CODE


@functools.lru_cache(maxsize=2)
def closure(directory: Path) -> Closure:
    """Return the program as one more closure of a root directory; its copy is in ``directory``."""
    directory.mkdir(mode=0o700, exist_ok=True)
    content = build()
    digest = hashlib.sha256(content).hexdigest()
    source = directory / f"init-{digest[:32]}"
    atomic_file.derive(source, content)
    above = ClosureFile(os.path.dirname(init.PROGRAM), "dir", 0o755)
    program = ClosureFile(init.PROGRAM, "file", closure_files.PROGRAM_MODE, len(content), digest, source=str(source))
    return Closure("init", init.PROGRAM, (above, program))
