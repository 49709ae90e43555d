"""``[process]`` and ``[root]``: how an agent's program is started and speaks, and the root that it lives in.

Sources: design.md (sections "How an agent speaks" and "What an agent lives in"), decisions.md ("Settled for real
agents").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator

from policy.layers import LayerRef, parse_ref
from policy.manifest import fields, paths, text

says = fields.says

Contract = Literal["line", "text", "stdio", "terminal"]
WORKSPACE: Final = "/workspace"
# Stands in an argument for the intent's text.
INTENT: Final = "{intent}"
CLOSURE: Final = "closure"
# A tree of files that may all be started: the whole root, or one layer of it.
ROOT_TREE: Final = "root"
LAYER_TREE: Final = "layer:"

ARGUMENT_CHARACTERS: Final = 16_384
_LAYER_NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
LAYER = rf"{_LAYER_NAME}@sha256:[0-9a-f]{{64}}"
BASE = rf"closure|{LAYER}"
TREE = rf"root|workspace|layer:{_LAYER_NAME}"
_LAYER_RULE = "write NAME@sha256: and the 64 hex digits that `covenant layer list` shows"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
# What the run itself says, and what would put code of another into every program.
NEVER_SET: Final = frozenset({"COVENANT_RUN_ID", "CREDENTIALS_DIRECTORY", "LD_AUDIT", "LD_PRELOAD", "TMPDIR"})
# What changes a loader or an interpreter of ours, under the contract of an agent that is written for Covenant.
OURS = ("LD_", "PYTHON", "NODE_", "GCONV_PATH", "GLIBC_TUNABLES")
# What a program is told of the authority of the run, beside what it trusts by itself.
TRUST_FILE: Final = "/run/covenant/ca.pem"
TRUST_VARIABLES: Final = (
    *("AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "CURL_CA_BUNDLE", "DENO_CERT", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS"),
    *("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"),
)
PLACEHOLDER: Final = "covenant-placeholder"


def inject_variables(placeholders: Iterable[tuple[str, str]], hosts: Collection[str]) -> dict[str, str]:
    """The variables of a run whose gate adds secrets at ``hosts``: where the run's authority is, and placeholders."""
    if not hosts:
        return {}
    trust = dict.fromkeys(TRUST_VARIABLES, TRUST_FILE)
    return {**trust, **{name: PLACEHOLDER for host, name in placeholders if name and host in hosts}}


def argument(value: str) -> str:
    """Accept text of at most 16,384 characters; lines and tabs are its only controls.

    Raises:
        PydanticCustomError: it is longer, or holds a hidden character.
    """
    if len(value) > ARGUMENT_CHARACTERS:
        message = f"{text.quote(value)} has {len(value)} characters"
        raise text.wrong(message, f"at most {ARGUMENT_CHARACTERS} are accepted")
    text.unhidden(value.replace("\n", " ").replace("\t", " "))
    return value


def _environment(value: Any) -> Any:
    """Turn a table of strings into sorted pairs."""
    if isinstance(value, tuple):
        return value
    hint = 'write env = { NAME = "value" }'
    if not isinstance(value, dict):
        raise text.wrong(f"env {text.quote(value)} is no table", hint)
    if len(value) > fields.LIST_ITEMS:
        raise text.wrong(f"env has {len(value)} variables", f"at most {fields.LIST_ITEMS} are accepted")
    for name, content in value.items():
        if not re.fullmatch(VARIABLE, name):
            raise text.wrong(
                f"variable {text.quote(name)} is not accepted", "A-Z a-z 0-9 and `_`, no digit first", at=name
            )
        if not isinstance(content, str):
            raise text.wrong(f"variable {text.quote(name)} is {text.kind_of(content)}", hint, at=name)
        argument(content)
    return tuple(sorted(value.items()))


class Process(fields.Section):
    """``[process]``: how the program is started, and how it takes intents and gives answers."""

    args: Annotated[
        tuple[Annotated[str, AfterValidator(argument)], ...],
        fields.LIST,
        says("arguments after the program; `{intent}` stands for the intent's text, with the contract text"),
    ] = ()
    env: Annotated[
        tuple[tuple[str, str], ...],
        BeforeValidator(_environment),
        says('environment variables, `{ NAME = "value" }`; literals that every reader of the manifest sees'),
    ] = ()
    cwd: Annotated[str, AfterValidator(paths.absolute), says("working directory, a path of the agent's root")] = (
        WORKSPACE
    )
    contract: Annotated[
        Contract,
        says(
            "line: one JSON line in, one out; text: the intent on stdin or as an argument, stdout is the answer; "
            "stdio: two streams; terminal: a terminal"
        ),
    ] = "line"


Layer = Annotated[str, AfterValidator(text.Matching("layer", LAYER, _LAYER_RULE))]


class Root(fields.Section):
    """``[root]``: the files that the agent finds. Absent, the files that its runtime needs."""

    base: Annotated[
        str,
        AfterValidator(text.Matching("base", BASE, f'write "closure", or {_LAYER_RULE}')),
        says("closure: the files that the runtime needs; or a layer with a whole system, by name and digest"),
    ] = CLOSURE
    layers: Annotated[
        tuple[Layer, ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says("layers over the base, the lowest first, by name and digest"),
    ] = ()

    @property
    def stack(self) -> tuple[LayerRef, ...]:
        """The layers of the root, the base first where it is one."""
        below = () if self.base == CLOSURE else (self.base,)
        return tuple(parse_ref(one) for one in (*below, *self.layers))


def refused_variables(process: Process) -> Iterator[tuple[str, str]]:
    """Yield each variable that this contract may not set, with the fix."""
    for name, _ in process.env:
        if name in NEVER_SET:
            yield name, "take it out: no manifest sets it"
        elif process.contract == "line" and name.startswith(OURS):
            yield name, 'take it out, or write contract = "text", under which the program is its own affair'
