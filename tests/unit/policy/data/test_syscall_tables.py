"""The number tables, the deny list and the profiles: against libseccomp, and against each other."""

from __future__ import annotations

import pyseccomp
import pytest

from policy import data, errors

ARCHES = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}
# libseccomp 2.5.4 ends with Linux 5.17: what came later has to come from the kernel alone.
LAST_KNOWN = 449
# Names of 32-bit kernels, denied so that a manifest with them is refused for the right reason.
FOREIGN = {"stime", "umount", "clock_settime64", "clock_adjtime64"}
# The calls of x86_64 that Docker's default profile (moby, profiles/seccomp/default.json) refuses to a process without
# capabilities: those that it does not name, and those that it names for a capability alone.
REFUSED_BY_DOCKER = frozenset({
    "_sysctl", "acct", "add_key", "afs_syscall", "bpf", "cachestat", "chroot", "clock_settime", "clone3",
    "create_module", "delete_module", "fanotify_init", "fchmodat2", "file_getattr", "file_setattr", "finit_module",
    "fsconfig", "fsmount", "fsopen", "fspick", "futex_requeue", "futex_wait", "futex_wake", "get_kernel_syms",
    "get_mempolicy", "getpmsg", "getxattrat", "init_module", "ioperm", "iopl", "kcmp", "kexec_file_load",
    "kexec_load", "keyctl", "listmount", "listns", "listxattrat", "lookup_dcookie", "lsm_get_self_attr",
    "lsm_list_modules", "lsm_set_self_attr", "map_shadow_stack", "mbind", "migrate_pages", "mount", "mount_setattr",
    "move_mount", "move_pages", "mseal", "nfsservctl", "open_by_handle_at", "open_tree", "open_tree_attr",
    "perf_event_open", "pidfd_getfd", "pivot_root", "process_madvise", "putpmsg", "query_module", "quotactl",
    "quotactl_fd", "reboot", "removexattrat", "request_key", "security", "set_mempolicy", "set_mempolicy_home_node",
    "setdomainname", "sethostname", "setns", "settimeofday", "setxattrat", "statmount", "swapoff", "swapon",
    "sysfs", "syslog", "tuxcall", "umount2", "unshare", "uprobe", "uretprobe", "uselib", "userfaultfd", "ustat",
    "vhangup", "vserver",
})  # fmt: skip


@pytest.mark.parametrize("arch", ARCHES)
def test_every_number_is_libseccomps(arch: str) -> None:
    for name, number in data.syscalls(arch).numbers.items():
        resolved = pyseccomp.resolve_syscall(ARCHES[arch], name)
        if resolved != -1:
            assert resolved == number, name
        else:
            assert number > LAST_KNOWN or number in (335, 336), name


@pytest.mark.parametrize("arch", ARCHES)
def test_no_call_of_libseccomp_is_missing(arch: str) -> None:
    ours = {number: name for name, number in data.syscalls(arch).numbers.items()}
    assert len(ours) == len(data.syscalls(arch).numbers), "two names with one number"
    for number in range(LAST_KNOWN + 1):
        try:
            theirs = pyseccomp.resolve_syscall(ARCHES[arch], number)
        except ValueError:
            assert number not in ours or number in (335, 336)
            continue
        assert ours.get(number) == theirs.decode(), number


def test_what_came_after_linux_5_3_has_one_number_everywhere() -> None:
    x86, arm = data.syscalls("x86_64").numbers, data.syscalls("aarch64").numbers
    assert {n: v for n, v in x86.items() if v >= 424} == {n: v for n, v in arm.items() if v >= 424}
    assert x86["listns"] == 470


def test_every_denied_name_is_call() -> None:
    unknown = data.deny().names - data.syscall_names()
    assert unknown == FOREIGN
    for name in FOREIGN:
        # A pseudo number: some architecture has it. -1 would be a misspelling.
        assert pyseccomp.resolve_syscall(pyseccomp.Arch.X86_64, name) < -1, name


@pytest.mark.parametrize(
    "family",
    [
        {"init_module", "finit_module", "delete_module"},
        {"kexec_load", "kexec_file_load", "reboot"},
        {"ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"},
        {"bpf", "perf_event_open", "userfaultfd"},
        {"io_uring_setup", "io_uring_enter", "io_uring_register"},
        {"mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "fsopen"},
        {"fsconfig", "fsmount", "fspick", "mount_setattr"},
        {"unshare", "setns", "clone3"},
        {"add_key", "request_key", "keyctl"},
        {"settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "stime"},
        {"swapon", "swapoff", "iopl", "ioperm"},
        {"memfd_create", "execveat"},
    ],
    ids=min,
)
def test_families_of_issue_are_denied(family: set[str]) -> None:
    assert family <= data.deny().names


@pytest.mark.parametrize("name", ["python3", "node", "static"])
def test_profile_holds_nothing_denied_and_nothing_that_another_grant_brings(name: str) -> None:
    names = data.profile(name).names
    assert names
    assert names <= data.syscall_names()
    assert not names & data.deny().names
    assert not names & {"execve", "execveat", "memfd_create", "socket", "connect", "bind", "listen", "accept4"}


@pytest.mark.parametrize("name", ["command", "python3", "node", "static"])
def test_profile_is_below_dockers_default(name: str) -> None:
    table = set(data.syscalls("x86_64").numbers)
    assert table >= REFUSED_BY_DOCKER
    granted = data.profile(name).names | data.addition("network").names | data.addition("executables").names
    assert granted & REFUSED_BY_DOCKER == set()
    # Docker allows these, and no profile of ours does.
    assert not granted & {"memfd_create", "io_uring_setup", "ptrace", "name_to_handle_at", "process_vm_readv"}


def test_static_profile_is_common_floor() -> None:
    assert data.profile("static").names <= data.profile("python3").names & data.profile("node").names


@pytest.mark.parametrize("name", ["network", "executables"])
def test_addition_holds_nothing_denied(name: str) -> None:
    names = data.addition(name).names
    assert names <= data.syscall_names()
    assert not names & data.deny().names


def test_there_is_no_other_addition() -> None:
    with pytest.raises(KeyError):
        data.addition("../deny")


@pytest.mark.parametrize("source", [*data.profiles().values(), *data.additions().values()], ids=lambda p: p.name)
def test_each_call_has_reason_and_was_traced_or_is_kept_for_one(source: data.Profile) -> None:
    assert source.version >= (1 if source.name == "command" else 2)
    assert set(source.reasons) == source.names
    assert source.kept < source.names
    assert {"read", "write", "futex", "mmap"} <= source.names - source.kept or source.name in data.additions()


def test_call_in_both_tables_is_damaged_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"version": 1, "calls": {"read": "input"}, "kept": {"read": "input"}}
    monkeypatch.setattr(data, "load", lambda path, keys: tables)
    with pytest.raises(errors.InstallationError, match="`read` stands in both tables"):
        data._profile("profiles/x.toml", "x")
