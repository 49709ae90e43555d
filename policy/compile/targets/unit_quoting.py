"""The one way by which a string reaches a unit file of systemd.

INVARIANT: no string of a manifest, package or host stands in a unit file except as a function of this module made it.
tests/property/policy/test_unit_quoting.py reads them back, tests/packaging/test_unit_of_systemd.py has systemd do so.

The syntax is that of systemd.syntax(7), systemd.service(5), "Command lines", and systemd.unit(5), "Specifiers": between
double quotes a backslash escapes a backslash and a double quote in every setting; ``%%`` is a per cent sign; blanks,
``;``, ``:``, ``#`` and the prefixes ``-``, ``+``, ``@``, ``!`` mean nothing within quotes unless a setting gives its
first character a meaning after unquoting, which is why ``path`` demands a slash there. What stands between quotes may
still be taken as a variable in ``ExecStart=``: our command lines begin with ``:``, which turns that off.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from policy import errors
from policy.manifest import text

# A line ends at these, or the parser refuses the file: nothing can quote them in every setting.
_REFUSED = frozenset({"Cc", "Cs", "Zl", "Zp"})
_CHARACTERS = 4096
_BARE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
_NOT_OF_PROGRAMS = frozenset("\"'\\")


def word(value: str) -> str:
    """Quote ``value`` as one word, with any content.

    Raises:
        errors.NotEnforceableError: it holds a control character, or is too long for a unit file's line.
    """
    if len(value) > _CHARACTERS or any(unicodedata.category(ch) in _REFUSED for ch in value):
        raise errors.NotEnforceableError(f"{text.quote(value)} cannot be written into a unit file", hint="rename it")
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def bare(value: str) -> str:
    """A name for the few settings that know no quotes, ``LoadCredential=`` and its like: nothing in it means anything.

    Raises:
        errors.NotEnforceableError: it is more than 128 characters or others than ``A-Z a-z 0-9 _ . -``.
    """
    if not _BARE.fullmatch(value):
        raise errors.NotEnforceableError(f"{text.quote(value)} cannot be written into a unit file", hint="rename it")
    return value


def program(value: str) -> str:
    """The absolute path of a program in ``ExecStart=``, with the sign that no variable is replaced in its line.

    Raises:
        errors.NotEnforceableError: as ``path``, or it holds a quote or a backslash, which systemd refuses there.
    """
    if _NOT_OF_PROGRAMS.intersection(value):
        raise errors.NotEnforceableError(
            f"program {text.quote(value)} cannot be started by systemd", hint="rename it without quotes and backslashes"
        )
    return f":{path(value)}"


def words(values: Iterable[str]) -> str:
    """Several words."""
    return " ".join(word(value) for value in values)


def path(value: str) -> str:
    """An absolute path as one word.

    Raises:
        errors.NotEnforceableError: it is not absolute: a setting would take its first character for a prefix.
    """
    if not value.startswith("/"):
        raise errors.NotEnforceableError(f"{text.quote(value)} is no absolute path")
    return word(value)


def rooted(value: str) -> str:
    """An absolute path of the unit's own root, for ``NoExecPaths=`` and its like: ``+`` says so, within the quotes."""
    path(value)
    return word(f"+{value}")


def bind(source: str, destination: str) -> str:
    """``SOURCE:DESTINATION`` of a bind mount; a colon within quotes separates nothing.

    ``norbind``: by default systemd brings along the other mounts below the source, which are not granted.
    """
    return f"{path(source)}:{path(destination)}:norbind"
