"""Defaults, what was written, unknown sections, and each rule that accepts or refuses a manifest."""

from __future__ import annotations

import dataclasses
import pathlib

import pydantic
import pytest

from policy import errors
from policy.manifest import agent, parse

FULL = (pathlib.Path(__file__).resolve().parents[3] / "golden" / "manifest" / "full.toml").read_text()
LEAST = """\
[agent]
id = "a"
name = "A"
version = "1"
runtime = "python3"
entry = "main.py"
"""


def accept(document: str) -> agent.Manifest:
    return parse.parse(document.encode())


def refuse(document: str | bytes) -> errors.ManifestError:
    raw = document if isinstance(document, bytes) else document.encode()
    with pytest.raises(errors.ManifestError) as caught:
        parse.parse(raw)
    return caught.value


def spoiled(old: str, new: str) -> str:
    assert FULL.count(old) >= 1, f"{old!r} is not in full.toml"
    return FULL.replace(old, new, 1)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One slip: ``old`` becomes ``new``; the error is on the line of ``at`` and says ``message``, ``hint``."""

    name: str
    old: str
    new: str
    message: str
    hint: str
    at: str = ""

    def line(self, document: str) -> int:
        at = self.at or self.new.strip("\n").split("\n", maxsplit=1)[0]
        return document[: document.index(at)].count("\n") + 1


R = Refusal
AGENT = (
    R("id empty", 'id = "full"', 'id = ""', "the agent id is empty", "1 to 128"),
    R("id with @", 'id = "full"', 'id = "full@host"', "`full@host`", "no `@`"),
    R("id not ASCII", 'id = "full"', 'id = "füll"', "`füll`", "A-Z a-z 0-9"),
    R("id with newline", 'id = "full"', 'id = "full\\n"', "`full\\n`", "A-Z a-z 0-9"),
    R("id of dots", 'id = "full"', 'id = ".."', "only dots", "name"),
    R("id too long", 'id = "full"', f'id = "{"x" * 129}"', "agent id", "1 to 128"),
    R("id missing", 'id = "full"\n', "", "`agent.id` is missing", "no default", at="[agent]"),
    R("name missing", 'name = "Full"\n', "", "`agent.name` is missing", "no default", at="[agent]"),
    R("name empty", 'name = "Full"', 'name = ""', "empty", "value"),
    R("name of spaces", 'name = "Full"', 'name = "  "', "only spaces", "value"),
    R("name with bidi", 'name = "Full"', 'name = "a\\u202eb"', "`a\\u202eb`", "remove"),
    R("name with NUL", 'name = "Full"', 'name = "a\\u0000b"', "U+0000", "remove"),
    R("name with escape", 'name = "Full"', 'name = "\\u001b[2J"', "U+001B", "remove"),
    R("name too long", 'name = "Full"', f'name = "{"x" * 1025}"', "1025 characters", "1024"),
    R("version empty", 'version = "1.2.3"', 'version = ""', "empty", "value"),
    R("version a float", 'version = "1.2.3"', "version = 1.2", "`1.2` is a float", "quotes"),
    R("version a date", 'version = "1.2.3"', "version = 2026-01-31", "is a date", "quotes"),
    R("runtime unknown", 'runtime = "python3"', 'runtime = "ruby"', "`ruby` is not known", "rust-bin"),
    R("runtime in capitals", 'runtime = "python3"', 'runtime = "Python3"', "`Python3`", "did you mean `python3`"),
    R("runtime no string", 'runtime = "python3"', "runtime = 3", "`3` is not a string", "python3"),
    R("runtime misspelt", 'runtime = "python3"', 'runtime = "rustbin"', "`rustbin`", "did you mean `rust-bin`"),
    R("entry missing", 'entry = "src/main.py"\n', "", "`agent.entry` is missing", "program", at="[agent]"),
    R("entry empty", 'entry = "src/main.py"', 'entry = ""', "empty", "value"),
    R("entry absolute", 'entry = "src/main.py"', 'entry = "/bin/sh"', "`/bin/sh` is absolute", "package"),
    R("entry with drive", 'entry = "src/main.py"', 'entry = "C:main.py"', "`C:main.py` is absolute", "package"),
    R("entry climbing", 'entry = "src/main.py"', 'entry = "src/../../x"', "`..`", "package"),
    R("entry an option", 'entry = "src/main.py"', 'entry = "-c"', "begins with `-`", "option"),
    R("entry hidden option", 'entry = "src/main.py"', 'entry = "./-c"', "begins with `-`", "option"),
    R("entry not normal", 'entry = "src/main.py"', 'entry = "src//main.py"', "not normalised", "`src/main.py`"),
    R("entry backslash", 'entry = "src/main.py"', "entry = 'src\\main.py'", "backslash", "`/`"),
    R("role odd", 'role = "reader"', 'role = "The Reader"', "`The Reader`", "a-z"),
    R("operator odd", 'operator = "alice"', 'operator = "-alice"', "`-alice`", "trust root"),
)
CAPABILITIES = (
    R("action outside", '["tool.web_search"]', '["chain.pay"]', "`chain.pay`", "`intent.`"),
    R("action bare namespace", '["tool.web_search"]', '["tool."]', "`tool.`", "`intent.`"),
    R("action look-alike", '["tool.web_search"]', '["toolx.y"]', "`toolx.y`", "`intent.`"),
    R("action no string", '["tool.web_search"]', "[1]", "`1` is an integer", "quotes"),
    R("actions no array", '["tool.web_search"]', '"tool.web_search"', "is a string, not an array", "[ ]"),
    R("action twice", '"memory.read"]', '"intent.subscribe"]', "`intent.subscribe` is listed twice", "keep one"),
    R(
        "too many actions",
        '["tool.web_search"]',
        str([f"tool.a{n}" for n in range(257)]).replace("'", '"'),
        "capabilities.optional has 257 items",
        "256",
    ),
)


def _range(key: str, value: int, low: int, high: int) -> tuple[Refusal, ...]:
    old = f"{key} = {value}"
    return (
        R(f"{key} below", old, f"{key} = {low - 1}", f"{key} `{low - 1}` is out of range", f"from {low} to {high}"),
        R(f"{key} above", old, f"{key} = {high + 1}", f"{key} `{high + 1}` is out of range", f"from {low} to"),
        R(f"{key} a float", old, f"{key} = {value}.0", f"`{value}.0` is a float", "whole number"),
        R(f"{key} a boolean", old, f"{key} = true", "`true` is a boolean", "whole number"),
        R(f"{key} a string", old, f'{key} = "{value}"', f"`{value}` is a string", "whole number"),
        R(f"{key} beyond 64 bit", old, f"{key} = {2**64}", "is out of range", f"from {low} to"),
        R(f"{key} beyond 128 bit", old, f"{key} = 0x1{'0' * 99}", "an integer of 397 bits", f"from {low} to"),
    )


MIB, YEAR = 16 * 1024 * 1024, 365 * 86_400
RESOURCES = (
    *_range("cpu_ms_per_task", 20000, 1, 7 * 86_400_000),
    *_range("memory_mb", 256, 1, MIB),
    *_range("disk_mb", 64, 0, MIB),
    *_range("pids_max", 32, 1, 4_194_304),
    *_range("cpu_millis", 500, 10, 1_024_000),
    *_range("cpu_weight", 200, 1, 10_000),
    *_range("cpu_time_ms", 10000, 1, YEAR * 1000),
    *_range("swap_mb", 16, 0, MIB),
    *_range("io_read_bps", 1000000, 1, 10**12),
    *_range("io_write_bps", 2000000, 1, 10**12),
    *_range("io_read_iops", 100, 1, 10**9),
    *_range("io_write_iops", 200, 1, 10**9),
    *_range("net_bps", 500000, 1, 10**12),
    *_range("standby", 2, 0, 64),
    *_range("budget_credits_per_hour", 10, 0, 2**63 - 1),
    *_range("max_depth", 2, 0, 32),
    *_range("max_descendants", 5, 0, 10_000),
    *_range("ttl_seconds", 600, 1, YEAR),
    R("network unknown", 'network = "full"', 'network = "on"', "`on` is not known", "outbound-https-only"),
    R("network a boolean", 'network = "full"', "network = false", "`false` is not a string", "off"),
    R("tmpfs without a limit", "disk_mb = 64", "disk_mb = 0", "disk_mb is `0`", "at least 1"),
)
SECTIONS = (
    R("required no boolean", "required = true", "required = 1", "`1` is an integer, not a boolean", "true or"),
    R("required a string", "required = true", 'required = "true"', "is a string, not a boolean", "true or"),
    R("backend unknown", '"linux-gvisor"', '"gvisor"', "`gvisor` is not known", "linux-gvisor", at="backend"),
    R("filesystem unknown", 'filesystem = "host"', 'filesystem = "hots"', "`hots`", "did you mean `host`"),
    R("priority unknown", 'priority = "high"', 'priority = "urgent"', "`urgent`", "low, normal, high"),
    R("hermes tool no string", '["terminal"]', "[1]", "is an integer, not a string", "quotes", at="tools_allowed"),
    R("hermes policy no string", 'policy = "auto-deny"', "policy = 1", "`1` is an integer", "quotes", at="approval"),
    R("on_parent_exit unknown", '"wind-down"', '"winddown"', "`winddown`", "did you mean `wind-down`", at="on_p"),
    R("on_expiry unknown", '"suspend"', '"sleep"', "`sleep`", "terminate, suspend", at="on_expiry"),
)
PERMISSIONS = (
    R("path relative", '"/srv/data"', '"srv/data"', "`srv/data` is not absolute", "begin it with `/`"),
    R("path of home", '"/srv/data"', '"~/data"', "not absolute", "nothing is expanded"),
    R("path is root", '"/srv/data"', '"/"', "whole root", "directories"),
    R("path is roots", '"/srv/data"', '"//"', "whole root", "directories"),
    R("path with ..", '"/srv/data"', '"/srv/../etc"', "not normalised", "`/etc`"),
    R("path with .", '"/srv/data"', '"/srv/./data"', "not normalised", "`/srv/data`"),
    R("path with //", '"/srv/data"', '"/srv//data"', "not normalised", "`/srv/data`"),
    R("path with end slash", '"/srv/data"', '"/srv/data/"', "not normalised", "`/srv/data`"),
    R("path with NUL", '"/srv/data"', '"/srv/\\u0000"', "U+0000", "remove"),
    R("path with newline", '"/srv/data"', '"/srv/\\n"', "U+000A", "remove"),
    R("path with bidi", '"/srv/data"', '"/srv/\\u2066x"', "U+2066", "remove"),
    R("path with zero width", '"/srv/data"', '"/srv/da\\u200bta"', "U+200B", "remove"),
    R("path with variation selector", '"/srv/data"', '"/srv/data\\ufe0f"', "U+FE0F", "remove"),
    R("entry that shows as another", 'entry = "src/main.py"', 'entry = "src/main\\u3164.py"', "U+3164", "remove"),
    R("path not NFC", '"/srv/data"', '"/srv/e\\u0301"', "NFC", "\\xe9"),
    R("path division slash", '"/srv/data"', '"/srv\\u2215data"', "U+2215", "`/srv/data`"),
    R("path fraction slash", '"/srv/data"', '"/srv\\u2044data"', "U+2044", "`/srv/data`"),
    R("path full-width slash", '"/srv/data"', '"/srv\\uff0fdata"', "U+FF0F", "`/srv/data`"),
    R("path two-dot leader", '"/srv/data"', '"/srv/\\u2025/x"', "U+2025", "`/srv/../x`"),
    R("path odd space", '"/srv/data"', '"/srv/a\\u00a0b"', "U+00A0", "ordinary space"),
    R("path outer space", '"/srv/data"', '"/srv/data "', "outer spaces", "remove"),
    R("path wildcard", '"/srv/data"', '"/srv/*"', "wildcard", "directory"),
    R("path backslash", '"/srv/data"', "'/srv\\data'", "backslash", "`/`"),
    R("path long component", '"/srv/data"', f'"/{"x" * 256}"', "component", "255"),
    R("path too long", '"/srv/data"', f'"{"/xx" * 400}"', "1200 characters", "1024"),
    R("path twice", '"/srv/data"', '"/usr/share/doc"', "`/usr/share/doc` is listed twice", "keep one", at="read ="),
    R("host a URL", '"api.example.com"', '"https://a.com"', "is a URL", "only the host"),
    R("host with port", '"api.example.com"', '"a.com:443"', "has a port", "ports"),
    R("host missing", 'host = "api.example.com"\n', "", "host` is missing", "no default", at="[[permissions.network]]"),
    R("ports missing", "ports = [443]\n", "", "ports` is missing", "no default", at="[[permissions.network]]"),
    R("protocol missing", 'protocol = "tls"\n', "", "missing", "no default", at="[[permissions.network]]"),
    R("protocol unknown", 'protocol = "tls"', 'protocol = "http"', "`http` is not known", "tls, tcp, udp"),
    R("ports empty", "ports = [443]", "ports = []", "ports is empty", "1 to 65535"),
    R("ports no array", "ports = [443]", "ports = 443", "ports is an integer: `443`", "ports = [443]"),
    R("port zero", "ports = [443]", "ports = [0]", "`0`", "1 to 65535"),
    R("port above", "ports = [443]", "ports = [65536]", "`65536`", "1 to 65535"),
    R("port a boolean", "ports = [443]", "ports = [true]", "`true`", "1 to 65535"),
    R("port a float", "ports = [443]", "ports = [443.0]", "`443.0`", "1 to 65535"),
    R("port a string", "ports = [443]", 'ports = ["443"]', "`443`", "ranges"),
    R("port range reversed", "ports = [443]", 'ports = ["9-8"]', "`9-8`", "ranges"),
    R("port range of one", "ports = [443]", 'ports = ["9-9"]', "`9-9`", "ranges"),
    R("port range padded", "ports = [443]", 'ports = ["08-9"]', "`08-9`", "ranges"),
    R("port range above", "ports = [443]", 'ports = ["1-70000"]', "`1-70000`", "65535"),
    R("ports overlap", "ports = [443]", 'ports = [443, "400-500"]', "`400-500` is listed twice", "keep one"),
    R("ports too many", "ports = [443]", f"ports = {[*range(1, 66)]}", "ports has 65 items", "64"),
    R("syscall odd", '["getrandom"]', '["get random"]', "`get random`", "openat", at="allow = "),
    R("syscall capital", '["getrandom"]', '["GETPID"]', "`GETPID`", "openat", at="allow = "),
    R("syscall both", '["getrandom"]', '["socket"]', "`socket` is both allowed and denied", "one list", at="deny ="),
    R("profile odd", 'profile = "python3"', 'profile = "../x"', "`../x`", "profile"),
    R("executable relative", '"/usr/bin/git"', '"git"', "`git` is not absolute", "`/`"),
    R("executable short digest", '"/usr/bin/git"', '"/usr/bin/git@sha256:abc"', "malformed digest", "64"),
    R("executable capital digest", '"/usr/bin/git"', f'"/usr/bin/git@sha256:{"AB" * 32}"', "malformed", "lower-case"),
    R("executable other digest", '"/usr/bin/git"', '"/usr/bin/git@sha512:ab"', "another form", "sha256"),
    R("executable filler digest", '"/usr/bin/git"', f'"/usr/bin/git@sha256:{"0" * 64}"', "filler", "SHA-256"),
    R("executable twice", '"/usr/bin/git"', '"/usr/bin/jq"', "`/usr/bin/jq` is listed twice", "keep one"),
    R("executable no string", '"/usr/bin/git"', '{path="/bin/ls"}', "is not a string", "/usr/bin/tool"),
    R("credential odd", '["github-token"]', '["a b"]', "`a b`", "1 to 128"),
    R("skill unpinned", "read_text_file@2026.1.14", "read_text_file", "tool URI", "@<version>"),
    R("skill capital alias", "mcp/fs/", "mcp/FS/", "tool URI", "matrix://"),
    R("skill named mcp", "matrix://tool/chain/balance@1", "matrix://tool/mcp/balance@1", "tool URI", "alias"),
    R("side effect unknown", '["read", "chain"]', '["read", "delete"]', "`delete`", "shell", at="side_effects"),
)
STRUCTURE = (
    R(
        "required while local",
        '"linux-gvisor"',
        '"trusted-local"',
        "sandbox.required is `true`",
        "gvisor",
        at="required = t",
    ),
    R(
        "write outside host",
        'filesystem = "host"',
        'filesystem = "ephemeral"',
        "write path `/srv/out`",
        "host",
        at="write =",
    ),
    R("hosts while off", 'network = "full"', 'network = "off"', "`api.example.com` is granted", "remove", at="[[perm"),
    R("depth zero", "max_depth = 2", "max_depth = 0", "max_depth is `0`", "at least 1"),
    R("not allowed", "allowed = true", "allowed = false", "max_depth is `2`", "allowed = true", at="max_depth"),
    R("ttl and unlimited", "ttl_seconds = 600", "ttl_seconds = 600\nunlimited = true", "`600`", "either"),
    R("neither", "ttl_seconds = 600\n", "", "neither", "either", at="[lifetime]"),
    R("unlimited false", "ttl_seconds = 600", "unlimited = false", "neither", "either", at="[lifetime]"),
    R("standby while hermes", 'runtime = "python3"', 'runtime = "hermes"', "`true`", "outside", at="required = t"),
)
UNKNOWN = (
    R("key misspelt", "memory_mb = 256", "memory_md = 256", "`memory_md` in `[resources]`", "did you mean `memory_mb`"),
    R("key cut short", "memory_mb = 256", "memory = 256", "`memory`", "did you mean `memory_mb`"),
    R(
        "key elsewhere",
        "standby = 2",
        'network = "off"',
        "`network` in `[sandbox]`",
        "`resources.network`",
        at='network = "off"',
    ),
    R("key unheard of", "standby = 2", "turbo = 2", "`turbo`", "known here: required"),
    R(
        "key in an entry",
        'protocol = "tls"',
        'protocol = "tls"\nproto = 1',
        "`proto` in `[permissions.network]`",
        "`protocol`",
        at="proto = 1",
    ),
    R("section misspelt", "[lifetime]", "[lifetimes]", "unknown section `lifetimes`", "did you mean `[lifetime]`"),
    R("section swapped", "[spawn]", "[spwan]", "`spwan`", "did you mean `[spawn]`"),
    R("section in capitals", "[spawn]", "[SPAWN]", "`SPAWN`", "did you mean `[spawn]`"),
    R("section two edits", "[hermes]", "[herme]", "`herme`", "did you mean `[hermes]`"),
    R("section look-alike", "[spawn]", '["s\\u0440\\u0430w\\u043f"]', "`sраwп`", "A-Z", at='["s\\u'),
    R("below permissions", "[permissions.skills]", "[permissions.tools]", "section `tools`", "known here"),
    R("spawn below permissions", "[spawn]", "[permissions.spawn]", "`spawn`", "did you mean `[spawn]`"),
    R("permission misspelt", "[permissions.skills]", "[permissions.skill]", "`skill`", "did you mean `skills`"),
    R("key outside", "[agent]", "id = 1\n[agent]", "`id` stands outside", "agent.id", at="id = 1"),
    R("array outside", "[agent]", "x = [1]\n[agent]", "`x` stands outside", "[section]", at="x = [1]"),
)
ALL = (*AGENT, *CAPABILITIES, *RESOURCES, *SECTIONS, *PERMISSIONS, *STRUCTURE, *UNKNOWN)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_refusal_names_line_value_and_mend(case: Refusal) -> None:
    document = spoiled(case.old, case.new)
    error = refuse(document)
    assert case.message in error.message
    assert case.hint in error.hint
    assert error.where == f"agent.toml:{case.line(document)}"
    assert error.message == error.message.strip()
    assert "\n" not in error.message


def test_full_is_accepted_unspoiled() -> None:
    assert accept(FULL).agent.id == "full"


def test_section_missing() -> None:
    error = refuse('[resources]\nnetwork = "off"\n')
    assert (error.message, error.where) == ("section `[agent]` is missing", "agent.toml")


def test_section_as_a_value() -> None:
    error = refuse("spawn = 1\n" + LEAST)
    assert error.message == "spawn `1` is an integer, not a table"
    assert error.where == "agent.toml:1"


def test_network_as_a_table() -> None:
    error = refuse(LEAST + '[permissions.network]\nhost = "a.com"\n')
    assert error.hint == "write [[permissions.network]], with two brackets on each side"
    assert error.where == "agent.toml:7"


def test_sections_as_arrays_of_tables() -> None:
    error = refuse(LEAST.replace("[agent]", "[[agent]]"))
    assert "an array of tables, not a table" in error.message


def test_https_only_takes_443_tls_alone() -> None:
    entry = '[[permissions.network]]\nhost = "a.com"\nports = [{}]\nprotocol = "{}"\n'
    assert accept(LEAST + entry.format("443", "tls")).permissions.network[0].ports == ((443, 443),)
    error = refuse(LEAST + entry.format("443, 80", "tls"))
    assert error.message == "port `80` is outside the network mode `outbound-https-only`"
    assert error.where == "agent.toml:9"
    error = refuse(LEAST + entry.format("443", "udp"))
    assert error.message == "protocol `udp` is outside the network mode `outbound-https-only`"
    assert error.where == "agent.toml:10"


def test_empty_network_list_is_no_open_network() -> None:
    assert accept(LEAST + '[permissions]\nnetwork = []\n[resources]\nnetwork = "off"\n').permissions.network == ()
    for mode in ("outbound-https-only", "full"):
        error = refuse(LEAST + f'[permissions]\nnetwork = []\n[resources]\nnetwork = "{mode}"\n')
        assert "empty list" in error.message
        assert error.where == "agent.toml:8"


def test_network_entry_twice() -> None:
    entry = '[[permissions.network]]\nhost = "a.com"\nports = [443]\nprotocol = "tls"\n'
    error = refuse(LEAST + entry + entry)
    assert error.message == "the entry for host `a.com` is written twice"
    assert error.where == "agent.toml:11"


def test_absent_sections_are_their_defaults() -> None:
    m = accept(LEAST)
    r = m.resources
    assert (r.cpu_ms_per_task, r.memory_mb, r.disk_mb, r.network) == (30000, 512, 100, "outbound-https-only")
    assert (r.pids_max, r.cpu_millis, r.cpu_weight, r.swap_mb) == (64, 1000, 100, 0)
    unlimited = (r.cpu_time_ms, r.io_read_bps, r.io_write_bps, r.io_read_iops, r.io_write_iops, r.net_bps)
    assert unlimited == (None,) * 6
    assert (m.sandbox.required, m.sandbox.backend, m.sandbox.filesystem) == (
        False,
        "trusted-local",
        "read-only-package",
    )
    assert (m.settlement.budget_credits_per_hour, m.settlement.priority) == (0, "normal")
    assert (m.hermes.tools_allowed, m.hermes.approval_policy) == ((), "operator-prompt")
    assert (m.spawn.allowed, m.spawn.on_parent_exit) == (False, "terminate")
    assert (m.lifetime.ttl_seconds, m.lifetime.unlimited, m.lifetime.on_expiry) == (None, False, "terminate")
    assert m.permissions.filesystem.read == ()
    assert m.permissions.network == ()
    assert (m.agent.role, m.agent.operator) == (None, None)


def test_written_is_told_from_default() -> None:
    m = accept(LEAST + "[permissions.syscalls]\n[resources]\nmemory_mb = 512\n")
    assert m.wrote("resources.memory_mb")
    assert m.wrote("permissions.syscalls")
    assert not m.wrote("resources.disk_mb")
    assert not m.wrote("permissions.filesystem")
    assert "resources.memory_mb" in m.written


def test_network_must_be_written_for_sign() -> None:
    absent = accept(LEAST + "[resources]\nmemory_mb = 5\n")
    assert not absent.wrote("resources.network")
    with pytest.raises(errors.ManifestError) as caught:
        parse.require_network(absent)
    assert caught.value.where == "agent.toml:7"
    parse.require_network(accept(LEAST + '[resources]\nnetwork = "off"\n'))


def test_unknown_section_is_tolerated_and_listed() -> None:
    m = accept(LEAST + "[telemetry]\nx = 1\n[[zoo]]\ny = {}\n[metrics.deep]\n")
    assert m.unknown_sections == ("metrics", "telemetry", "zoo")


def test_too_many_unknown_sections() -> None:
    error = refuse(LEAST + "".join(f"[telemetry{n}]\n" for n in range(65)))
    assert "`65` unknown sections" in error.message


def test_hermes_of_another_runtime_is_parsed_by_type() -> None:
    block = '[hermes]\napproval_policy = "whatever"\ntools_allowed = ["a", "a", ""]\n'
    assert accept(LEAST + block).hermes.approval_policy == "whatever"
    hermes = LEAST.replace("python3", "hermes")
    error = refuse(hermes + '[hermes]\napproval_policy = "whatever"\n')
    assert error.message == "approval_policy `whatever` is not known"
    assert error.where == "agent.toml:8"
    assert "empty" in refuse(hermes + '[hermes]\ntools_allowed = ["a", ""]\n').message


def test_hermes_ignores_entry_and_has_no_permissions() -> None:
    hermes = LEAST.replace("python3", "hermes")
    assert accept(hermes.replace('"main.py"', '"/any/../thing"')).agent.entry == "/any/../thing"
    assert accept(hermes.replace('entry = "main.py"\n', "")).agent.entry == ""
    error = refuse(hermes + '[permissions.filesystem]\nread = ["/srv"]\n')
    assert error.message == "`permissions.filesystem` is written while the runtime is `hermes`"
    assert error.where == "agent.toml:7"


def test_entry_may_hold_brackets_which_are_no_wildcard_there() -> None:
    assert accept(LEAST.replace("main.py", "src/[id].py")).agent.entry == "src/[id].py"


def test_entry_with_leading_dot_slash_is_the_plain_path() -> None:
    assert accept(LEAST.replace("main.py", "./main.py")).agent.entry == "main.py"


def test_standby_needs_a_sandbox() -> None:
    assert "standby is `1`" in refuse(LEAST + "[sandbox]\nstandby = 1\n").message


def test_executables_carry_their_digest() -> None:
    git, jq = accept(FULL).permissions.executables.allow
    assert (git.path, git.sha256) == ("/usr/bin/git", None)
    assert jq.path == "/usr/bin/jq"
    assert jq.sha256 == "00112233445566778899aabbccddeeff" * 2


def test_ports_are_sorted_ranges() -> None:
    document = spoiled('[53, "8000-8010"]', '["8000-8010", 53]')
    assert accept(document).permissions.network[1].ports == ((53, 53), (8000, 8010))


def test_all_findings_are_reported_in_file_order() -> None:
    document = spoiled("memory_mb = 256", "memory_mb = 0").replace('id = "full"', 'id = "@"')
    error = refuse(document)
    assert "agent id `@`" in error.message
    assert error.hint.endswith("(and 1 more: --json lists them)")
    found = error.to_json()["errors"]
    assert [f["where"] for f in found] == ["agent.toml:3", "agent.toml:17"]
    assert "memory_mb" in found[1]["message"]


def test_file_name_is_the_callers() -> None:
    with pytest.raises(errors.ManifestError) as caught:
        parse.parse(b"[agent]\n", file="pkg/agent.toml")
    assert caught.value.where == "pkg/agent.toml:1"
    assert parse.parse(LEAST.encode(), file="x").where("agent.name") == "x:3"


def test_where_falls_back_to_the_table_around() -> None:
    m = accept(LEAST + '[[permissions.network]]\nhost = "a.com"\nports = [443]\nprotocol = "tls"\n')
    assert m.where("permissions.network[0].ports") == "agent.toml:9"
    assert m.where("agent.role") == "agent.toml:1"
    assert m.where("lifetime.ttl_seconds") == "agent.toml"


def test_manifest_is_frozen_and_compares_by_content() -> None:
    m = accept(FULL)
    with pytest.raises(pydantic.ValidationError):
        m.agent = m.agent  # type: ignore[misc]
    assert m == accept(FULL)
    assert m != accept(FULL + "[telemetry]\n")
    assert m != accept(FULL.replace('priority = "high"\n', ""))


def test_structure_rules_hold_without_the_parser() -> None:
    with pytest.raises(pydantic.ValidationError, match="contradict"):
        agent.Manifest(
            agent=agent.Agent(id="a", name="a", version="1", runtime="python3", entry="main.py"),
            sandbox=agent.Sandbox(required=True),
        )


def test_defaults_applied_names_each_default_and_nothing_written() -> None:
    applied = {key: value for key, value, _ in parse.defaults_applied(accept(LEAST))}
    assert applied["resources.memory_mb"] == 512
    assert applied["resources.net_bps"] is None
    assert applied["lifetime"] is None
    written = accept(FULL)
    assert {key for key, _, _ in parse.defaults_applied(written)} & written.written == set()
    assert [key for key, _, _ in parse.defaults_applied(written)] == []


@pytest.mark.parametrize(
    ("raw", "message", "where"),
    [
        (b"x" * (1024 * 1024 + 1), "`1048577` bytes", "agent.toml"),
        (b"a = 1\nb = \0\n", "`0x00`", "agent.toml:2"),
        (b'[agent]\n\nid = "\xff"\n', "`0xff` is not UTF-8", "agent.toml:3"),
        (b'[agent]\nid = "\xed\xa0\x80"\n', "is not UTF-8", "agent.toml:2"),
        (b"\xef\xbb\xbf[agent]\n", "byte order mark", "agent.toml:1"),
        ("[agent]\n".encode("utf-16"), "byte order mark", "agent.toml:1"),
        (b"x = [\n" + b"[" * 20 + b"]" * 20 + b"]\n", "nested `21` deep", "agent.toml:2"),
        (b"# [[\nx = " + b"{a=" * 20 + b"1" + b"}" * 20, "nested `20` deep", "agent.toml:2"),
        (b'"""a\n""" = 1\n' + b".".join([b"a"] * 18) + b" = 1", "`16` parts", "agent.toml:3"),
        (b"[" + b" . ".join([b'"a"'] * 18) + b"]", "`16` parts", "agent.toml:1"),
        (b"a = 1\n" * 10_001, "`10000` keys", "agent.toml"),
        (b"[a]\n" * 10_001, "`10000` keys", "agent.toml"),
        (b"a = [" + b"1," * 10_001 + b"]", "`10000` keys, tables or items", "agent.toml"),
        (b"\n" * 20_001, "`20000` lines", "agent.toml"),
        (b"[agent]\nid = 1" + b"0" * 5000, "`4300` digits", "agent.toml:2"),
        (b'[agent]\nid = "a"\nname = "b"\nid = "c"\n', "`agent.id` is written twice", "agent.toml:4"),
        (b"[agent]\n[spawn]\n[agent]\n", "`agent` is written twice", "agent.toml:3"),
        (b"agent = {id = 1, id = 2}\n", "written twice", "agent.toml:1"),
        (b'[agent]\n"i\\u0064" = 1\nid = 2\n', "`agent.id` is written twice", "agent.toml:3"),
        (b"[[spawn]]\n[spawn]\n", "`spawn` is written twice", "agent.toml:2"),
        (b"[agent]\nid = off\n", "`id = off` holds no TOML value", "agent.toml:2"),
        (b"[agent\n", "`[agent` holds a header without its closing bracket", "agent.toml:1"),
        (b'[agent]\nid = "x\nname = 1', "a character that TOML does not allow", "agent.toml:2"),
        (b"[agent]\nid\n", "no `=` after the key", "agent.toml:2"),
        (b"[agent]\nid = 1 name = 2\n", "more than one key on a line", "agent.toml:2"),
        (b'[agent]\nid = "\\q"\n', "an escape that TOML does not know", "agent.toml:2"),
        (b"[agent]\nid = 2026-02-30\n", "no date", "agent.toml:2"),
        (b"[agent]\nid = [1,\n", "not closed", "agent.toml:2"),
        (b'[agent]\nid = """x\n', "not closed", "agent.toml:2"),
        (b'[agent]\nid = "\\ud800"\n', "an escape that is no character", "agent.toml:2"),
    ],
)  # fmt: skip
def test_syntax_is_refused_with_its_place(raw: bytes, message: str, where: str) -> None:
    error = refuse(raw)
    assert isinstance(error, errors.ManifestSyntaxError)
    assert message in error.message
    assert error.where == where
    assert error.hint


def test_brackets_and_dots_in_strings_and_comments_are_no_nesting() -> None:
    depth = "[" * 40
    m = accept(f"# {depth}\n" + LEAST.replace('"A"', f'"{depth}{"a." * 40}"'))
    assert m.agent.name.startswith(depth)


def test_carriage_returns_are_no_matter() -> None:
    m = accept(LEAST.replace("\n", "\r\n"))
    assert m.where("agent.entry") == "agent.toml:6"


def test_shown_values_are_cut_short() -> None:
    assert len(refuse(spoiled('id = "full"', f'id = "{"@" * 5000}"')).message) < 200


def test_backticks_in_a_value_do_not_end_the_quote() -> None:
    assert refuse(spoiled('id = "full"', 'id = "a`b"')).message == "agent id `a\\x60b` is not accepted"
