"""Check the manifests that trusted-local accepts, its refusals with their fix, and its list of advisory limits."""

from __future__ import annotations

import pytest

from policy import data, errors
from policy.compile import seccomp, trusted_local
from policy.manifest import parse
from policy.manifest.agent import Manifest

AGENT = '[agent]\nid = "a"\nname = "a"\nversion = "1"\nruntime = "python3"\nentry = "main.py"\n'
OFF = '[resources]\nnetwork = "off"\n'


def manifest(rest: str = OFF, agent: str = AGENT) -> Manifest:
    return parse.parse((agent + rest).encode())


def compiled(rest: str = OFF, *, agent: str = AGENT, signed: bool = True) -> trusted_local.LocalPolicy:
    return trusted_local.compile(manifest(rest, agent), arch="x86_64", signed=signed)


def families(policy: trusted_local.LocalPolicy, call: str = "socket") -> set[int]:
    """Return the address families that the filter does not refuse completely."""
    checks = [rule.check for rule in policy.filter.rules if rule.name == call and rule.also is None]
    family = [check for check in checks if check and check.argument == 0]
    refused = {check.value for check in family if check.operator == "=="}
    above = min(check.value for check in family if check.operator == ">=")
    return {number for number in range(above) if number not in refused}


def test_network_off_denies_families_and_takes_network_away() -> None:
    policy = compiled()
    assert (policy.own_network, policy.hide_run, families(policy)) == (True, True, {1})


def test_network_full_leaves_it_and_says_what_that_reaches() -> None:
    policy = compiled('[resources]\nnetwork = "full"\n')
    assert (policy.own_network, policy.hide_run, families(policy)) == (False, False, {1, 2, 10})
    assert families(policy, "socketpair") == {1}
    assert any("private and loopback" in item for item in policy.not_enforced)
    assert any("those of /run included" in item for item in policy.not_enforced)
    assert not any("those of /run included" in item for item in compiled().not_enforced)


def test_absent_network_runs_unsigned_only_and_is_named() -> None:
    policy = compiled("", signed=False)
    assert not policy.own_network
    assert families(policy) == {1, 2, 10}
    assert policy.not_enforced[0] == "resources.network: not written, so the whole network can be reached"
    with pytest.raises(errors.BackendError, match="written as `off` or `full`"):
        compiled("", signed=True)


@pytest.mark.parametrize("signed", [True, False])
def test_explicit_https_only_network_is_refused(signed: bool) -> None:
    with pytest.raises(errors.BackendError, match="cannot hold network `outbound-https-only`") as caught:
        compiled('[resources]\nnetwork = "outbound-https-only"\n', signed=signed)
    assert 'backend = "linux-gvisor"' in caught.value.hint
    assert caught.value.where == "agent.toml:8"


