"""The root of the tree of errors, and the closed table of their codes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Final

# The name alone, without a directory before it.
_BARE_FILE: Final = re.compile(r"(?<![\w./-])config\.toml\b")


class Actor(StrEnum):
    """The person who has to act before the same call can succeed."""

    AUTHOR = "author"
    OPERATOR = "operator"
    MACHINE = "machine"


TABLE: dict[str, type[CovenantError]] = {}


class CovenantError(Exception):
    """Something was refused or failed."""

    code: ClassVar[str] = "error"
    actor: ClassVar[Actor] = Actor.OPERATOR

    def __init__(self, message: str, *, hint: str = "", where: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where
        self.details = details

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            # INVARIANT: a code names one cause; two classes with one code would hide one of them.
            if cls.code in TABLE:
                raise TypeError(f"code {cls.code} is taken by {TABLE[cls.code].__name__}")
            TABLE[cls.code] = cls

    def __str__(self) -> str:
        return f"{self.message} ({self.where})" if self.where else self.message

    def to_json(self) -> dict[str, Any]:
        """The error document of ``--json``: kind and message as version 1, plus code, hint and where."""
        return {
            "kind": "error",
            "message": self.message,
            "code": self.code,
            "hint": self.hint or None,
            "where": self.where or None,
        }


def also(error: BaseException, what: str) -> None:
    """A second failure after an error: it is reported with the error, which stays the first."""
    if isinstance(error, CovenantError):
        error.message = f"{error.message}; and {what}"
    else:
        error.add_note(f"and {what}")


def together(found: Sequence[CovenantError]) -> CovenantError:
    """Return the first of several errors. ``each`` lists the others with it."""
    first = found[0]
    if len(found) > 1:
        first.details["others"] = tuple(found[1:])
    return first


def each(error: CovenantError) -> tuple[CovenantError, ...]:
    """Return an error and the errors that were found with it, in the order in which they were found."""
    documents = error.details.get("errors") or ()
    if len(documents) > 1:
        return tuple(restored({**one, "code": error.code}) for one in documents)
    return (error, *error.details.get("others", ()))


def restored(document: Mapping[str, Any]) -> CovenantError:
    """The error of an error document (``to_json``) that another process of ours wrote; the base class where its code
    is none of the table's."""
    words = {name: str(document.get(name) or "") for name in ("message", "hint", "where")}
    return TABLE.get(str(document.get("code")), CovenantError)(**words, restored=True)


def place_file(error: CovenantError, file: str) -> CovenantError:
    """Have the hint of an error, and of those found with it, name `config.toml` by its path. Returns the error.

    An error that another process wrote keeps its words: that process may read another file.
    """
    for one in (error, *error.details.get("others", ())):
        if not one.details.get("restored"):
            one.hint = _BARE_FILE.sub(lambda _: file, one.hint)
    return error
