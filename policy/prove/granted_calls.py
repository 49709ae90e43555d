"""The calls with their arguments that a filter must let pass for a set of granted names."""

from __future__ import annotations

from policy import data
from policy.data.types import SESSION_CALL
from policy.decompile import calls
from policy.decompile.calls import CallTable
from policy.prove import roundings


def table(names: frozenset[str], *, network: bool) -> CallTable:
    """Return the calls: those of the table of argument rules with its arguments, on all 64 bits of each."""
    known, session = data.arguments(), SESSION_CALL in names
    rules = {}
    for name in names & known.rules.keys():
        alternatives = known.alternatives(name, network=network, session=session) or ()
        rules[name] = [[(c.argument, c.mask, c.value) for c in one.conditions] for one in alternatives]
    return calls.expected(names, rules, roundings.missing(names))
