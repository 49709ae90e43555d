"""The form of the argument rules, from TOML to frozen values. Strict and closed, so that no rule is wider by a slip.

What the rules mean stands in ``arguments.toml``; the compiler emits them and the prover expects them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from policy.data.types import ArgumentRule, ArgumentRules, Condition, ValueCondition

ARGUMENTS: Final = 6
GRANTS: Final = ("network", "session", "network or session")
_ALL_BITS: Final = 2**64 - 1


class ArgumentTableError(ValueError):
    """The table is malformed: the call, and what is wrong with it."""


def read(version: int, calls: Mapping[str, Any], host: Mapping[str, Any]) -> ArgumentRules:
    """The rules of a table.

    Raises:
        ArgumentTableError: a key is missing, unknown or of a wrong type, a reason is empty, a condition can never
            or always hold, or an alternative has two conditions on one argument.
    """
    rules = {call: _rule(call, table) for call, table in sorted(calls.items())}
    _keys("host", host, {"refuse": dict, "rest": list})
    refused = {
        call: tuple(_alternatives(f"host.refuse.{call}", rows, grants=()))
        for call, rows in sorted(host["refuse"].items())
    }
    for call, alternatives in refused.items():
        if any(len(alternative.conditions) != 1 for alternative in alternatives):
            raise ArgumentTableError(f"host.refuse.{call}: more than one condition")
    rest = tuple(host["rest"])
    for call in rest:
        if call not in rules or len(set(rest)) != len(rest):
            raise ArgumentTableError(f"host.rest: `{call}` has no rule, or stands there twice")
        if not _values_of_one_argument(rules[call]):
            raise ArgumentTableError(f"host.rest: the rule of `{call}` is no list of values under one mask")
        if call in refused:
            raise ArgumentTableError(f"host: `{call}` stands in both tables")
    return ArgumentRules(version, MappingProxyType(rules), MappingProxyType(refused), rest)


def _rule(call: str, table: Any) -> ArgumentRule:
    _keys(call, table, {"reason": str, "allow": list})
    return ArgumentRule(call, _reason(call, table), tuple(_alternatives(call, table["allow"], grants=GRANTS)))


def _alternatives(place: str, rows: Any, *, grants: tuple[str, ...]) -> Iterator[ValueCondition]:
    if type(rows) is not list or not rows:
        raise ArgumentTableError(f"{place}: no list of alternatives")
    seen = set()
    for row in rows:
        when = row.get("when") if type(row) is dict else None
        _keys(place, row, {"where": list, "reason": str, **({} if when is None else {"when": str})})
        if when is not None and when not in grants:
            raise ArgumentTableError(f"{place}: nothing can hang on `{when}`")
        conditions = tuple(sorted((_condition(place, c) for c in row["where"]), key=lambda c: c.argument))
        if not conditions or len({c.argument for c in conditions}) != len(conditions):
            raise ArgumentTableError(f"{place}: an alternative has no condition, or two on one argument")
        if conditions in seen:
            raise ArgumentTableError(f"{place}: an alternative stands there twice")
        seen.add(conditions)
        yield ValueCondition(conditions, when, _reason(place, row))


def _condition(place: str, raw: Any) -> Condition:
    if type(raw) is not list or len(raw) != 3 or any(type(number) is not int for number in raw):
        raise ArgumentTableError(f"{place}: a condition is no [argument, mask, value]")
    argument, mask, value = raw
    if not 0 <= argument < ARGUMENTS or not 0 < mask <= _ALL_BITS or value & ~mask:
        raise ArgumentTableError(f"{place}: {raw} can never or always hold")
    return Condition(argument, mask, value)


def _values_of_one_argument(rule: ArgumentRule) -> bool:
    single = all(len(a.conditions) == 1 and a.when is None for a in rule.allow)
    return single and len({(c.argument, c.mask) for a in rule.allow for c in a.conditions}) == 1


def _keys(place: str, table: Any, keys: Mapping[str, type]) -> None:
    if type(table) is not dict or set(table) != set(keys):
        raise ArgumentTableError(f"{place}: not exactly the keys {sorted(keys)}")
    for key, kind in keys.items():
        if type(table[key]) is not kind:
            raise ArgumentTableError(f"{place}: `{key}` is no {kind.__name__}")


def _reason(place: str, table: Mapping[str, Any]) -> str:
    reason: str = table["reason"].strip()
    if not reason:
        raise ArgumentTableError(f"{place}: a reason is empty")
    return reason
