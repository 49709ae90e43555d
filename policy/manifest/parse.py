"""The strict parser of ``agent.toml``: bytes in, a frozen Manifest or one refusal out.

1. bytes: size, NUL, encoding, nesting, number of keys, TOML (``syntax``);
2. top level: known sections, sections that are tolerated, and slips of the pen;
3. each section against its model, then the rules across sections (``agent``, ``permissions``, ``structure``);
4. what the file wrote is kept beside the values, so that a default is never mistaken for the author's word.

Places are computed only for a refusal, or when ``Manifest.where`` or ``point`` is asked (``lines``). A refusal of the
text is placed at LINE:COLUMN; what a rule, an artefact or a host says of a grant names its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from policy import errors
from policy.manifest import agent, lines, report, syntax, text

FILE = "agent.toml"
UNKNOWN_SECTIONS = 64
_SECTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTIONS = tuple(agent.Manifest.model_fields)

Default = tuple[str, Any, str]


def parse(raw: bytes, *, file: str = FILE) -> agent.Manifest:
    """Parse a manifest from the bytes that were verified.

    Args:
        raw: the whole file.
        file: its name, for the places in errors.

    Raises:
        errors.ManifestSyntaxError: the bytes are no acceptable TOML.
        errors.ManifestError: a key, a value or a combination of sections is refused; ``details["errors"]`` lists all
            findings in the order of the file.
    """
    # (1) bytes
    document_text, document = syntax.load(raw, file)

    # (2) top level
    known = {name: value for name, value in document.items() if name in _SECTIONS}
    unknown = tuple(sorted(name for name in document if name not in _SECTIONS))
    source = lines.ManifestFile(written=frozenset(_written(known)), unknown=unknown, file=file, text=document_text)
    problems = list(_top_level(document, unknown))

    # (3) sections
    try:
        manifest = agent.Manifest.model_validate(known)
    except ValidationError as e:
        problems += report.translate(e, document)
        raise report.error(problems, source) from None
    if problems:
        raise report.error(problems, source)

    # (4) what was written
    manifest._source = source  # noqa: SLF001 - the one place that may say what a file wrote
    return manifest


def _written(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of every table and key; items of arrays of tables as ``name[0]``."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, dict):
            yield from _written(value, f"{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield f"{name}[{index}]"
                    yield from _written(item, f"{name}[{index}].")


def _top_level(document: Mapping[str, Any], unknown: tuple[str, ...]) -> Iterator[report.Problem]:
    """Unknown sections are tolerated as Covenant does, unless one may be a known section misspelt."""
    if len(unknown) > UNKNOWN_SECTIONS:
        yield report.Problem(
            (unknown[0],),
            f"the manifest has `{len(unknown)}` unknown sections",
            f"at most {UNKNOWN_SECTIONS} are tolerated",
            at_key=True,
        )
        return
    for name in unknown:
        value = document[name]
        if not (isinstance(value, dict) or (isinstance(value, list) and value and _all_tables(value))):
            known_as = report.elsewhere(name)
            meant = f"did you mean `{known_as}`? " if known_as else ""
            hint = f"{meant}put it below its [section]"
            yield report.Problem((name,), f"key {text.quote(name)} stands outside any section", hint, at_key=True)
        elif not _SECTION_NAME.fullmatch(name):
            # Look-alikes of a known section cannot be told by counting edits.
            hint = "an unknown section's name is 1 to 64 of A-Z a-z 0-9 _ -"
            message = f"unknown section {text.quote(name)} is not accepted"
            yield report.Problem((name,), message, hint, at_key=True)
        elif near := text.nearest(name, _SECTIONS):
            hint = f"did you mean `[{near}]`? a section of your own needs a name further away"
            yield report.Problem((name,), f"unknown section {text.quote(name)}", hint, at_key=True)
        elif near := text.nearest(name, agent.PERMISSION_DOMAINS):
            # `[syscalls]` with a deny list reads as a bound and would bind nothing.
            hint = f"did you mean `[permissions.{near}]`? a section of your own needs a name further away"
            yield report.Problem((name,), f"unknown section {text.quote(name)}", hint, at_key=True)


def _all_tables(value: list[Any]) -> bool:
    return all(isinstance(item, dict) for item in value)


def require_network(manifest: agent.Manifest) -> None:
    """``sign`` calls this: the network mode is the one value that must be the author's own.

    Raises:
        errors.ManifestError: ``resources.network`` is not written.
    """
    if not manifest.wrote("resources.network"):
        raise errors.ManifestError(
            "`resources.network` is missing",
            hint='write network = "off", "outbound-https-only" or "full" below [resources]',
            where=manifest.point("resources"),
        )


_UNLIMITED = "absent: not limited"
_REASONS = {
    "resources.network": "Covenant's default; sign wants it written",
    "resources.swap_mb": "no swap unless it is written",
    "resources.pids_max": "default ceiling",
    "resources.cpu_millis": "default ceiling: one core",
    "resources.cpu_weight": "default share",
}
_SEED = "Covenant's default"
_CLOSED = "not granted unless it is written"


def defaults_applied(manifest: agent.Manifest) -> tuple[Default, ...]:
    """Every default that applies, as (dotted key, value, reason), in the order of the schema.

    ``value`` is None where the absence means that nothing is limited.
    """
    return tuple(_defaults(manifest))


def _defaults(manifest: agent.Manifest) -> Iterator[Default]:
    written = manifest.written
    for section in ("resources", "sandbox", "settlement", "spawn"):
        for key, value in getattr(manifest, section):
            dotted = f"{section}.{key}"
            if dotted in written:
                continue
            if value is None:
                yield dotted, None, _UNLIMITED
            else:
                yield dotted, value, _REASONS.get(dotted, _CLOSED if section == "spawn" else _SEED)
    if manifest.permissions.skills.allow:
        if "permissions.skills.calls" not in written:
            yield "permissions.skills.calls", None, _UNLIMITED
        for key in ("calls_per_minute", "call_ms", "argument_bytes", "answer_bytes"):
            dotted = f"permissions.skills.{key}"
            if dotted not in written:
                yield dotted, getattr(manifest.permissions.skills, key), "default ceiling"
    if not manifest.wrote("lifetime"):
        yield "lifetime", None, "absent: the run ends with its task"
    elif not manifest.wrote("lifetime.on_expiry"):
        yield "lifetime.on_expiry", manifest.lifetime.on_expiry, "default"
    if manifest.permissions.syscalls.profile is None and manifest.agent.runtime != "hermes":
        yield "permissions.syscalls.profile", None, "absent: the runtime's own profile"
