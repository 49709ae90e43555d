"""``secrets.toml`` in a home (Covenant version 1, section 13): settings that only the daemon may read.

    [embed]                  # covenant.providers.embed.pick
    [secrets]                # by name, for holders of a grant of secret.access
    mail = "correct horse"
    [settlement]
    chain = "litesvm"        # or "off", the default: receipts are settled off-chain

Read once, at the start. No error ever contains a part of the file, neither names of secrets nor their values.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from policy import errors
from policy.manifest import lines, text
from sandbox.storage import atomic_file

NAME: Final = "secrets.toml"
Chain = Literal["off", "litesvm"]
_CHAINS: Final[tuple[Chain, ...]] = ("off", "litesvm")
_MAX_BYTES: Final = 1024 * 1024
# The names that `get_secret` accepts.
SECRET_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,256}\Z")


@dataclass(frozen=True, slots=True)
class SettlementSecrets:
    """The contents of the sections ``[secrets]`` and ``[settlement]``."""

    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    chain: Chain = "off"


def read(home: Path) -> bytes:
    """Return the file's bytes; empty if it is missing.

    Raises:
        errors.SettingError: it is a symlink, another user's, or readable by others.
    """
    where = str(home / NAME)
    if not os.path.lexists(where):
        return b""
    directory = atomic_file.open_directory(home, error=errors.SettingError)
    try:
        raw = atomic_file.read(directory, NAME, max_bytes=_MAX_BYTES, where=str(home), error=errors.SettingError)
    finally:
        os.close(directory)
    return raw or b""


def document(raw: bytes, *, where: str) -> dict[str, Any]:
    """Return the sections.

    Raises:
        errors.SettingError: these bytes are no TOML.
    """
    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError):  # no UTF-8, no TOML, or a number of thousands of digits
        raise errors.SettingError(f"{NAME} is no TOML", where=where) from None


def refuse_unknown(sections: Mapping[str, Any], name: str, known: tuple[str, ...], raw: bytes, *, where: str) -> None:
    """Refuse a key that the section does not have: a misspelt one would leave its default. It is named by its line.

    Raises:
        errors.SettingError: there is one.
    """
    section = sections.get(name)
    unknown = [key for key in section if key not in known] if isinstance(section, dict) else []
    if not unknown:
        return
    place = lines.scan(raw.decode()).keys.get((name, unknown[0]))
    near = text.nearest(unknown[0], known)
    raise errors.SettingError(
        f"`[{name}]` has a key that is none of its keys",
        hint=(f"did you mean `{near}`? " if near else "") + f"known here: {', '.join(known)}",
        where=f"{where}:{place.line}" if place else where,
    )


def told(home: Path) -> SettlementSecrets:
    """Read the file of this home.

    Raises:
        errors.SettingError: as ``read``, ``document`` and ``refuse_unknown``, or a section has an invalid value.
    """
    where = str(home / NAME)
    raw = read(home)
    sections = document(raw, where=where)
    refuse_unknown(sections, "settlement", ("chain",), raw, where=where)
    return SettlementSecrets(
        _secrets(sections.get("secrets", {}), where), _chain(sections.get("settlement", {}), where)
    )


def _secrets(section: Any, where: str) -> dict[str, bytes]:
    if not isinstance(section, dict) or not all(isinstance(value, str) for value in section.values()):
        raise errors.SettingError(
            "`[secrets]` has what is no secret", hint='each line is a name and a text: mail = "..."', where=where
        )
    if not all(map(SECRET_NAME.match, section)):
        raise errors.SettingError(
            "a name in `[secrets]` is none that can be asked for",
            hint="1 to 256 of A-Z a-z 0-9 _ . : / -",
            where=where,
        )
    return {name: value.encode() for name, value in section.items()}


def _chain(section: Any, where: str) -> Chain:
    asked = section.get("chain", "off") if isinstance(section, dict) else None
    for known in _CHAINS:
        if asked == known:
            return known
    raise errors.SettingError(
        "`settlement.chain` has a value that cannot be used", hint="it is `off` or `litesvm`", where=where
    )
