"""A child reaches only hosts that its manifest and its parent may reach.

The tests try it from inside, on their own internet.
"""

from __future__ import annotations

import json

from tests.kernel import internet
from tests.kernel.families import BIG, SMALL, answered, member, spawn
from tests.kernel.internet import NetworkedWorld

TRIES = ["tcp('93.184.216.34', 80)", "tcp('2606:4700::1111', 80)", "tcp('93.184.216.34', 443)"]
BOTH = (("93.184.216.34", "[80]", "tcp"), ("2606:4700::1111", "[80]", "tcp"))


def test_childs_network_is_its_parents_or_less(networked: NetworkedWorld) -> None:
    world, tries = networked, internet.probes(TRIES)
    asks = tries + "\nanswer = [answer, child('wide', on_excess='narrow'), child('none')]"
    wide = member(world, "wide", tries, network="full", more=internet.entries(*BOTH), **SMALL)
    none = """
    import socket
    try: answer = socket.create_connection(("93.184.216.34", 80), 5).fileno()
    except OSError as e: answer = type(e).__name__
    """
    member(world, "none", none, **SMALL)
    top = member(world, "top", asks, network="full", more=internet.entries(BOTH[0]) + spawn(), **BIG)
    own, narrowed, without = answered(world, top)
    assert own == ["connected", "ECONNREFUSED", "ECONNREFUSED"]
    # The second address is in its own manifest, and not in its parent's.
    assert json.loads(narrowed["ok"]["text"]) == own
    assert json.loads(without["ok"]["text"]) in ("PermissionError", "OSError")
    # The control: started by its operator the same package reaches both.
    assert answered(world, wide) == ["connected", "connected", "ECONNREFUSED"]
