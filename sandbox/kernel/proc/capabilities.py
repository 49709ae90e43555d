"""The numbers of the capabilities that this project names (include/uapi/linux/capability.h)."""

from __future__ import annotations

from typing import Final

CAPABILITIES: Final = {
    "chown": 0,
    "dac_override": 1,
    "dac_read_search": 2,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "linux_immutable": 9,
    "net_bind_service": 10,
    "net_admin": 12,
    "net_raw": 13,
    "sys_chroot": 18,
    "sys_ptrace": 19,
    "sys_admin": 21,
    "sys_resource": 24,
    "mknod": 27,
    "setfcap": 31,
}
