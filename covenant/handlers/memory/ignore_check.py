"""The ignore set: texts that are not acted on and not kept, by the rules of ``.covenantignore``.

Version 1 has the syntax of gitignore and holds it against the text of an intent (covenant-v1.md, section 9). Here it is
held against what is to be stored as well, and each rule finds places in the text in two ways:

    anywhere     as version 1: `*` and `?` do not cross a slash, `**` is anything, a leading slash is the beginning of
                 the text; what the rule says may stand at any offset, and anything may follow it
    as a path    each word that looks like a path (has a slash, a dot or an underscore) is matched as git would match
                 it, so that `**/.env` finds `.env` by itself, which has no slash before it

Rules are read in order; what a later one with `!` finds is taken out of what was found before. So the last match wins,
for each place: a text that names one harmless file does not thereby hide another's name. A text is ignored while a
place is left.

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
    """Whether a text would be ignored, and by which rule. Nothing is kept of it."""
    pattern = await server.ignore.find(asked.text)
    return responses.IgnoreReport(
        ignored=pattern is not None, matched_pattern=pattern, rules_loaded=len(server.ignore.rules)
    )


HANDLERS: Final[Mapping[str, Handler]] = {"ignore_check": ignore_check}
