"""linux.seccomp of an OCI config.json, read as runsc reads it.

runsc has a meaning of its own for this text, which is neither the specification's nor libseccomp's. What is believed
here was seen under a live runsc, fact by fact, in tests/kernel/test_runsc_seccomp_semantics.py:

    entries          the first entry that lists the call and whose arguments match decides, else the default
    SCMP_ACT_ERRNO   EPERM, for any errnoRet (later releases heed it, so it has to say the same)
    SCMP_ACT_TRACE   ENOSYS as long as there is no tracer, so ptrace must not be granted beside it
    args             all must match; but once two of a rule are on one argument, any one of all of them is enough
    operators        compare all 64 bits, without sign; SCMP_CMP_MASKED_EQ is (argument & value) == valueTwo
    architectures    not looked at: a call by another entry (32-bit, x32) never passes
    names            one that runsc does not know is passed over
    keys             heeded in any case of their letters, and passed over when unknown

Only what a grant needs is taken. All else is refused, with any meaning: other actions (they kill, or runsc does not
start), flags and listeners (runsc passes them over), a name with two actions (its entries' order would count), an
entry without names (it says nothing), an index over 5 (6 ends the sandbox), numbers that Go would not take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from policy import errors
from policy.decompile import conditions, documents
from policy.decompile.calls import CallTable
from policy.decompile.conditions import Condition

_FILE: Final = "seccomp.json"
_ALLOW: Final = "SCMP_ACT_ALLOW"
_TRACE: Final = "SCMP_ACT_TRACE"
_ERRNO: Final = "SCMP_ACT_ERRNO"
_EPERM: Final = 1
_ARCHITECTURES: Final[Mapping[str, str]] = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}

_MASKED: Final = "SCMP_CMP_MASKED_EQ"
_OPERATORS: Final[Mapping[str, str]] = {
    "SCMP_CMP_EQ": "==",
    "SCMP_CMP_NE": "!=",
    "SCMP_CMP_LT": "<",
    "SCMP_CMP_LE": "<=",
    "SCMP_CMP_GE": ">=",
    "SCMP_CMP_GT": ">",
}
_WORD: Final = (1 << conditions.BITS) - 1

_TOP_KEYS: Final = (frozenset({"defaultAction", "architectures", "syscalls"}), frozenset({"defaultErrnoRet"}))
_ENTRY_KEYS: Final = (frozenset({"names", "action"}), frozenset({"args"}))
_ARGUMENT_KEYS: Final = (frozenset({"index", "op", "value"}), frozenset({"valueTwo"}))


def read(document: object, arch: str, numbers: Mapping[str, int]) -> CallTable:
    """Read the calls that runsc allows under this filter, on a machine of `arch`.

    Args:
        document: the value of ``linux.seccomp``, parsed.
        arch: ``x86_64`` or ``aarch64``.
        numbers: every call that `arch` has, by name.

    Raises:
        errors.ArtefactError: it holds something that no filter of ours has.
    """
    found = _object(document, _TOP_KEYS, _FILE)
    if found["defaultAction"] != _ERRNO:
        raise _refused(f"{_FILE}:defaultAction", found["defaultAction"])
    if "defaultErrnoRet" in found and _integer(found["defaultErrnoRet"], f"{_FILE}:defaultErrnoRet") != _EPERM:
        raise _refused(f"{_FILE}:defaultErrnoRet", found["defaultErrnoRet"])
    if found["architectures"] != [_ARCHITECTURES[arch]]:
        raise _refused(f"{_FILE}:architectures", found["architectures"])
    allowed: dict[str, Condition] = {}
    missing: set[str] = set()
    for at, entry in enumerate(_array(found["syscalls"], f"{_FILE}:syscalls")):
        where = f"{_FILE}:syscalls[{at}]"
        rule = _object(entry, _ENTRY_KEYS, where)
        names = _names(rule["names"], where, numbers)
        if rule["action"] == _ALLOW:
            condition = _arguments(rule["args"], where) if "args" in rule else conditions.ALWAYS
            for name in names:
                allowed[name] = conditions.either(allowed.get(name, conditions.NEVER), condition)
        elif rule["action"] == _TRACE and "args" not in rule:
            missing.update(names)
        else:
            raise _refused(f"{where}.action", rule["action"])
    for name in sorted(missing & allowed.keys()):
        raise documents.refuse(_FILE, f"two actions for `{name}`")
    if missing and "ptrace" in allowed:
        raise documents.refuse(_FILE, "a traced call is missing only while `ptrace` is refused")
    return CallTable({name: condition for name, condition in allowed.items() if condition}, frozenset(missing))


def _names(value: object, where: str, numbers: Mapping[str, int]) -> Sequence[str]:
    names = _array(value, f"{where}.names")
    if not names:
        raise documents.refuse(f"{where}.names", "an entry without names")
    for name in names:
        if not isinstance(name, str) or name not in numbers:
            raise _refused(f"{where}.names", name)
    return names


def _arguments(value: object, where: str) -> Condition:
    rules = [_argument(rule, f"{where}.args[{at}]") for at, rule in enumerate(_array(value, f"{where}.args"))]
    if not rules:
        raise documents.refuse(f"{where}.args", "an empty list of arguments")
    indexes = [index for index, _ in rules]
    join = conditions.both if len(set(indexes)) == len(indexes) else conditions.either
    _, found = rules[0]
    for _, condition in rules[1:]:
        found = join(found, condition)
    return found


def _argument(value: object, where: str) -> tuple[int, Condition]:
    rule = _object(value, _ARGUMENT_KEYS, where)
    index, first = _integer(rule["index"], f"{where}.index"), _integer(rule["value"], f"{where}.value")
    second = _integer(rule.get("valueTwo", 0), f"{where}.valueTwo")
    operator = rule["op"]
    if index >= conditions.ARGUMENTS:
        raise _refused(f"{where}.index", index)
    place = conditions.BITS * index
    if operator == _MASKED and "valueTwo" in rule:
        return index, conditions.compare("==", second, mask=first, shift=place)
    if second or not isinstance(operator, str) or operator not in _OPERATORS:
        raise _refused(f"{where}.op", operator)
    return index, conditions.compare(_OPERATORS[operator], first, mask=_WORD, shift=place)


def _object(value: object, keys: tuple[frozenset[str], frozenset[str]], where: str) -> Mapping[str, Any]:
    required, optional = keys
    if type(value) is not dict:
        raise _refused(where, value)
    for key in sorted(required - value.keys()):
        raise documents.refuse(where, f"no `{key}`")
    for key in sorted(value.keys() - required - optional):
        raise _refused(where, key)
    return value


def _array(value: object, where: str) -> Sequence[Any]:
    if type(value) is not list:
        raise _refused(where, value)
    return value


def _integer(value: object, where: str) -> int:
    # `type` and not isinstance: a boolean is an int to Python.
    if type(value) is not int or not 0 <= value <= _WORD:
        raise _refused(where, value)
    return value


def _refused(where: str, value: object) -> errors.ArtefactError:
    return documents.refuse(where, f"no filter of ours has {documents.shown(value)} there")
