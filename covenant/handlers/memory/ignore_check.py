"""The ignore set: texts that are neither executed nor stored, by the rules of ``.covenantignore``.

Version 1 has the syntax of gitignore and matches it against the text of an intent (covenant-v1.md, section 9). Here it
is also matched against text to be stored, and each rule finds places in the text in two ways:

    anywhere     as version 1: `*` and `?` do not cross a slash, `**` matches anything, a leading slash is the start of
                 the text; a match may begin at any offset, with anything after it
    as a path    each word that looks like a path (has a slash, a dot or an underscore) is matched as git would match
                 it, so that `**/.env` finds `.env` by itself, which has no slash before it

Rules apply in order; a later rule with `!` removes its places from those found before. So for each place the last match
wins: a text with one harmless file name does not hide another name. A text is ignored if a place remains.

RE2 does the matching, in time linear in the text's length; a `*` spans at most a file name
(``covenant.handlers.state.glob``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from covenant.wire import requests, responses

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.handlers.server import Handler, Server


async def ignore_check(server: Server, caller: Caller, asked: requests.IgnoreCheck) -> responses.IgnoreReport:
    """Report if a text would be ignored, and by which rule. Stores nothing."""
    pattern = await server.ignore.find(asked.text)
    return responses.IgnoreReport(
        ignored=pattern is not None, matched_pattern=pattern, rules_loaded=len(server.ignore.rules)
    )


HANDLERS: Final[Mapping[str, Handler]] = {"ignore_check": ignore_check}
