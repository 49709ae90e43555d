"""Check pairs of policies that differ in one part: artefacts are proved only for the policy they come from."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy import errors, prove
from tests import proof_kit
from tests.proof_kit import Case
from tests.unit.policy.compile import sample

# Alternatives for each part of a manifest; some last ones differ from another in one place only.
FILESYSTEM = ("read-only-package", "ephemeral", "host")
READ = ("", '["/opt/a"]', '["/opt/a", "/usr/share/doc"]')
WRITE = ("", '["/srv/data"]', '["/opt/b"]')
CALLS = ("", 'allow = ["sync"]', 'deny = ["chmod"]', 'allow = ["personality"]')
PROGRAMS = ("", '["/usr/bin/cat"]', f'["/usr/bin/grep@sha256:{proof_kit.PIN}"]', '["/usr/bin/grep"]')
NAMED = ("", '["db"]', '["db", "mail"]')
LIFE = ("", "ttl_seconds = 60", "ttl_seconds = 61", "unlimited = true")
SPAWN = ("", "max_depth = 1\nmax_descendants = 1", "max_depth = 1\nmax_descendants = 2")
LIMITS = (
    "",
    "memory_mb = 513",
    "pids_max = 65",
    "cpu_weight = 101",
    "cpu_millis = 1001",
    "swap_mb = 1",
    "disk_mb = 101",
)
RATES = (
    "",
    "net_bps = 4096",
    "io_read_bps = 4096",
    "io_write_bps = 4096",
    "cpu_ms_per_task = 30001",
    "cpu_time_ms = 9",
)
NETWORK = (
    ("off",),
    ("outbound-https-only",),
    ("full",),
    ("full", ("example.com", "[443]", "tls")),
    ("full", ("example.com", "[443]", "tcp")),
    ("full", ("*.example.com", "[443]", "tls")),
    ("full", ("example.com", "[443, 444]", "tls")),
    ("full", ("example.com", "[443]", "tls"), ("10.0.0.1", "[443]", "tls")),
    ("full", ("example.com", "[443]", "tls"), ("10.0.0.2", "[443]", "tls")),
    ("full", ("example.com", "[443]", "tls"), ("10.0.0.0/31", "[443]", "tls")),
)
PARTS = (FILESYSTEM, READ, WRITE, CALLS, PROGRAMS, NAMED, LIFE, SPAWN, LIMITS, RATES, NETWORK)
Choice = tuple[int, ...]


@functools.lru_cache(maxsize=256)
def compiled(choice: Choice) -> Case:
    mode, read, write, calls, programs, named, life, spawn, limits, rates, network = (
        part[at] for part, at in zip(PARTS, choice, strict=True)
    )
    assert isinstance(mode, str)
    files = [f"{key} = {value}" for key, value in (("read", read), ("write", write if mode == "host" else "")) if value]
    sections = {
        "permissions.filesystem": "\n".join(files),
        "permissions.syscalls": calls,
        "permissions.executables": programs and f"allow = {programs}",
        "permissions.credentials": named and f"grants = {named}",
        "lifetime": life,
        "spawn": spawn and f"allowed = true\n{spawn}",
    }
    more = "".join(f"[{name}]\n{body}\n" for name, body in sections.items() if body)
    return proof_kit.case(
        sample.manifest(
            filesystem=mode,
            network=network[0],
            resources=f"{limits}\n{rates}\n",
            more=more + sample.entries(*network[1:]),
        )
    )


CHOICES = st.tuples(*(st.integers(0, len(part) - 1) for part in PARTS))


@settings(max_examples=60, deadline=None)
@given(CHOICES)
def test_whatever_is_compiled_is_proved(choice: Choice) -> None:
    compiled(choice).prove()


@settings(max_examples=120, deadline=None)
@given(CHOICES, st.integers(0, len(PARTS) - 1), st.integers(0, 9))
def test_artefacts_of_neighbour_are_not(choice: Choice, part: int, other: int) -> None:
    """Replace one part of the manifest: the proof fails exactly when this changes the grants."""
    changed = (*choice[:part], other % len(PARTS[part]), *choice[part + 1 :])
    mine, theirs = compiled(choice), compiled(changed)
    if mine.effective == theirs.effective:
        prove.prove(mine.effective, theirs.artefacts)
        return
    with pytest.raises(errors.ProofError):
        prove.prove(mine.effective, theirs.artefacts)
