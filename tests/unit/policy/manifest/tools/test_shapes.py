"""The published schema of tools.json: the keys that each transport needs, and those that it must not have."""

from __future__ import annotations

from typing import Any

from policy.manifest.tools import document, shapes


def fragments() -> list[dict[str, Any]]:
    found = [one for rules in shapes.RULES.values() for one in rules if "servers" in one.get("properties", {})]
    return [part for one in found for part in one["properties"]["servers"]["items"].get("allOf", ())]


def test_each_transport_has_its_keys() -> None:
    by_transport = {}
    for one in fragments():
        assert one.keys() == {"if", "then"}
        assert one["if"]["required"] == ["transport"]
        assert one["if"]["properties"].keys() == {"transport"}
        by_transport[one["if"]["properties"]["transport"]["const"]] = one["then"]
    assert by_transport.keys() == document.TRANSPORTS.keys()
    for transport, (needed, more) in document.TRANSPORTS.items():
        then = by_transport[transport]
        assert then.keys() == {"required", "properties"}
        assert set(then["required"]) == set(needed)
        own = {*needed, *more}
        others = {
            key for name, keys in document.TRANSPORTS.items() if name != transport for part in keys for key in part
        }
        assert then["properties"].keys() == set(needed) | others
        assert all(then["properties"][key] == {"not": {"type": "null"}} for key in needed)
        assert not (others - set(needed)) & own
