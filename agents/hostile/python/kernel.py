"""The kernel itself: clock, name, logs, modules, keys, and the interfaces most exploits start from."""

from __future__ import annotations

import ctypes
import os
import struct
import time

from harness import probe
from raw import call

SYSLOG_ACTION_READ_ALL = 3
LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2 = 0xFEE1DEAD, 0x28121969
LINUX_REBOOT_CMD_CAD_OFF = 0  # the one command that restarts nothing
KEYCTL_JOIN_SESSION_KEYRING, KEY_SPEC_SESSION_KEYRING = 1, -3
FAN_CLASS_NOTIF = 0


@probe("clock_set")
def clock_set() -> str:
    """By settimeofday: gVisor itself answers EPERM to clock_settime, so that a probe of it would show nothing."""
    now = time.time_ns()
    call("settimeofday", struct.pack("=qq", now // 10**9, now % 10**9 // 1000), None)
    return "set the clock"


@probe("clock_adjust")
def clock_adjust() -> str:
    # modes = ADJ_FREQUENCY, frequency 0: a change in form only, and the same right.
    call("adjtimex", ctypes.create_string_buffer(struct.pack("=I", 2), 208))
    return "adjusted the clock"


@probe("clock_adjust_other")
def clock_adjust_other() -> str:
    call("clock_adjtime", 0, ctypes.create_string_buffer(struct.pack("=I", 2), 208))
    return "adjusted the clock"


@probe("hostname_set")
def hostname_set() -> str:
    name = os.uname().nodename.encode()
    call("sethostname", name, len(name))
    return "set the host name"


@probe("domainname_set")
def domainname_set() -> str:
    # With its NUL: gVisor reads the name as a string that must end within the length.
    call("setdomainname", b"hostile\0", 8)
    return "set the domain name"


@probe("kernel_log")
def kernel_log() -> str:
    buffer = ctypes.create_string_buffer(4096)
    return f"read {call('syslog', SYSLOG_ACTION_READ_ALL, buffer, 4096)} bytes of the kernel's log"


@probe("kernel_reboot")
def kernel_reboot() -> str:
    call("reboot", LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_CAD_OFF, None)
    return "may reboot"


@probe("kernel_module_load")
def kernel_module_load() -> str:
    call("init_module", b"\x7fELF", 4, b"")
    return "loaded a module"


@probe("kernel_module_load_file")
def kernel_module_load_file() -> str:
    descriptor = os.open("/workspace/main.py", os.O_RDONLY)
    call("finit_module", descriptor, b"", 0)
    return "loaded a module"


@probe("kernel_module_unload")
def kernel_module_unload() -> str:
    call("delete_module", b"no_such_module", os.O_NONBLOCK)
    return "unloaded a module"


@probe("kernel_kexec")
def kernel_kexec() -> str:
    call("kexec_load", 0, 0, None, 0)
    return "loaded another kernel"


@probe("kernel_bpf")
def kernel_bpf() -> str:
    """BPF_MAP_CREATE of an array with one element."""
    attributes = ctypes.create_string_buffer(struct.pack("=5I", 2, 4, 4, 1, 0), 128)
    return f"descriptor {call('bpf', 0, attributes, 128)}"


@probe("kernel_io_uring")
def kernel_io_uring() -> str:
    """Requests of a ring pass no filter."""
    return f"descriptor {call('io_uring_setup', 1, ctypes.create_string_buffer(120))}"


@probe("kernel_userfaultfd")
def kernel_userfaultfd() -> str:
    return f"descriptor {call('userfaultfd', 0)}"


@probe("kernel_perf_event")
def kernel_perf_event() -> str:
    attributes = ctypes.create_string_buffer(struct.pack("=II", 1, 112), 112)
    return f"descriptor {call('perf_event_open', attributes, 0, -1, -1, 0)}"


@probe("kernel_fanotify")
def kernel_fanotify() -> str:
    return f"descriptor {call('fanotify_init', FAN_CLASS_NOTIF, os.O_RDONLY)}"


@probe("kernel_swap_on")
def kernel_swap_on() -> str:
    call("swapon", b"/workspace/main.py", 0)
    return "swaps to a file"


@probe("kernel_swap_off")
def kernel_swap_off() -> str:
    call("swapoff", b"/workspace/main.py")
    return "swaps no more"


@probe("kernel_accounting")
def kernel_accounting() -> str:
    call("acct", None)
    return "switched process accounting off"


@probe("kernel_quota")
def kernel_quota() -> str:
    call("quotactl", 0x80000100, b"/", 0, None)
    return "synchronised quotas"


@probe("kernel_hangup")
def kernel_hangup() -> str:
    call("vhangup")
    return "hung up the terminal"


@probe("kernel_profile_cookie")
def kernel_profile_cookie() -> str:
    call("lookup_dcookie", 0, ctypes.create_string_buffer(64), 64)
    return "resolved a cookie"


@probe("ports_ioperm")
def ports_ioperm() -> str:
    call("ioperm", 0x80, 1, 1)
    return "may write to port 0x80"


@probe("ports_iopl")
def ports_iopl() -> str:
    call("iopl", 3)
    return "may write to all ports"


@probe("keyring_add")
def keyring_add() -> str:
    return f"key {call('add_key', b'user', b'hostile', b'x', 1, KEY_SPEC_SESSION_KEYRING)}"


@probe("keyring_request")
def keyring_request() -> str:
    return f"key {call('request_key', b'user', b'hostile', None, KEY_SPEC_SESSION_KEYRING)}"


@probe("keyring_join")
def keyring_join() -> str:
    return f"keyring {call('keyctl', KEYCTL_JOIN_SESSION_KEYRING, None, 0, 0, 0)}"


@probe("memory_secret")
def memory_secret() -> str:
    return f"descriptor {call('memfd_secret', 0)}"
