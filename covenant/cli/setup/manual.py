"""Manual pages made from the help texts of the commands: one for each verb, and a list as covenant(1)."""

from __future__ import annotations

from collections.abc import Iterator

import click


def pages(command: click.Command, *, name: str, version: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of the page of a command and of every command below it."""
    yield from _below(command, click.Context(command, info_name=name), version)


def service(name: str, text: str, *, version: str) -> str:
    """Return the page of a service: its help text as it is."""
    lines = [f'.TH {_word(name)} 1 "" "{version}" "Covenant"', ".SH NAME", f"{_text(name)} \\- service of Covenant"]
    return "\n".join([*lines, ".SH SYNOPSIS", ".nf", *map(_line, text.splitlines()), ".fi", ""])


def _below(command: click.Command, context: click.Context, version: str) -> Iterator[tuple[str, str]]:
    path = context.command_path
    yield path.replace(" ", "-"), _page(command, context, version)
    if isinstance(command, click.Group):
        for name, child in _children(command, context):
            yield from _below(child, click.Context(child, info_name=name, parent=context), version)


def _children(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in sorted(group.list_commands(context)):
        child = group.get_command(context, name)
        if child is not None and not child.hidden:
            yield name, child


def _page(command: click.Command, context: click.Context, version: str) -> str:
    path = context.command_path
    short = command.get_short_help_str(limit=200).rstrip(".") or "command of Covenant"
    lines = [
        f'.TH {_word(path.replace(" ", "-"))} 1 "" "{version}" "Covenant"',
        ".SH NAME",
        f"{_text(path.replace(' ', '-'))} \\- {_text(short)}",
        ".SH SYNOPSIS",
        f".B {_text(path)}",
        _line(" ".join(command.collect_usage_pieces(context))),
    ]
    if command.help:
        lines += [".SH DESCRIPTION", *_paragraphs(command.help)]
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    records = [record for one in options if (record := one.get_help_record(context)) is not None]
    if records:
        lines += [".SH OPTIONS", *(line for names, text in records for line in _item(names, text))]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for name, child in _children(command, context):
            lines += _item(f"{path} {name}", child.get_short_help_str(limit=200))
    if command.epilog:
        examples = [line for line in command.epilog.replace("\b\n", "").splitlines() if line != "Examples:"]
        lines += [".SH EXAMPLES", ".nf", *map(_line, examples), ".fi"]
    return "\n".join([*lines, ""])


def _item(term: str, text: str) -> list[str]:
    return [".TP", f".B {_text(term)}", _line(text) or "."]


def _paragraphs(text: str) -> Iterator[str]:
    """Yield a help text: a paragraph behind ``\\b`` keeps its lines, as in the terminal."""
    for number, block in enumerate(text.strip().split("\n\n")):
        if number:
            yield ".PP"
        if block.startswith("\b"):
            yield ".nf"
            yield from map(_line, block.removeprefix("\b").strip("\n").splitlines())
            yield ".fi"
        else:
            yield _line(" ".join(block.split()))


def _line(text: str) -> str:
    """Escape a line. One that begins with a dot or a quote would be a request of roff."""
    shown = _text(text)
    return f"\\&{shown}" if shown.startswith((".", "'")) else shown


def _text(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def _word(text: str) -> str:
    return text.upper().replace("-", "\\-")
