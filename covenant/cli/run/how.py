"""How a session is shown to its caller: the options of ``covenant run`` and ``covenant exec``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from policy.learn.observed import Observed


class How(NamedTuple):
    """How a session is shown: ``quiet`` without words of ours, ``raw`` without the filter of escape sequences.

    ``record`` is the file of a recording. ``keys`` detach the terminal; with ``keep`` the session also goes on when the
    command ends otherwise. ``workspace`` is the directory that the caller gives to the agent, ``resume`` the
    run whose changes it goes on with. With ``keep_workspace`` it stays as it is at the end, and no question is asked.
    ``wait`` is how many seconds it is asked for again while another run writes the same path. ``observe`` collects what
    the session does.
    """

    quiet: bool = False
    raw: bool = False
    record: Path | None = None
    keys: bytes = b""
    keep: bool = False
    workspace: Path | None = None
    resume: str = ""
    keep_workspace: bool = False
    wait: float = 0.0
    observe: Observed | None = None


PLAIN: Final = How()
