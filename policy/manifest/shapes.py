"""JSON Schema of each check of a manifest's values: a fragment for each validator and each rule.

A fragment accepts each value that its validator accepts, and as little else as its language allows
(tests/property/policy/manifest/test_schema.py); ``LEFT`` names what is left to the parser. Patterns keep to what ECMA
262 and Python read alike: no look-behind, no Unicode properties, nothing outside the basic plane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policy.manifest import agent, fields, hosts, paths, permissions, process, services, text, workspace
from policy.manifest.tools import command, skill_rules, tool_uri
from policy.package import INVISIBLE
from policy.ssh import wire

Fragment = dict[str, Any]

# Controls, formats (bidi, zero width), separators and private use of the basic plane, as of Unicode 15.
HIDDEN = (
    r"\u0000-\u001f\u007f-\u009f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f"
    r"\u2028-\u202e\u2060-\u2064\u2066-\u206f\ue000-\uf8ff\ufeff\ufff9-\ufffb"
)
_SPACES = r"\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"


def _escaped(characters: str) -> str:
    return "".join(f"\\u{ord(ch):04x}" for ch in sorted(characters) if ord(ch) < 0x10000)


_NO_PATH = HIDDEN + _SPACES + _escaped("".join(INVISIBLE) + "".join(paths.LOOK_ALIKES)) + r"\u005c"
# Neither `.` nor `..`, without outer spaces; at most 255 bytes, which are at least as many as characters.
_COMPONENT = rf"(?!\.{{1,2}}(?:/|$)| )[^/{_NO_PATH}GLOB]{{0,254}}[^ /{_NO_PATH}GLOB]"
_ABSOLUTE = rf"(?:/{_COMPONENT})+".replace("GLOB", r"*?\[\]{}")
_RELATIVE = rf"(?![A-Za-z]:)(?:\./)?(?!-){_COMPONENT}(?:/{_COMPONENT})*".replace("GLOB", "")
_DIGEST = r"@sha256:(?!([0-9a-f])\1{63})[0-9a-f]{64}"

_LABEL = r"(?![a-wyz0-9][a-z0-9-]--|x[a-mo-z0-9-]--)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME = rf"(?:\*\.)?(?:{_LABEL}\.)+(?!(?:[0-9]+|0x[0-9a-f]*|localhost)$){_LABEL}"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_V4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_V6 = r"(?=[0-9a-f:]*:)[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,8}"
_NO_V4 = r"(?!2(?:2[4-9]|3[0-9])\.|0\.0\.0\.0$|255\.255\.255\.255$)"  # multicast, unspecified, broadcast
_NO_V6 = r"(?!ff[0-9a-f]{2}:|::$|::ffff:[0-9a-f]{1,4}:[0-9a-f]{1,4}$)"  # and IPv4 written as IPv6
_PORT = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"


def whole(pattern: str) -> str:
    """A pattern that holds for the whole string: JSON Schema looks for it anywhere."""
    return f"^(?:{pattern})$"


def unpinned() -> str:
    """A whole version that pins nothing: a word that moves, no digit, a range."""
    moving = "|".join("".join(f"[{ch}{ch.upper()}]" for ch in word) for word in tool_uri.MOVING)
    return f"(?:{moving}|[^0-9]*|(?:.*[.])?[xX](?:[.+-].*)?)$"


def _any(*patterns: str) -> Fragment:
    return {"pattern": whole("|".join(patterns))}


_VISIBLE: Fragment = {"pattern": whole(f"[^{HIDDEN}]*")}
_SCALAR: Fragment = {
    "type": ["string", "integer", "boolean"],
    "maxLength": text.STRING_CHARACTERS,
    "minimum": -(2**63) + 1,
    "maximum": 2**63 - 1,
    **_VISIBLE,
}
_PLAIN: Fragment = {
    "minLength": 1,
    "maxLength": text.STRING_CHARACTERS,
    "allOf": [_VISIBLE, {"pattern": r"\S"}],
}

VALIDATORS: dict[Callable[..., Any], Fragment] = {
    text.plain: _PLAIN,
    text.unhidden: _VISIBLE,
    agent._id: {"pattern": r"[^.]", "not": {"const": services.PROVIDERS_ID}},  # noqa: SLF001 - the checks of the same room, by themselves
    fields.unique: {"uniqueItems": True},
    services._unique_providers: {"uniqueItems": True},  # noqa: SLF001
    paths.absolute: {"maxLength": text.STRING_CHARACTERS, **_any(_ABSOLUTE)},
    hosts.check: {
        "maxLength": hosts.NAME_CHARACTERS + 2,
        **_any(
            _NAME,
            f"{_NO_V4}{_V4}",
            f"{_NO_V6}{_V6}",
            rf"{_V4}/(?:[1-9]|[12][0-9]|3[01])",
            rf"{_V6}/(?:[1-9]|[1-9][0-9]|1[01][0-9]|12[0-7])",
        ),
    },
    tool_uri.check: {
        **_any(tool_uri.PATTERN),
        "not": {"pattern": f"@{unpinned()}"},
    },
    hosts.port_ranges: {
        "type": "array",
        "minItems": 1,
        "maxItems": hosts.RANGES,
        "uniqueItems": True,
        "items": {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": 65535},
                {"type": "string", **_any(f"{_PORT}-{_PORT}")},
            ]
        },
    },
    permissions.path_or_volume: {
        "maxLength": text.STRING_CHARACTERS,
        **_any(_ABSOLUTE, f"{permissions.VOLUME_PATTERN}{_ABSOLUTE}"),
    },
    permissions.volume_name: {"type": "string", "pattern": whole(permissions.VOLUME_NAME.pattern)},
    permissions._executable: {  # noqa: SLF001
        "type": "string",
        "anyOf": [_any(f"(?!.*@[sS][hH][aA]){_ABSOLUTE}"), _any(f"{_ABSOLUTE}{_DIGEST}"), _any(process.TREE)],
    },
    process.argument: {"maxLength": process.ARGUMENT_CHARACTERS, "pattern": whole(f"(?:[\\t\\n]|[^{HIDDEN}])*")},
    process._environment: {  # noqa: SLF001
        "type": "object",
        "maxProperties": fields.LIST_ITEMS,
        "propertyNames": {"pattern": whole(process.VARIABLE)},
        "additionalProperties": {
            "type": "string",
            "maxLength": process.ARGUMENT_CHARACTERS,
            "pattern": whole(f"(?:[\\t\\n]|[^{HIDDEN}])*"),
        },
    },
    workspace.pattern: {
        "type": "string",
        "minLength": 1,
        "maxLength": workspace.PATTERN_CHARACTERS,
        "allOf": [_PLAIN],
        **_any(r"(?!.*(?:^|/)\.{1,2}(?:/|$))(?!.*\*\*[^/])(?!.*[^/]\*\*)[^\[\]{}\\/]+(?:/[^\[\]{}\\/]+)*"),
    },
    skill_rules.scalar: _SCALAR,
    skill_rules.scalars: {
        "type": "array",
        "minItems": 1,
        "maxItems": fields.LIST_ITEMS,
        "uniqueItems": True,
        "items": _SCALAR,
    },
    skill_rules.pattern_of: {"minLength": 1, "maxLength": skill_rules.PATTERN_CHARACTERS, **_VISIBLE},
    skill_rules.asked: {"uniqueItems": True},
    skill_rules.checked: {
        "uniqueItems": True,
        "items": {"oneOf": [{"required": [form]} for form in ("equals", "matches", "one_of")]},
    },
    command.word: {"type": "string", "maxLength": text.STRING_CHARACTERS, **_VISIBLE},
    command.ruled: {
        "uniqueItems": True,
        "items": {"oneOf": [{"required": [form]} for form in ("equals", "matches", "one_of")]},
    },
    command.unique_names: {"uniqueItems": True},
    services.place: {
        "type": "string",
        **_any(f"{services.UNIX}{_ABSOLUTE}", rf"127\.0\.0\.1:{services.PORT}"),
        "maxLength": len(services.UNIX) + services.PATH_BYTES,
    },
    services.unique_ports: {"uniqueItems": True},
    services.fetched: {"maxLength": hosts.NAME_CHARACTERS + 2, **_any(_NAME)},
    services.ssh_host: {
        "maxLength": hosts.NAME_CHARACTERS,
        **_any(_NAME, f"{_NO_V4}{_V4}", f"{_NO_V6}{_V6}"),
        "not": {"pattern": r"^\*"},
    },
    services.ssh_key: {
        "maxLength": wire.LINE_CHARACTERS,
        **_any(rf"(?:{'|'.join(wire.TYPES)}) [A-Za-z0-9+/]{{60,}}={{0,2}}"),
    },
    permissions._unique_paths: {"uniqueItems": True},  # noqa: SLF001
    permissions._unique_entries: {"uniqueItems": True},  # noqa: SLF001
}
"""The JSON Schema of each validator of a value."""

# Methods of a model that check a field against another: the rule that says the same, below.
DECORATED = {("Agent", "_inside_the_package"): agent._entry}  # noqa: SLF001


def _section(name: str, **keys: Fragment) -> Fragment:
    return {"properties": {name: {"properties": keys}}}


def _without(section: str, *keys: str) -> Fragment:
    """None of these keys of a section is written."""
    return {"properties": {section: {"not": {"anyOf": [{"required": [key]} for key in keys]}}}}


def _written(name: str, **keys: Fragment) -> Fragment:
    """Holds when each of the keys is written in the section and is so."""
    return {"required": [name], "properties": {name: {"required": [*keys], "properties": keys}}}


def _domain(name: str, **keys: Fragment) -> Fragment:
    return _section("permissions", **{name: {"properties": keys}})


def _when(condition: Fragment, then: Fragment, otherwise: Fragment | None = None) -> Fragment:
    return {"if": condition, "then": then} | ({"else": otherwise} if otherwise else {})


_IS: Callable[[Any], Fragment] = lambda value: {"const": value}  # noqa: E731 - a word, not a procedure
_GVISOR = _written("sandbox", backend=_IS("linux-gvisor"))
_HERMES = _written("agent", runtime=_IS("hermes"))
_VOLUME = _written("workspace", mode=_IS("volume"))
_AT_LEAST_ONE = {"minimum": 1}
_ITEMS = {"minItems": 1}
_TO_HOST: Fragment = {"properties": {"host": _IS(permissions.HOST_NAME)}}
_HTTPS: Fragment = {"properties": {"ports": _IS([443]), "protocol": _IS("tls")}}
_ASKED: Fragment = {"required": ["on_deny"], "properties": {"on_deny": {"const": "ask"}}}
_ASKS: Fragment = _when(
    _ASKED,
    {"properties": {"protocol": {"const": "tls"}, "host": _any(_NAME)}, "not": {"required": ["inject"]}},
    {"not": {"required": ["ask_seconds"]}},
)
_INJECT: Fragment = {
    "properties": {
        "methods": _ITEMS,
        "paths": _ITEMS,
        "env": {"not": {"enum": sorted({*process.NEVER_SET, *process.TRUST_VARIABLES})}},
    },
    **_when({"not": _ASKED}, {"not": {"required": ["ask_seconds"]}}),
}

_NO_DESTINATION: Fragment = {"not": {"anyOf": [{"required": ["ports"]}, {"required": ["protocol"]}]}}

RULES: dict[Callable[..., Any], tuple[Fragment, ...]] = {
    agent._entry: (  # noqa: SLF001
        _when(
            _written("agent", runtime={"enum": sorted(agent.SUBPROCESS_RUNTIMES - {"command"})}),
            _written("agent", entry={"minLength": 1, "maxLength": text.STRING_CHARACTERS, **_any(_RELATIVE)}),
        ),
        _when(
            _written("agent", runtime=_IS("command")),
            _written(
                "agent", entry={"minLength": 1, "maxLength": text.STRING_CHARACTERS, **_any(_RELATIVE, _ABSOLUTE)}
            ),
        ),
    ),
    agent._sandbox: (  # noqa: SLF001
        _when(_written("sandbox", required=_IS(True)), _GVISOR),
        _when(_written("sandbox", standby=_AT_LEAST_ONE), _GVISOR),
    ),
    agent._hermes: (  # noqa: SLF001
        _when(
            _HERMES,
            {
                "properties": {
                    "permissions": {"maxProperties": 0},
                    "sandbox": {"properties": {"required": _IS(False)}},
                    "hermes": {
                        "properties": {
                            "approval_policy": {"enum": [*agent.APPROVAL_POLICIES]},
                            "tools_allowed": {"items": _PLAIN},
                        }
                    },
                }
            },
        ),
    ),
    agent._network: (  # noqa: SLF001
        _when(
            _written("resources", network=_IS("off")),
            _section("permissions", network={"items": _TO_HOST}),
            _section("permissions", network={"minItems": 1}),
        ),
        _when(
            {"not": _written("resources", network={"enum": ["off", "full"]})},
            _section("permissions", network={"items": {"anyOf": [_TO_HOST, _HTTPS]}}),
        ),
        _section(
            "permissions",
            network={
                "items": {
                    "allOf": [
                        _when({"required": ["inject"]}, {"properties": {"protocol": _IS("tls")}}),
                        _when(_TO_HOST, {"properties": {"protocol": _IS("tcp")}}),
                        _ASKS,
                    ],
                    "properties": {"inject": _INJECT},
                }
            },
        ),
    ),
    agent._filesystem: (  # noqa: SLF001
        _when(
            _written("sandbox", filesystem=_IS("host")),
            {},
            _domain("filesystem", write={"maxItems": 0}),
        ),
        _when(
            _written("sandbox", filesystem={"enum": ["ephemeral", "host"]}),
            _section("resources", disk_mb=_AT_LEAST_ONE),
        ),
    ),
    agent.syscalls: (),
    agent._spawn: (  # noqa: SLF001
        _when(
            _written("spawn", allowed=_IS(True)),
            _written("spawn", max_depth=_AT_LEAST_ONE, max_descendants=_AT_LEAST_ONE),
            _section("spawn", max_depth={"maximum": 0}, max_descendants={"maximum": 0}, may_grant={"maxItems": 0}),
        ),
        _section(
            "spawn",
            may_grant={
                "items": {
                    "oneOf": [
                        {
                            "required": ["host", "ports", "protocol"],
                            "properties": {"host": {"not": _IS(permissions.HOST_NAME)}},
                        },
                        {"required": ["read"], **_NO_DESTINATION},
                        {"required": ["secret"], **_NO_DESTINATION},
                    ],
                }
            },
        ),
    ),
    agent._tools: (  # noqa: SLF001
        _domain("skills", allow={"items": {"not": {"pattern": f"^{command.PREFIX}"}}}),
        _when(
            _written("tools", command=_ITEMS),
            {
                **_GVISOR,
                "allOf": [
                    _written("spawn", allowed=_IS(True)),
                    {
                        "required": ["permissions"],
                        "properties": {
                            "permissions": {
                                "required": ["skills"],
                                "properties": {
                                    "skills": {
                                        "required": ["side_effects"],
                                        "properties": {"side_effects": {"contains": _IS("shell")}},
                                    }
                                },
                            }
                        },
                    },
                ],
            },
        ),
    ),
    agent._process: (  # noqa: SLF001
        _when(
            {"anyOf": [{"required": ["process"]}, {"required": ["root"]}, {"required": ["workspace"]}]},
            {"not": _HERMES, **_GVISOR},
        ),
        _when(_written("agent", runtime=_IS("command")), _GVISOR),
        _when(
            _written("process", contract={"enum": ["text", "stdio", "terminal"]}),
            _section("sandbox", standby={"maximum": 0}),
        ),
        _when(
            {"not": _written("process", contract=_IS("text"))},
            _section("process", args={"items": {"not": {"pattern": r"\{intent\}"}}}),
        ),
        _section("process", env={"propertyNames": {"not": {"enum": sorted(process.NEVER_SET)}}}),
        _when(
            {"not": _written("process", contract={"enum": ["text", "stdio", "terminal"]})},
            _section("process", env={"propertyNames": {"not": {"pattern": f"^(?:{'|'.join(process.OURS)})"}}}),
        ),
    ),
    agent._services: (  # noqa: SLF001
        _when({"anyOf": [{"required": ["services"]}, {"required": ["publish"]}]}, _GVISOR),
        _section(
            "services",
            models={
                "required": ["allow"],
                "properties": {"allow": {"items": {"properties": {"models": _ITEMS}}, **_ITEMS}},
            },
            search={"required": ["allow"], "properties": {"allow": _ITEMS}},
            agents={"required": ["allow"], "properties": {"allow": {**_ITEMS, "maxItems": services.AGENTS}}},
            telemetry={"required": ["signals"], "properties": {"signals": _ITEMS}},
            fetch={"required": ["hosts"], "properties": {"hosts": _ITEMS}},
            ssh_agent={
                "maxItems": services.SSH_KEYS,
                "items": {
                    "properties": {
                        "hosts": {
                            "maxItems": services.SSH_HOSTS,
                            "items": {"properties": {"keys": _ITEMS}},
                            **_ITEMS,
                        }
                    }
                },
            },
        ),
        _when(
            _written("services", ssh_agent=_ITEMS),
            {
                "allOf": [
                    _written("sandbox", filesystem={"enum": ["ephemeral", "host"]}),
                    _written("permissions", executables=_written("", allow=_ITEMS)["properties"][""]),
                ]
            },
        ),
    ),
    agent._trees: (  # noqa: SLF001
        _when(
            {"not": _written("workspace", exec=_IS(True))},
            _domain("executables", allow={"items": {"not": _IS("workspace")}}),
        ),
    ),
    agent._dev_shm: (  # noqa: SLF001
        _when(
            _written("sandbox", dev_shm_mb=_AT_LEAST_ONE),
            _written("sandbox", filesystem={"enum": ["ephemeral", "host"]}),
        ),
    ),
    agent._workspace: (  # noqa: SLF001
        _when(
            {"allOf": [{"required": ["workspace"]}, {"not": _VOLUME}]},
            {
                **_written("sandbox", filesystem={"enum": ["ephemeral", "host"]}),
                "allOf": [
                    _written("workspace", mode=_IS("overlay"), **{"from": {"minItems": 1}}),
                    _without("workspace", "volume"),
                ],
            },
        ),
        _when(
            _VOLUME,
            {
                **_written("sandbox", filesystem=_IS("host")),
                "allOf": [
                    _written("workspace", volume={}),
                    _without("workspace", "from", "mask", "protect", "max_mb", "apply"),
                ],
            },
        ),
        _when(
            _written("workspace", exec=_IS(True)),
            {
                "required": ["permissions"],
                "properties": {
                    "permissions": {
                        "required": ["executables"],
                        "properties": {
                            "executables": {
                                "required": ["allow"],
                                "properties": {"allow": {"contains": _IS("workspace")}},
                            }
                        },
                    }
                },
            },
        ),
    ),
    agent._lifetime: (  # noqa: SLF001
        {
            "properties": {
                "lifetime": {
                    "oneOf": [
                        {"required": ["ttl_seconds"]},
                        {"required": ["unlimited"], "properties": {"unlimited": _IS(True)}},
                    ]
                }
            }
        },
    ),
}
"""The JSON Schema of each rule across sections."""

LEFT = (
    "the size of the file, its encoding, its number of keys and its depth",
    "an integer written as a float without a fraction, such as 20.0",
    (
        "lengths that count bytes, labels that are no punycode, Unicode form NFC, words of two alphabets, letters in"
        " another dress, characters outside the basic plane"
    ),
    "the one spelling of an IPv6 address or a block, and bits outside a block's prefix",
    "port ranges that run backwards or overlap, and two network entries that differ only in the order of their ports",
    "ports of host.covenant below 1024, 8443, or more than 8, and the backend that they need",
    "an executable listed twice, once with a digest",
    "two layers of one name, a tree of programs that is not in the root, a variable with the name of a secret",
    "two ports of [[publish]] that are equal, or two places, and a path of a socket that is longer in bytes",
    "a secret that is added to a pattern, an address, or one host twice; a placeholder with the name of a variable",
    "two items of services.models.allow for one provider",
    "the bytes of a key of a host, a secret of services.ssh_agent or a host of one that is written twice",
    "two commands of one name, two rights for children that are equal, and a gap between positions that have rules",
    "a dev_shm_mb or a workspace that leaves nothing of disk_mb",
    "a volume or a place of one that is named twice, and shared where nothing is written",
    "whether a pattern of a rule is one of RE2, and a rule or a question about a tool that is not granted",
    "a system call that is both allowed and denied, and whether profiles, calls and roles exist",
    "an unknown section that is within two edits of a known one",
)
"""The checks of the parser that a schema cannot express."""
