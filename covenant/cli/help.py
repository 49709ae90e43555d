"""``covenant help CODE``: what an error code means and who has to act. Everything comes from one table."""

from __future__ import annotations

import inspect

import click

from covenant.cli import common
from covenant.cli.daemon import client
from policy import errors

_ACTORS = {
    errors.Actor.AUTHOR: "the author of the package",
    errors.Actor.OPERATOR: "the operator",
    errors.Actor.MACHINE: "the administrator of the machine",
}


@click.command("help", epilog=client.examples("covenant help", "covenant help capability_not_held"))
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def help_code(code: str | None, as_json: bool) -> None:
    """Explain an error code; without CODE, list all of them."""
    if code is None:
        rows = [_row(c) for c in sorted(errors.TABLE)]
        if as_json:
            common.emit({"kind": "error_codes", "codes": rows})
            return
        width = max(len(r["code"]) for r in rows)
        for row in rows:
            common.say(f"{row['code']:<{width}}  {row['summary']}")
        return
    if code not in errors.TABLE:
        raise errors.UsageError(f"there is no error code `{code}`", hint="covenant help lists them")
    row = _row(code)
    if as_json:
        common.emit({"kind": "error_code", **row})
        return
    common.say(f"{row['code']}: {row['explanation']}")
    common.say(f"  who must act: {row['who']}")
    if row["kind_of"]:
        common.say(f"  a case of: {row['kind_of']}")


def page() -> str:
    """docs/errors.md, which tests/golden holds against the table."""
    lines = [
        "# Error codes",
        "",
        "Each error has a code; `covenant help CODE` explains it. Below, the codes are grouped by who must act. With",
        "`--json` an error is one document: `kind`, `message`, `code`, `hint` (the fix), `where`.",
        "",
        "<!-- Written by `python -m covenant.cli.help > docs/errors.md`; do not edit. -->",
    ]
    for actor, who in _ACTORS.items():
        lines += ["", f"## {who[0].upper()}{who[1:]} must act", "", "| code | meaning |", "|---|---|"]
        lines += [
            f"| `{row['code']}` | {row['explanation']} |"
            for row in map(_row, sorted(errors.TABLE))
            if row["actor"] == actor.value
        ]
    return "\n".join(lines) + "\n"


def _row(code: str) -> dict[str, str]:
    cls = errors.TABLE[code]
    text = " ".join((inspect.getdoc(cls) or "").split())
    parent = next((c for c in cls.__mro__[1:] if "code" in c.__dict__ and getattr(c, "code", "error") != "error"), None)
    return {
        "code": code,
        "summary": text.split(". ")[0].rstrip("."),
        "explanation": text,
        "actor": cls.actor.value,
        "who": _ACTORS[cls.actor],
        "kind_of": getattr(parent, "code", ""),
    }


if __name__ == "__main__":
    print(page(), end="")
