"""The parts that nft itself adds to a text; policy.decompile.network.nft has to add them as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NFT = "/usr/sbin/nft"


def listed(rule: str) -> str:
    """A rule as nft lists it after loading it, in a network namespace that goes with the command."""
    text = f"table inet covenant {{\n\tchain x {{\n\t\t{rule}\n\t}}\n}}\n"
    script = f"{NFT} -f - && {NFT} list ruleset"
    done = subprocess.run(
        ["/usr/bin/unshare", "--net", "/bin/sh", "-c", script],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.splitlines()[2].strip()


def test_reset_is_for_tcp_alone() -> None:
    assert listed("reject with tcp reset") == "meta l4proto tcp reject with tcp reset"
    assert listed("limit rate over 9 bytes/second reject with tcp reset").startswith("meta l4proto tcp ")


def test_another_reject_is_for_everything() -> None:
    assert listed("reject with icmpx port-unreachable") == "reject"


def test_random_rules_do_what_both_readings_say() -> None:
    """Calls, returns, policies, sets that touch and end at the last address, implied protocols: sent as packets."""
    done = subprocess.run(
        ["/usr/bin/unshare", "--net", sys.executable, "-m", "tests.kernel.random_rules", "3", "60"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["odd"] == []
    assert found["packets"] > 4000
    assert found["packets"] * 0.1 < found["passed"] < found["packets"] * 0.9