GVISOR = '[sandbox]\nbackend = "linux-gvisor"\n'
REFUSED = {
    "sandbox.required": f"{OFF}{GVISOR}required = true\n",
    "sandbox.backend": OFF + GVISOR,
    "permissions.filesystem": OFF + '[permissions.filesystem]\nread = ["/usr/share/doc"]\n',
    "an empty table": OFF + "[permissions.executables]\nallow = []\n",
    "permissions.credentials": OFF + '[permissions.credentials]\ngrants = ["a"]\n',
    "permissions.skills": OFF + "[permissions.skills]\nallow = []\n",
    "permissions.network": '[resources]\nnetwork = "full"\n'
    '[[permissions.network]]\nhost = "example.org"\nports = [443]\nprotocol = "tls"\n',
    "cpu_millis": OFF + "cpu_millis = 500\n",
    "cpu_weight": OFF + "cpu_weight = 50\n",
    "cpu_time_ms": OFF + "cpu_time_ms = 500\n",
    "swap_mb": OFF + "swap_mb = 0\n",
    "io_read_bps": OFF + "io_read_bps = 5000\n",
    "io_write_bps": OFF + "io_write_bps = 5000\n",
    "io_read_iops": OFF + "io_read_iops = 50\n",
    "io_write_iops": OFF + "io_write_iops = 50\n",
    "net_bps": '[resources]\nnetwork = "full"\nnet_bps = 5000\n',
    "spawn": OFF + "[spawn]\nallowed = true\nmax_depth = 1\nmax_descendants = 1\n",
    "unlimited": OFF + "[lifetime]\nunlimited = true\n",
    "suspend": OFF + '[lifetime]\nttl_seconds = 5\non_expiry = "suspend"\n',
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_hold_is_refused_with_mend_and_place(name: str) -> None:
    with pytest.raises(errors.BackendError) as caught:
        compiled(REFUSED[name])
    assert caught.value.code == "backend_refused"
    assert caught.value.hint == 'set [sandbox] backend = "linux-gvisor"'
    assert caught.value.where.startswith("agent.toml:")


def test_sandbox_required_fails_closed_first() -> None:
    with pytest.raises(errors.BackendError, match="is no sandbox"):
        compiled(REFUSED["sandbox.required"])


def test_role_is_refused_since_nothing_here_holds_it() -> None:
    with pytest.raises(errors.BackendError, match="role `observer`"):
        compiled(agent=AGENT + 'role = "observer"\n')


def test_hermes_is_refused() -> None:
    # Not `backend = "linux-gvisor"`: that refuses it as well.
    with pytest.raises(errors.NotYetEnforceableError, match="hermes"):
        compiled(agent=AGENT.replace("python3", "hermes"))


def test_limits_come_from_manifest_or_its_defaults() -> None:
    policy = compiled(f"{OFF}memory_mb = 64\ndisk_mb = 3\npids_max = 9\n[sandbox]\nfilesystem = 'ephemeral'\n")
    mib = 1024 * 1024
    assert (policy.memory_bytes, policy.file_bytes, policy.scratch_bytes) == (64 * mib, 3 * mib, 3 * mib)
    assert policy.processes == 9
    default = compiled()
    assert (default.memory_bytes, default.file_bytes, default.processes) == (512 * mib, 100 * mib, 64)
    assert default.scratch_bytes == 0  # read-only-package has no writable directory


def test_filter_bounds_arguments_on_hosts_kernel() -> None:
    checks: dict[str, list[seccomp.ArgumentCheck | None]] = {}
    for rule in compiled().filter.rules:
        checks.setdefault(rule.name, []).append(rule.check)
    assert {check.value for check in checks["ioctl"] if check} == {0x5412, 0x541C, 0x5423}
    assert {check.mask for check in checks["ioctl"] if check} == {0xFFFFFFFF}
    for allowed in (0, 0xFFFFFFFF):
        assert not any(check is None or allowed & check.mask == check.value for check in checks["personality"])
    for refused in (0x0040000, 0x0400000, 1, 0x80000000, 0xFFFFFFFE):
        assert any(check and refused & check.mask == check.value for check in checks["personality"])


def test_filter_holds_whole_deny_list_and_manifests_own() -> None:
    names = {rule.name for rule in compiled().filter.rules} | set(compiled().filter.absent)
    assert set(data.deny().reasons) <= names
    assert "symlink" not in names
    own = compiled(OFF + '[permissions.syscalls]\ndeny = ["symlink"]\n')
    assert {r.name for r in own.filter.rules if r.check is None} >= {"symlink", "mount", "bpf", "ptrace"}


def test_permanent_deny_list_cannot_be_allowed() -> None:
    with pytest.raises(errors.DenyListViolation) as caught:
        compiled(OFF + '[permissions.syscalls]\nallow = ["mount"]\n')
    assert (caught.value.grant, caught.value.rule, caught.value.where) == ("mount", 7, "agent.toml:10")


@pytest.mark.parametrize("key", ["allow", "deny"])
def test_call_that_does_not_exist_is_refused(key: str) -> None:
    with pytest.raises(errors.ManifestError, match="unknown system call `opne`"):
        compiled(OFF + f'[permissions.syscalls]\n{key} = ["opne"]\n')


@pytest.mark.parametrize("name", ["execve", "exit_group"])
def test_what_starting_needs_cannot_be_denied(name: str) -> None:
    with pytest.raises(errors.BackendError, match=f"without `{name}`"):
        compiled(OFF + f'[permissions.syscalls]\ndeny = ["{name}"]\n')


def test_what_stays_advisory_is_named() -> None:
    said = "\n".join(compiled().not_enforced)
    for word in (
        "filesystem",
        "executables",
        "memory_mb",
        "disk_mb",
        "pids_max",
        "cpu_millis",
        "cpu_weight",
        "swap_mb",
    ):
        assert word in said
    assert "allow set" not in said
    said = "\n".join(compiled(OFF + '[permissions.syscalls]\nallow = ["symlink"]\n').not_enforced)
    assert "only the permanent deny list" in said
    said = "\n".join(compiled(OFF + "[settlement]\nbudget_credits_per_hour = 5\n").not_enforced)
    assert "budget_credits_per_hour" in said


def test_same_manifest_compiles_to_same_policy() -> None:
    assert compiled() == compiled()


@pytest.mark.parametrize("name", ["msgget", "semget", "shmget"])
def test_memory_that_no_limit_of_process_bounds_is_denied_and_refused_when_demanded(name: str) -> None:
    assert name in {rule.name for rule in compiled().filter.rules if rule.check is None}
    with pytest.raises(errors.BackendError, match=name):
        compiled(OFF + f'[permissions.syscalls]\nallow = ["{name}"]\n')
