"""SystemCallFilter= of systemd as calls that are taken from the profile of a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from policy import data
from policy.importing.units import system_call_groups as groups
from policy.importing.units import unit_file
from policy.importing.units.unit_file import Setting
from policy.importing.vocabulary import Draft, shown

PROFILE: Final = "command"


def ours() -> frozenset[str]:
    """Return every call that a manifest of this import may bring: those of the profile, and of grants."""
    added = [data.addition(name).names for name in ("executables", "network")]
    return frozenset(data.profile(PROFILE).names).union(*added)


def denied(draft: Draft, filters: Sequence[Setting]) -> list[str]:
    """Return the calls to deny, so that no call is left that the filter refuses.

    The first line decides whether the filter lists what is allowed or what is refused; each later one adds to that or
    takes from it (systemd.exec(5)).
    """
    if not filters:
        return []
    everything = ours()
    refuses = filters[0].value.startswith("~")
    # systemd adds its group @default to a list of what is allowed.
    listed = set() if refuses else set(groups.members("default") or ())
    for one in filters:
        takes = one.value.startswith("~") != refuses
        found = _calls(draft, one, everything if (one.value.startswith("~")) else frozenset())
        listed = listed - found if takes else listed | found
    out = everything & listed if refuses else everything - listed
    if out:
        message = f"{len(out)} calls of the profile are denied; a refused call gives EPERM, and ends no program"
        draft.narrower(filters[0].place, message)
    return sorted(out)


def _calls(draft: Draft, one: Setting, unknown: frozenset[str]) -> set[str]:
    """Return the calls that a line names. ``unknown`` are those of a group that is not known."""
    out = set[str]()
    words = unit_file.words(one)
    for index, word in enumerate(words):
        name = (word.removeprefix("~") if index == 0 else word).partition(":")[0]
        if not name.startswith("@"):
            out.add(name)
            continue
        members = groups.members(name.removeprefix("@"))
        if members is None:
            draft.narrower(one.place, f"the group {shown(name)} is not known here: its calls are taken as refused")
        out |= unknown if members is None else members
    return out
