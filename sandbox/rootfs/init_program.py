"""The init of a run whose agent may start programs: a static program of some 600 bytes, the first process of its root.

It starts the agent, reaps orphans, passes signals on, and exits with the agent's status (docs/adr/0072). ``init.S``
beside this module is its source. tests/unit/sandbox/rootfs/test_init_program.py assembles the source and compares the
bytes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import struct
from pathlib import Path
from typing import Final

from policy.compile import init
from policy.compile.network import firewall
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
# The relay of the ssh-agent service, from ``ssh_relay.S``. Behind its code are the addresses of its two ends.
_RELAY: Final = bytes.fromhex(
    # _start: socket, bind, listen, clone
    "488b0424488d6c24104c8d6cc410bf7d0000004883f8020f8c87000000bf01000000be0100080031d2b8290000000f0585c078504189c489"
    "c7488d353c020000ba1b000000b8310000000f0585c078344489e7be10000000b8320000000f0585c07821bf1180000031f631d24531d245"
    "31c0b8380000000f0585c0742ebf7d0000007820"
    # start: execve; exit
    "488b7d004889ee4c89eab83b0000000f05bf7e00000083f8fe7505bf7f000000b8e70000000f05"
    # serve: every signal blocked, every other descriptor closed
    "4881ec0012000048c70424ffffffffbf020000004889e631d241ba08000000b80e0000000f05418d7c2401beffffff7f31d2b8b40100000f"
    "054585e4741031ff418d7424ff31d2b8b40100000f0544892424bb01000000c704dcffffffffc744dc0401000000ffc383fb217cea"
    # wait: a free pair, ppoll
    "4531ffc744240400000000bb01000000833cdcff740a83c30283fb217cf2eb0b4189dfc7442404010000004889e7be2100000031d24531d2"
    "41b808000000b80f0100000f05bf7d00000085c00f883affffffbb01000000"
    # pair: read, write
    "66837cdc060074778b3cdc85ff7870488db42400020000ba0010000031c00f0585c07e2d4189c6488db424000200008d43ff83f0018b7cc4"
    "084489f2b8010000000f0585c07e0a4801c64129c675e0eb2e"
    # drop: close both
    "8b3cdcb8030000000f05c704dcffffffff448d73ff4183f601428b7cf40842c744f408ffffffffb8030000000f05"
    # next: accept4, socket, connect
    "ffc383fb210f8c76ffffff66837c2406000f8413ffffff4489e731f631d241ba00000800b8200100000f0585c00f88f7feffff4189c6bf02"
    "000000be0100080031d2b8290000000f0585c0783289c389c7488d3551000000ba10000000b82a0000000f0585c0780e468934fc42895cfc"
    "08e9b4feffff89dfb8030000000f054489f7b8030000000f05e99cfeffff"
)
# The gateway's address (sandbox.network.addresses), which this room does not know.
_GATEWAY: Final = "192.0.0.1"
_LISTENS: Final = struct.pack("=H", socket.AF_UNIX) + init.SSH_SOCKET.encode() + b"\0"
_CONNECTS: Final = struct.pack("=H", socket.AF_INET) + struct.pack(
    "!H4s8x", firewall.SSH_AGENT_PORT, socket.inet_aton(_GATEWAY)
)
RELAY: Final = _RELAY + _LISTENS + _CONNECTS
_ADDRESS, _PAGE = 0x400000, 0x1000
_CODE_AT = 64 + 2 * 56


def build(code: bytes = CODE) -> bytes:
    """Return the program: an ELF file of one segment, with a stack that holds no code."""
    size = _CODE_AT + len(code)
    head = struct.pack(
        *("<4s5B7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0, 0, 2, 62, 1),
        *(_ADDRESS + _CODE_AT, 64, 0, 0, 64, 56, 2, 0, 0, 0),
    )
    for kind, flags, address, length, align in (
        (1, 5, _ADDRESS, size, _PAGE),  # PT_LOAD, read and execute
        (0x6474E551, 6, 0, 0, 16),  # PT_GNU_STACK, read and write
    ):
        head += struct.pack("<IIQQQQQQ", kind, flags, 0, address, address, length, length, align)
    return head + code


@functools.lru_cache(maxsize=4)
def closure(directory: Path, *, relay: bool = False) -> Closure:
    """Return the program as one more closure of a root directory; its copy is in ``directory``.

    With ``relay`` that of the ssh-agent service is beside it.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    above = ClosureFile(os.path.dirname(init.PROGRAM), "dir", 0o755)
    files = [_file(directory, init.PROGRAM, CODE), *([_file(directory, init.SSH_RELAY, RELAY)] if relay else [])]
    return Closure("init", init.PROGRAM, (above, *files))


def _file(directory: Path, place: str, code: bytes) -> ClosureFile:
    content = build(code)
    digest = hashlib.sha256(content).hexdigest()
    source = directory / f"{os.path.basename(place)}-{digest[:32]}"
    atomic_file.derive(source, content)
    return ClosureFile(place, "file", closure_files.PROGRAM_MODE, len(content), digest, source=str(source))
