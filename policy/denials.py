"""What was refused to an agent while it ran, wherever that happened: one shape, one id, one row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Denial:
    """One refusal. ``layer`` is who refused (``dns``, ``sni``, ``packet``, ``memory``, ...), ``target`` what was wanted
    in the spelling that ``covenant policy why`` takes, ``code`` why it was refused."""

    layer: str
    target: str
    code: str
