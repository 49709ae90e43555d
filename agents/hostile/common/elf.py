"""The smallest program there is: a static ELF that ends with a known status."""

from __future__ import annotations

import os
import struct

EXIT_STATUS = 42
_BASE = 0x400000
_HEADERS = 64 + 56

# machine: (e_machine, exit_group(42) in machine code)
_CODE = {
    # mov eax, 231; mov edi, 42; syscall
    "x86_64": (62, bytes.fromhex("b8e7000000" "bf2a000000" "0f05")),
    # mov x8, #94; mov x0, #42; svc #0
    "aarch64": (183, bytes.fromhex("c80b80d2" "400580d2" "010000d4")),
}


def program() -> bytes:
    """The bytes of an executable for this machine whose exit status is `EXIT_STATUS`."""
    machine, code = _CODE[os.uname().machine]
    size = _HEADERS + len(code)
    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9) + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return header + segment + code
