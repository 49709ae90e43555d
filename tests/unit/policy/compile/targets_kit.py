"""Make manifests and orders for tests of the compile targets."""

from __future__ import annotations

from typing import Any

from policy import data
from policy.compile.targets import all as targets_all
from policy.compile.targets import loss
from policy.data import target_table
from policy.grants.effective import Effective
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.rules import nine
from tests.unit.policy.compile import sample

IMAGE = "registry.example/agents/sample@sha256:" + "0123456789abcdef" * 4
PACKAGE = "d" * 63 + "e"

TOML = """\
[agent]
id = "{id}"
name = "Sample"
version = "1"
runtime = "{runtime}"
entry = "{entry}"
[resources]
network = "{network}"
{resources}
[sandbox]
required = true
backend = "linux-gvisor"
filesystem = "{filesystem}"
{more}
"""

# A network table with every kind of entry that `full` accepts.
NETWORK = """
[[permissions.network]]
host = "api.example.com"
ports = [443]
protocol = "tls"
[[permissions.network]]
host = "*.cdn.example.com"
ports = [443, 8443]
protocol = "tls"
[[permissions.network]]
host = "db.example.com"
ports = [5432]
protocol = "tcp"
[[permissions.network]]
host = "ntp.example.com"
ports = [123]
protocol = "udp"
[[permissions.network]]
host = "10.1.2.0/24"
ports = [80, "8000-8100"]
protocol = "tcp"
[[permissions.network]]
host = "192.0.2.7"
ports = [53]
protocol = "udp"
[[permissions.network]]
host = "2001:db8::/32"
ports = [443]
protocol = "tls"
"""


PARTS = {
    "id": "sample",
    "runtime": "python3",
    "entry": "main.py",
    "network": "off",
    "resources": "",
    "filesystem": "ephemeral",
    "more": "",
}


def manifest(**changes: str) -> Manifest:
    """Parse a manifest; each keyword replaces a part of ``TOML``."""
    return parse.parse(TOML.format(**{**PARTS, **changes}).encode())


def effective(found: Manifest) -> Effective:
    """Return the grants that the manifest requests."""
    return nine.requested(found, roles=data.roles())


def losses(target: str, found: Manifest) -> dict[str, loss.Loss]:
    """Return the manifest's restrictions that the target loses, by id without the target's name."""
    listed = loss.report(target_table.targets()[target], effective(found), found)
    return {one.id.partition(".")[2]: one for one in listed}


def restrictions(target: str, found: Manifest) -> tuple[str, ...]:
    """Return the ids of the losses that the order must accept."""
    return tuple(f"{target}.{name}" for name, one in losses(target, found).items() if one.kind == loss.RESTRICTION)


def compiled(target: str, found: Manifest, **order: Any) -> targets_all.Output:
    """Compile with every loss accepted; ``order`` are fields of ``all.Order``."""
    values: dict[str, Any] = {
        "effective": effective(found),
        "manifest": found,
        "host": sample.host(),
        "package_digest": PACKAGE,
        "accepted": restrictions(target, found),
        "image": IMAGE if target == "kubernetes" else None,
    }
    return targets_all.compile(target, targets_all.Order(**{**values, **order}))
