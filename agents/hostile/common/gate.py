"""The gate: hostile code starts under gVisor or not at all.

Run bare as root, a probe that mounts, reboots or sets the clock does it for real. So every package here asks this
module first, before it reads its intent and before any probe module is imported. The signs are read only, need no
privilege, and are the same in a bare runsc bundle and in a filtered sandbox of Covenant; every one of them must hold.
"""

from __future__ import annotations

import os
import sys

# gVisor's kernel names itself with this one constant in every release, whether as 4.4.0 or as 4.19.0-gvisor. A real
# kernel has the time of its own build there, and no container changes it: there is no namespace for it.
_UNAME_VERSION = "#1 SMP Sun Jan 10 15:06:54 PST 2016"

# A real kernel writes its builder and compiler in brackets between release and version; gVisor has nothing to write.
_PROC_VERSION = "Linux version {release} {version}"

# What the page allocator, the interrupts and the scheduler of Linux say of themselves: in any mounted /proc, docker's
# masked ones included (masking leaves an entry behind), and never in gVisor's, which has none of the three.
_LANDMARKS = ("/proc/zoneinfo", "/proc/buddyinfo", "/proc/softirqs", "/proc/self/wchan")

REFUSED = 78  # EX_CONFIG of sysexits.h


def reason_to_refuse() -> str | None:
    """Why this is not a gVisor sandbox, or None when every sign says that it is one."""
    kernel = os.uname()
    if kernel.version != _UNAME_VERSION:
        return f"the kernel is `{kernel.release} {kernel.version}`"
    try:
        with open("/proc/version", encoding="ascii") as file:
            version = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        return f"/proc/version cannot be read: {error}"
    if version != _PROC_VERSION.format(release=kernel.release, version=kernel.version):
        return f"/proc/version is `{version}`"
    for path in _LANDMARKS:
        if os.path.lexists(path):
            return f"{path} exists"
    return None


def require_gvisor() -> None:
    """End the process with status 78 and one line on stderr unless gVisor is all around."""
    reason = reason_to_refuse()
    if reason is not None:
        sys.stderr.write(f"refused: this is hostile code and runs only under gVisor, but {reason}\n")
        sys.exit(REFUSED)
