"""Read the comment of one nftables table in process, in the calling thread's network namespace.

It takes about 0.05 ms, `nft list table` 5 ms. Formats: linux/netfilter/nf_tables.h; the comment is user data, which
the kernel keeps for nft(8) as type, length and text (libnftnl, include/libnftnl/udata.h).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from typing import Final

from policy import errors
from sandbox.kernel.net import nft_sets
from sandbox.kernel.net.netlink_wire import HEADER, attribute, attributes, messages

_REQUEST, _ERROR = 0x1, 2
_GET_TABLE: Final = 10 << 8 | 1  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETTABLE
_INET, _VERSION = 1, 0
_NAME, _USER_DATA, _COMMENT = 1, 6, 0
_GENERIC = struct.Struct("=BBH")
_RECEIVE = 65536
_SECONDS = 10.0


def comment(name: str) -> str | None:
    """Return the comment of the table ``inet NAME``: empty if it has none, None if there is no such table.

    Raises:
        errors.KernelError: Raised when the kernel does not answer.
    """
    body = _GENERIC.pack(_INET, _VERSION, 0) + attribute(_NAME, name.encode("ascii") + b"\0")
    try:
        with contextlib.closing(nft_sets.open_socket()) as made:
            made.settimeout(_SECONDS)
            made.send(HEADER.pack(HEADER.size + len(body), _GET_TABLE, _REQUEST, 1, 0) + body)
            kind, answer = next(messages(made.recv(_RECEIVE)))
    except (OSError, StopIteration) as e:
        raise errors.KernelError(f"table inet {name} cannot be read: {e}") from e
    if kind == _ERROR:
        number = -struct.unpack_from("=i", answer)[0]
        if number == errno.ENOENT:
            return None
        raise errors.KernelError(f"table inet {name} cannot be read: {os.strerror(number)}")
    return _comment(attributes(answer[_GENERIC.size :]).get(_USER_DATA, b""))


def _comment(data: bytes) -> str:
    at = 0
    while at + 2 <= len(data):
        kind, size = data[at], data[at + 1]
        if kind == _COMMENT:
            return data[at + 2 : at + 2 + size].rstrip(b"\0").decode("utf-8", "replace")
        at += 2 + size
    return ""
