"""``covenant policy why``, ``diff``, ``prove`` and ``explain --parent`` as an operator calls them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.test_command_line import GOOD, NOBODY, call, document, plain
from tests.kernel.world import World

__all__ = ["plain"]  # a fixture

NETWORK = """
[permissions.filesystem]
read = ["/usr/share/doc"]
[[permissions.network]]
host = "*.example.org"
ports = [443]
protocol = "tls"
[[permissions.network]]
host = "10.1.0.0/16"
ports = [5432, "8000-8010"]
protocol = "tcp"
[permissions.credentials]
grants = ["key"]
[permissions.syscalls]
allow = ["getcpu"]
"""


@pytest.fixture
def granted(world: World) -> Path:
    """A package with grants in most domains, which nothing can run yet."""
    return world.package(GOOD, name="granted", id="granted", network="full", more=NETWORK)


ASKED: list[tuple[str, bool]] = [
    ("--connect a.example.org:443", True),
    ("--connect A.Example.ORG:443", True),
    ("--connect example.org:443", False),
    ("--connect a.example.org:80", False),
    ("--connect a.example.org:443 --protocol tcp", False),
    ("--connect 10.1.255.255:5432", True),
    ("--connect 10.2.0.0:5432", False),
    ("--connect 10.1.0.1:8010", True),
    ("--connect 10.1.0.1:8011", False),
    ("--connect 10.1.0.1:5432 --protocol udp", False),
    ("--connect [::ffff:10.1.0.1]:5432", True),
    ("--connect [2001:db8::1]:443", False),
    ("--open /usr/share/doc/x", True),
    ("--open /usr/share/doc --write", False),
    ("--open /usr/share", True),  # a directory of the root on the way to a grant
    ("--open /usr/share/man", False),
    ("--open /workspace/main.py", True),
    ("--syscall getcpu", True),
    ("--syscall socket", True),
    ("--syscall ptrace", False),
    ("--exec /usr/bin/true", False),
    ("--credential key", True),
    ("--credential keys", False),
]


def test_each_question_is_answered_and_no_is_status_three(world: World, granted: Path) -> None:
    wrong = []
    for line, allowed in ASKED:
        done = call(world.home, "policy", "why", granted, *line.split(), "--json")
        answer = document(done)
        if (answer["allowed"], done.returncode) != (allowed, 0 if allowed else 3):
            wrong.append((line, answer))
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("", "usage"),
        ("--write", "usage"),
        ("--protocol tls", "usage"),
        ("--open /a --syscall read", "usage"),
        ("--connect nowhere", "usage"),
        ("--connect 2001:db8::1:443", "usage"),
        ("--connect a.org:0", "usage"),
        ("--connect a.org:99999", "usage"),
        ("--connect *.a.org:1", "usage"),
        ("--open a/../b", "usage"),
        ("--open /usr/share/doc/../man", "usage"),
        ("--open /usr/share/doc/", "usage"),
        ("--syscall opneat", "unknown_syscall"),
    ],
)
def test_question_none_is_refused(world: World, granted: Path, line: str, code: str) -> None:
    assert document(call(world.home, "policy", "why", granted, *line.split(), "--json"))["code"] == code


def test_answer_names_its_line_its_mend_and_who_is_above(world: World, granted: Path) -> None:
    small = world.package(GOOD, name="small", id="small", network="off")
    yes = call(world.home, "policy", "why", granted, "--open", "/usr/share/doc/x").stdout.decode()
    assert re.search(r"allowed, /usr/share/doc is mounted read-only  <- agent.toml:\d+", yes)
    no = call(world.home, "policy", "why", small, "--connect", "a.example.org:443", "--parent", granted).stdout.decode()
    assert 'network = "outbound-https-only"' in no
    assert "parent `granted` allows it" in no
    other = call(world.home, "policy", "why", small, "--connect", "example.org:443", "--parent", granted)
    assert "parent `granted` does not allow it" in other.stdout.decode()
    never = call(world.home, "policy", "why", small, "--open", "/etc/shadow").stdout.decode()
    assert "never grantable: " in never
    assert "to grant it" not in never
    home = call(world.home, "policy", "why", small, "--open", world.home / "keys").stdout.decode()
    assert "never grantable: " in home


def test_what_run_refuses_is_note_and_not_error(world: World, granted: Path) -> None:
    done = call(world.home, "policy", "compile", granted, "--out", world.base / "out")
    assert done.returncode == 0, done.stderr
    assert b"note: run refuses this: network `full`" in done.stderr
    codes = {one["code"] for one in document(call(world.home, "policy", "prove", granted, "--json"))["refusals"]}
    assert codes == {"not_enforceable"}


def test_change_is_told_by_risk_and_widening_is_status_three(world: World, granted: Path) -> None:
    small = world.package(GOOD, name="small", id="small", network="off")
    wider = call(world.home, "policy", "diff", small, granted)
    assert wider.returncode == 3
    first, *_ = wider.stdout.decode().splitlines()
    assert re.fullmatch(
        r"\+\d+ argument rules?, \+\d+ syscalls, \+1 name, \+1 address, \+1 credential, \+1 readable path", first
    ) or re.fullmatch(r"\+\d+ syscalls, \+1 address, \+1 name, \+1 credential, \+1 readable path", first), first
    narrower = document(call(world.home, "policy", "diff", granted, small, "--json"))
    assert (narrower["widens"], [row["added"] for row in narrower["rows"] if row["added"]]) == (False, [])
    same = call(world.home, "policy", "diff", granted, granted)
    assert (same.returncode, same.stdout) == (0, b"no difference\nit widens nothing\n")


def test_package_is_compared_with_what_was_compiled_of_it(world: World, granted: Path) -> None:
    out = world.base / "out"
    assert call(world.home, "policy", "compile", granted, "--out", out).returncode == 0
    assert call(world.home, "policy", "diff", out, granted).returncode == 0
    assert call(world.home, "policy", "prove", out).returncode == 0


def _json(path: Path, change: Any) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n")


FAULTS: dict[str, Any] = {
    "a port more": lambda out: (out / "firewall.nft").write_text(
        (out / "firewall.nft").read_text().replace("8000-8010", "8000-8011")
    ),
    "a writable mount": lambda out: _json(
        out / "mounts.json", lambda d: next(m for m in d["mounts"] if m["source"][0] == "/")["options"].remove("ro")
    ),
    "no new privileges": lambda out: _json(
        out / "config.json", lambda d: d["process"].update(noNewPrivileges=False)
    ),
    "another grant said": lambda out: _json(
        out / "effective.json", lambda d: d["grants"]["credentials"]["grants"].append("more")
    ),
    "another digest": lambda out: (out / "digest").write_text("0" * 64 + "\n"),
    "a file gone": lambda out: (out / "seccomp.bpf").unlink(),
    "a filter byte": lambda out: (out / "seccomp.bpf").write_bytes(
        b"\x06" + (out / "seccomp.bpf").read_bytes()[1:]
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_directory_that_was_changed_is_not_proved(world: World, granted: Path, fault: str) -> None:
    out = world.base / "out"
    assert call(world.home, "policy", "compile", granted, "--out", out).returncode == 0
    FAULTS[fault](out)
    done = call(world.home, "policy", "prove", out, "--json")
    assert (done.returncode, document(done)["kind"]) == (3, "policy_not_proved"), done.stdout


def test_child_is_proved_to_lie_within_its_parent(world: World, granted: Path) -> None:
    child = world.package(
        GOOD,
        name="child",
        id="child",
        more='[permissions.filesystem]\nread = ["/usr/share"]\n',
        resources="pids_max = 99",
    )
    above = document(call(world.home, "policy", "prove", granted, "--json"))
    done = call(world.home, "policy", "prove", child, "--parent", granted, "--json")
    assert (done.returncode, document(done)["within"]) == (0, above["policy_digest"])
    assert document(done)["domains"]["filesystem"]["grants"] == ["mode ephemeral", "read /usr/share/doc"]
    # What was compiled on its own asks for more than it would get.
    out = world.base / "out"
    small = world.package(GOOD, name="child", id="child", resources="pids_max = 99")
    assert call(world.home, "policy", "compile", small, "--out", out).returncode == 0
    done = call(world.home, "policy", "prove", out, "--parent", granted, "--json")
    assert done.returncode == 3
    assert "allow more than its parent's in resources" in document(done)["message"]


def test_child_is_explained_under_its_parents_ceiling(world: World, granted: Path) -> None:
    child = world.package(
        GOOD,
        name="child",
        id="child",
        more='[permissions.filesystem]\nread = ["/usr/share"]\n',
        resources="pids_max = 99",
    )
    rows = document(call(world.home, "policy", "explain", child, "--parent", granted, "--json"))["rules"]
    narrowed = {f"{row['artefact']}:{row['rule']}": (row["key"], row["parent"]) for row in rows if row["parent"]}
    assert narrowed["mounts.json:/usr/share/doc"] == ("permissions.filesystem.read[0]", "asked for /usr/share")
    assert narrowed["config.json:process/rlimits/RLIMIT_NPROC"] == ("resources.pids_max", "asked for 99")
    assert (
        b"[narrowed by the parent: asked for 99]"
        in call(world.home, "policy", "explain", child, "--parent", granted).stdout
    )
    # On its own the wide path would cover files of the runtime, so it is asked about without it.
    small = world.package(GOOD, name="child", id="child", resources="pids_max = 99")
    alone = document(call(world.home, "policy", "explain", small, "--json"))["rules"]
    assert {row["parent"] for row in alone} == {""}


def test_questions_need_no_root(world: World, plain: tuple[Path, Path]) -> None:
    home, package = plain
    for verb in (("why", package, "--syscall", "read"), ("prove", package), ("diff", package, package)):
        done = call(home, "policy", *verb, uid=NOBODY)
        assert done.returncode == 0, (verb, done.stderr)
