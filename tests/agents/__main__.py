"""Install the agents, then try their cells: ``python -m tests.agents [--starts N] [AGENT ...]``. As root.

``--starts`` starts each agent that many times instead, and counts the crashes. The packages and layers stay in
COVENANT_AGENTS, /opt/covenant-agents unless it is set. That path is part of the layers, so it leads through no link.
"""

from __future__ import annotations

import argparse
import os
import sys

import pytest

from tests.agents import catalogue, place, starts


def main() -> int:
    """Return 0 when every cell is as agents.toml says, or no start crashed."""
    known = list(catalogue.load())
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description="Try the agents that people use.")
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="start each agent N times, count crashes")
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=f"only these; known: {', '.join(known)}")
    given = parser.parse_args()
    unknown = sorted(set(given.agents) - set(known))
    if unknown:
        parser.error(f"no agent {unknown[0]}; known: {', '.join(known)}")
    missing = place.missing()
    if os.geteuid() != 0 or missing:
        print(f"missing: {', '.join(missing) or 'root'}\n   fix: apt-get install npm tmux; sudo make agents")
        return 1
    names = given.agents or known
    place.build(names)
    if given.starts:
        return starts.count(given.starts, names)
    os.environ["COVENANT_REQUIRE_KERNEL"] = "1"
    chosen = ["-k", " or ".join(f"[{name}]" for name in names)] if given.agents else []
    return int(pytest.main(["-n0", "tests/agents", *chosen]))


if __name__ == "__main__":
    sys.exit(main())
