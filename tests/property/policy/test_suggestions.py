"""The lines that a denial names fit the manifest, take nothing away, and end the denial."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy import data, denials
from policy.denials import Denial
from policy.grants.effective import Effective
from policy.host import GrantedPath, HostFacts
from policy.manifest.agent import Manifest
from policy.package import Package
from policy.rules import nine, unsigned
from policy.why import amend, denied, sight
from policy.why.ask import Sight
from tests.unit.policy.compile import sample

ENTRY = sample.entries(("api.example.com", "[443]", "tls"))
PROGRAMS = '[permissions.executables]\nallow = ["/usr/bin/cat"]\n'
LISTS = '[permissions.syscalls]\nallow = ["getcpu"]\ndeny = ["sync"]\n[permissions.filesystem]\nread = ["/opt/a"]\n'
LIFETIME = "[lifetime]\nttl_seconds = 60\n"
MANIFESTS = (
    sample.manifest(),
    sample.manifest(filesystem="read-only-package", more=LIFETIME),
    sample.manifest(more=PROGRAMS + LISTS, resources="cpu_time_ms = 900"),
    sample.manifest(network="outbound-https-only", more=ENTRY),
    sample.manifest(network="full", more=LISTS + ENTRY),
    sample.manifest(network="full", more=PROGRAMS),
)
PATHS = ("/srv/data", "/srv/data/x", "/opt/b", "/opt/a/x", "/etc/shadow", "/home/x", "/root/.ssh")
TARGETS = {
    "dns": ("www.example.org", "WWW.Example.org.", "localhost", "a"),
    "sni": ("www.example.org:443/tls", "www.example.org:8443/tls", "[2606:4700::1]:443/tls", "203.0.113.9:443/tls"),
    "packet": ("203.0.113.5:81/tcp", "203.0.113.5:443/tcp", "[2606:4700::1]:443/udp", "10.0.0.1:5432/tcp", "10.0.0.1"),
    "syscall": ("getcpu", "sync", "socket", "connect", "vfork", "ptrace", "timerfd_create", "no_such_call"),
    "path": (*PATHS, "/dev/shm"),
    "exec": ("execve", "/usr/bin/grep", "/usr/bin/cat", "/workspace/x"),
    "memory": ("memory_mb",),
    "pids": ("pids_max",),
    "disk": ("disk_mb",),
    "time": ("cpu_ms_per_task", "cpu_time_ms", "ttl_seconds", "timeout", "parent", "expires_at"),
    "credential": ("mail", "db-1"),
    "model": ("test-1", "claude-9", "GET /v1/models"),
    "inject": ("GET https://www.example.org/user: x", "POST https://nowhere.example/: x", "x"),
    "spawn": ("worker", "no_such_agent"),
    "ssh": ("ssh-ed25519 AAAA", "SHA256:x at git.example.org", "lock"),
    "tool": ("matrix://tool/mcp/fs/read@1.0.0", "matrix://tool/mcp/fs/read@1.0.0 path"),
}
CEILINGS = ("answer_bytes", "argument_bytes", "call_ms", "calls", "calls_per_minute")
CODES = sorted(denied.MEANINGS)
DENIALS = st.sampled_from(CODES).flatmap(
    lambda one: st.sampled_from(TARGETS[one[0]]).map(lambda target: Denial(one[0], target, one[1]))
)


def host() -> HostFacts:
    granted = {path: GrantedPath(path, "dir", 1) for path in (*PATHS, "/usr/share/doc", "/opt/a")}
    return sample.host(granted=granted)


@cache
def seen(manifest: Manifest) -> Sight:
    return sight.of(sample.compiled(manifest, host()), manifest, files=("main.py",), host=host(), never={})


def requested(manifest: Manifest) -> Effective:
    return nine.requested(manifest, roles=data.roles())


def _can_be_appended(manifest: Manifest, lines: Sequence[str]) -> bool:
    """Whether the text of the manifest with the lines at its end is TOML."""
    try:
        tomllib.loads("\n".join((manifest.source.text, *lines)))
    except tomllib.TOMLDecodeError:
        return False
    return True


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MANIFESTS), DENIALS)
def test_lines_end_denial_and_take_nothing(manifest: Manifest, denial: Denial) -> None:
    before = seen(manifest)
    found = denied.explain(denial, before)
    if not found.add:
        return
    assert found.answer is not None
    assert (found.answer.there == ()) == _can_be_appended(manifest, found.add)
    after = amend.amended(manifest, found.add)
    assert unsigned.check(Package({"agent.toml": b"", "main.py": b""}, None), after, host()) == requested(after)
    again = denied.explain(denial, seen(after))
    assert again.answer is not None
    if denial.layer in ("memory", "pids", "disk", "time") or denial.code in CEILINGS:  # twice as much, each time
        assert again.answer.question != found.answer.question
    else:
        assert (again.add, again.answer.allowed) == ((), True), found.add
    if denied._is_open(before) and "network" in found.add[0]:
        assert "takes the place" in found.note
        return
    assert requested(manifest).is_subset(requested(after)), found.add
    if denial.code != denials.READ_ONLY or denial.target == "/dev/shm":
        assert (seen(after).found.seen.scratch_mb or 0) >= (before.found.seen.scratch_mb or 0)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MANIFESTS), DENIALS)
def test_denial_without_lines_says_why(manifest: Manifest, denial: Denial) -> None:
    found = denied.explain(denial, seen(manifest))
    if not found.add:
        assert found.note or (found.answer is not None and (found.answer.never or found.answer.allowed)), found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MANIFESTS), DENIALS, st.sampled_from(sorted(data.roles().by_name)))
def test_role_is_judged_as_rule_3_does(manifest: Manifest, denial: Denial, role: str) -> None:
    """A role that has the manifest allows the lines exactly when the run with them is not refused."""
    manifest = amend.amended(manifest, ["[agent]", f'role = "{role}"'])
    ceiling = data.roles().ceiling(role)
    if not requested(manifest).is_subset(ceiling):
        return
    found = denied.explain(denial, seen(manifest))
    if found.add and found.answer is not None:
        after = amend.amended(manifest, found.add)
        assert found.answer.bounds == {f"role `{role}`": requested(after).is_subset(ceiling)}, found.add
