"""The changes of a workspace as one page that needs nothing else: no script, no network.

What colours tell, signs and borders tell too.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from policy.workspace import unified
from policy.workspace.changes import Change, renames

_WORDS = {"add": "+ new", "modify": "~ changed", "delete": "- removed", "mode": "m mode"}
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #8886; overflow-wrap: anywhere; }
pre { overflow-x: auto; margin: 0; padding: .5rem 0; font: 13px/1.45 ui-monospace, monospace; }
pre span { display: block; padding: 0 .6rem; border-left: 4px solid transparent; white-space: pre; }
.add { border-left: 4px solid #2a7a3a !important; background: #2a7a3a22; }
.del { border-left: 4px dashed #a33 !important; background: #aa333322; }
.why { font-style: italic; }
details { margin: 1rem 0; border: 1px solid #8886; border-radius: 4px; }
summary { padding: .4rem .6rem; cursor: pointer; overflow-wrap: anywhere; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(title: str, found: Sequence[Change], texts: Mapping[str, tuple[bytes, bytes]]) -> str:
    """Return the page as HTML. ``texts`` has the two contents of each file: of the directory, and of the workspace."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n<h1>{_text(title)}</h1>",
            *_table(found),
            *(part for change in found if unified.has_text(change) for part in _file(change, texts)),
            "</html>",
            "",
        ]
    )


def _table(found: Sequence[Change]) -> Iterator[str]:
    old = renames(found)
    yield "<table>\n<tr><th>change</th><th>path</th><th>bytes</th><th>not applied, since</th></tr>"
    for change in found:
        path = _text(change.path) + (f" (was {_text(old[change.path])})" if change.path in old else "")
        path += f" &rarr; {_text(change.target)}" if change.kind == "link" and change.target else ""
        why = _text(change.refused or change.conflict)
        size = str(change.size) if change.kind == "file" else change.kind
        yield f'<tr><td>{_WORDS[change.action]}</td><td>{path}</td><td>{size}</td><td class="why">{why}</td></tr>'
    yield "</table>"


def _file(change: Change, texts: Mapping[str, tuple[bytes, bytes]]) -> Iterator[str]:
    yield f"<details open><summary>{_WORDS[change.action]} {_text(change.path)}</summary><pre>"
    for line in unified.hunks(change, *texts.get(change.path, (b"", b""))):
        kind = {"+": "add", "-": "del"}.get(line[:1], "")
        yield f'<span class="{kind}">{_text(line)}</span>'
    yield "</pre></details>"


def _text(value: str) -> str:
    """Return text for the page: escaped, with controls and characters that show nothing written out."""
    shown = "".join(ch if ch.isprintable() or ch == "\t" else f"\\u{{{ord(ch):x}}}" for ch in value)
    return html.escape(shown)
