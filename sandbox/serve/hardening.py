"""Drop rights of the supervisor for good, after start-up. Each shim, gate and runsc inherits the restrictions.

capabilities   those of ``CAPABILITIES``, each with what fails without it (docs/adr/0032-two-processes.md)
system calls   all of the deny list (policy/data/deny.toml) but ``NEEDED``; of bpf(2) the question alone which
               programs are attached, which attestation asks
network        an empty namespace; a shim returns to the host's where the operator named an uplink
limits         no core files: they would hold keys
"""

from __future__ import annotations

import platform
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from policy import data, errors
from policy.compile import bpf, seccomp
from sandbox import core_dumps
from sandbox.kernel import libc
from sandbox.kernel.net import netns
from sandbox.kernel.proc.capabilities import CAPABILITIES as NUMBERS

# What is kept, and what it is for. What no run fails without is kept for files of other owners: runsc hands the first
# five to the process that opens granted files, and without them it would see less than was granted.
CAPABILITIES: Final[Mapping[str, str]] = {
    "chown": "a written path's new files belong to the operator's user",
    "dac_override": "granted files and packages whose mode shuts root out",
    "dac_read_search": "granted files below directories of their owners alone",
    "fowner": "modes and times of files of other owners in a written path",
    "fsetid": "set-group-id directories in a written path keep their bit",
    "kill": "signals to agents and gates, which are other users",
    "setgid": "the users of gates, of trusted-local agents, and of callers whose packages are read",
    "setuid": "as setgid",
    "setpcap": "gates and agents drop their bounding set",
    "net_bind_service": "the DNS gate's port 53",
    "net_admin": "links, addresses, routes and rules of the gateways",
    "net_raw": "gVisor's network stack writes frames to its device",
    "sys_chroot": "the roots of sandboxes and gates",
    "sys_ptrace": "gVisor's stubs where a machine restricts ptrace (Yama); reading back processes of other users",
    "sys_admin": "namespaces, mounts, filters without no-new-privs",
    "setfcap": "user namespaces that map the owner of a written path",
}
# Calls of the deny list that the supervisor and what it starts cannot do without.
NEEDED: Final[Mapping[str, str]] = {
    "ptrace": "gVisor makes its stub processes by it",
    "process_vm_readv": "gVisor reads its stubs",
    "process_vm_writev": "gVisor writes its stubs",
    "mount": "roots of sandboxes and gates",
    "umount": "as umount2",
    "umount2": "the old root of a sandbox",
    "pivot_root": "the root of a sandbox",
    "chroot": "the root of a gate",
    "open_tree": "a granted path is mounted by its descriptor",
    "move_mount": "as open_tree",
    "mount_setattr": "as open_tree, with its flags",
    "fsopen": "what libraries and runsc mount newer ways",
    "fsconfig": "as fsopen",
    "fsmount": "as fsopen",
    "unshare": "namespaces",
    "setns": "namespaces",
    "clone3": "libc starts threads by it; an agent's own filter refuses it",
    "memfd_create": "gVisor's memory is such a file; a filter is exported into one",
    "execveat": "runsc starts itself from a descriptor",
    "pidfd_getfd": "the client of a keeper that hangs is answered over its socket (sandbox.serve.overdue)",
    "name_to_handle_at": "runsc tells files apart by it",
}
# bpf(2): BPF_PROG_QUERY (linux/bpf.h); the kernel looks at the lower half of the argument alone.
_WHERE = {"bpf": ((bpf.Masked(0, 0xFFFFFFFF, 16),),)}
_DESCRIPTORS = 65536


def apply() -> int:
    """Give it up; a descriptor of the host's network namespace, which is not this process's any more.

    Raises:
        errors.KernelError: the kernel does not take a step, or does not say afterwards that it did.
    """
    try:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _DESCRIPTORS), most))
        core_dumps.forbid()
        # What a killed shim leaves behind is ours to reap, and no stranger's.
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
        host_network = netns.current()
        libc.unshare(libc.CLONE_NEWNET)
        libc.keep_capabilities(kept())
        libc.set_seccomp_filter(program(platform.machine()))
        _check()
    except OSError as e:
        raise errors.KernelError(f"the supervisor cannot give up its rights: {e}") from e
    return host_network


def kept() -> frozenset[int]:
    """The numbers of what is kept."""
    return frozenset(NUMBERS[name] for name in CAPABILITIES)


def refused() -> frozenset[str]:
    """Return the system calls that are refused with any arguments."""
    return frozenset(data.deny().names) - NEEDED.keys() - _WHERE.keys()


def program(arch: str) -> bytes:
    """The supervisor's own filter."""
    return seccomp.compile_without(refused(), arch=arch, where=_WHERE)


def _check() -> None:
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    mask = sum(1 << number for number in kept())
    for name, wanted in (("CapPrm", mask), ("CapEff", mask), ("CapBnd", mask), ("CapInh", 0), ("CapAmb", 0)):
        if int(status[name], 16) & ~wanted:
            raise OSError(0, f"{name} is {status[name]}")
    if status["Seccomp"].strip() != "2":
        raise OSError(0, "no filter is loaded")
    devices = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    if [line for line in devices if line.split(":")[0].strip() != "lo"]:
        raise OSError(0, "the network namespace has devices")
