"""The artefacts of a policy, byte for byte: they show a change of any compiler, and an influence of the machine.

Regenerate with `.venv/bin/python -m tests.golden.test_policy`, and let git show what changed.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from policy import data
from policy.compile.artefacts import NAMES, Artefacts
from policy.manifest import parse
from policy.rules import nine
from tests.unit.policy.compile import sample

HERE = pathlib.Path(__file__).resolve().parent / "policy"
ROOT = HERE.parents[2]
GRANTS = """
[permissions.filesystem]
read = ["/usr/share/doc", "/opt/a", "/srv/data"]
[permissions.syscalls]
allow = ["getcpu", "sync"]
deny = ["chmod"]
[permissions.executables]
allow = ["/usr/bin/grep", "/usr/bin/cat"]
[lifetime]
ttl_seconds = 60
"""
RESOURCES = """
memory_mb = 100
disk_mb = 7
pids_max = 9
cpu_millis = 250
cpu_weight = 50
swap_mb = 8
"""


NETWORK = sample.entries(
    ("api.example.com", "[443]", "tls"), ("*.example.org", '[80, "8000-8010"]', "tcp"), ("10.0.0.0/8", "[5432]", "tcp"),
    ("192.0.2.7", "[5432]", "tcp"), ("2001:db8::/32", "[53]", "udp"), ("203.0.113.9", "[443]", "tls"),
)  # fmt: skip
# What the supervisor, the vault and cgroup version 2 hold.
REST = """
[permissions.credentials]
grants = ["mail", "db"]
[permissions.skills]
allow = ["matrix://tool/mcp/fs/read@1.0"]
side_effects = ["read"]
[spawn]
allowed = true
max_depth = 2
max_descendants = 5
on_parent_exit = "wind-down"
[lifetime]
ttl_seconds = 600
on_expiry = "suspend"
"""
IO = "io_read_bps = 1000000\nio_write_iops = 200\ncpu_time_ms = 5000\nnet_bps = 125000"


def _child() -> Artefacts:
    """A child of an agent that has less of most things."""
    above = sample.manifest(
        network="full",
        more=sample.entries(("*.example.org", "[80]", "tcp"), ("10.1.0.0/16", '["5000-6000"]', "tcp")),
        resources="memory_mb = 64\nnet_bps = 1000",
    )
    found = sample.manifest(network="full", more=REST + NETWORK, resources=IO)
    return sample.compiled(found, ceiling=nine.requested(above, roles=data.roles()).for_child(remaining_seconds=60))


def _agent(name: str) -> Artefacts:
    return sample.compiled(parse.parse((ROOT / "agents" / name / "agent.toml").read_bytes()))


CASES: dict[str, Callable[[], Artefacts]] = {
    "least": lambda: sample.compiled(sample.manifest(filesystem="read-only-package")),
    "much": lambda: sample.compiled(sample.manifest(more=GRANTS, resources=RESOURCES)),
    "aarch64": lambda: sample.compiled(sample.manifest(), sample.host(arch="aarch64")),
    "https": lambda: sample.compiled(sample.manifest(network="outbound-https-only")),
    "full": lambda: sample.compiled(sample.manifest(network="full")),
    "network": lambda: sample.compiled(sample.manifest(network="full", more=NETWORK)),
    "rest": lambda: sample.compiled(sample.manifest(network="full", more=REST + NETWORK, resources=IO)),
    "child": _child,
    "hello": lambda: _agent("hello"),
    "librarian": lambda: _agent("librarian"),
}


def read_out(name: str) -> str:
    """The artefacts for people, and the digest, which is over their exact bytes."""
    artefacts = CASES[name]()
    document = {
        "digest": artefacts.digest,
        **{file: artefacts.json(file) for file in NAMES if file.endswith(".json")},
        "firewall.nft": artefacts.files["firewall.nft"].decode().split("\n"),
        "seccomp.bpf": [artefacts.files["seccomp.bpf"][i : i + 8].hex() for i in range(0, _size(artefacts), 8)],
    }
    return json.dumps(document, indent=1, ensure_ascii=True) + "\n"


def _size(artefacts: Artefacts) -> int:
    return len(artefacts.files["seccomp.bpf"])


@pytest.mark.parametrize("name", CASES)
def test_policy_compiles_as_recorded(name: str) -> None:
    assert read_out(name) == (HERE / f"{name}.json").read_text()


def test_nothing_of_process_reaches_bytes() -> None:
    code = "from tests.golden.test_policy import CASES\nprint([make().digest for make in CASES.values()])"
    said = set()
    for seed, zone, locale in (("0", "UTC", "C"), ("1", "Asia/Tokyo", "C.UTF-8"), ("77", "America/Lima", "POSIX")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone, "LC_ALL": locale, "HOME": "/nonexistent"}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, check=True)
        said.add(done.stdout)
    assert len(said) == 1


def test_order_of_sections_and_keys_is_nothing() -> None:
    sections = [part.strip() for part in sample.TOML.partition("{more}")[0].split("\n[")] + [
        part.strip() for part in GRANTS.split("\n[") if part.strip()
    ]
    texts = ["[" + part.lstrip("[") for part in sections]
    filled = [t.format(runtime="python3", resources=RESOURCES, filesystem="ephemeral") for t in texts]
    first = sample.compiled(parse.parse("\n".join(filled).encode()))
    for seed in range(10):
        rng = random.Random(seed)
        shuffled = []
        for text in rng.sample(filled, len(filled)):
            head, *keys = text.split("\n")
            shuffled.append("\n".join([head, *rng.sample(keys, len(keys))]))
        assert sample.compiled(parse.parse("\n".join(shuffled).encode())).digest == first.digest, seed


if __name__ == "__main__":
    for each in CASES:
        (HERE / f"{each}.json").write_text(read_out(each))
