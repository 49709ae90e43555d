"""A command line of a source as the program of an agent and its arguments, without what looks like a secret."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import PydanticCustomError

from policy.importing.vocabulary import Draft, shown
from policy.manifest import fields, paths, process
from policy.manifest.tools import secret_scan


def take(draft: Draft, place: str, words: Sequence[str], *, expands: str) -> None:
    """Take a program and its arguments, or neither, with a loss. ``expands`` are characters that the source expands."""
    program, arguments = words[0], list(words[1:])
    if draft.context.entry:
        draft.inexpressible(place, f"the program {shown(program)} is not taken: --entry names another")
        return
    line = 'agent.entry = "PROGRAM"'
    try:
        if "/" in program:
            paths.absolute(program)
    except PydanticCustomError as e:
        draft.inexpressible(
            place, f"the program is not taken: {(e.context or {}).get('message', 'it is no path')}", line
        )
        return
    if set(program) & set(expands) or not program or program.startswith("-"):
        draft.inexpressible(place, f"the program {shown(program)} is not taken: it is known at its start alone", line)
        return
    draft.entry = program
    draft.args = _arguments(draft, place, arguments, expands)


def _arguments(draft: Draft, place: str, arguments: list[str], expands: str) -> list[str]:
    line = "[process] args = [...]"
    try:
        secret_scan.command_line(arguments)
        for one in arguments:
            secret_scan.literal(one)
            process.argument(one)
    except PydanticCustomError:
        # The word itself is not repeated: the report ends in logs.
        draft.narrower(
            place, "the arguments are not copied: one looks like a secret, or holds a hidden character", line
        )
        return []
    odd = next((one for one in arguments if set(one) & set(expands) or process.INTENT in one), None)
    if odd is not None:
        draft.narrower(place, f"the arguments are not copied: {shown(odd)} is known at the start alone", line)
        return []
    if len(arguments) > fields.LIST_ITEMS:
        draft.narrower(place, f"the arguments are not copied: there are {len(arguments)} of them", line)
        return []
    return arguments
