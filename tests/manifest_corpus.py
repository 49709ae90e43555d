"""Bad manifests, each one slip away from a good one, with what is said of it: for the parser and for the schema."""

from __future__ import annotations

import dataclasses
import pathlib

FULL = (pathlib.Path(__file__).resolve().parent / "golden" / "manifest" / "full.toml").read_text()


def spoiled(old: str, new: str) -> str:
    """The full manifest with its first ``old`` replaced."""
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
        """The line, counted from 1, that the error names."""
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
    R("path of two alphabets", '"/srv/data"', '"/srv/d\\u0430ta"', "U+0430", "one alphabet"),
    R("path full-width letter", '"/srv/data"', '"/srv/\\uff44ata"', "U+FF44", "plain letter"),
    R("path mathematical letter", '"/srv/data"', '"/srv/\\U0001d41dx"', "U+1D41D", "plain letter"),
    R("entry of two alphabets", 'entry = "src/main.py"', 'entry = "src/m\\u0430in.py"', "U+0430", "one alphabet"),
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
    R(
        "rule of no tool",
        '[[permissions.skills.rule]]\ntool = "matrix://tool/mcp/fs/',
        '[[permissions.skills.rule]]\ntool = "matrix://tool/mcp/no/',
        "which is not granted",
        "add it to allow",
    ),
    R("rule back reference", '"/srv/[a-z]+"', '"(a)\\\\1"', "pattern", "RE2", at="matches ="),
    R("rule look-ahead", '"/srv/[a-z]+"', '"(?=a)b"', "pattern", "RE2", at="matches ="),
    R("rule huge", '"/srv/[a-z]+"', '"((x{100}){100}){100}"', "pattern", "RE2", at="matches ="),
    R("rule pattern empty", '"/srv/[a-z]+"', '""', "pattern has 0", "any text", at="matches ="),
    R(
        "rule two forms",
        'matches = "/srv/[a-z]+"',
        'matches = "/srv"\nequals = "/a"',
        "equals and matches",
        "one of",
        at="[[permissions.skills.rule]]",
    ),
    R("rule no form", 'matches = "/srv/[a-z]+"\n', "", "no condition", "one of", at="[[permissions.skills.rule]]"),
    R("rule fraction", '"/etc/hostname"', "1.5", "`1.5` is no string", "matches", at="equals ="),
    R("rule hidden", '"/etc/hostname"', '"a\\u202eb"', "hidden character", "remove", at="equals ="),
    R("rule values empty", '["credits", 1, true]', "[]", "no list", "equals", at="one_of ="),
    R("rule values twice", '["credits", 1, true]', "[1, 1]", "listed twice", "keep one", at="one_of ="),
    R("rule argument odd", 'argument = "unit"', 'argument = "a b"', "argument `a b`", "1 to 128"),
    R("calls none", "calls_per_minute = 60", "calls_per_minute = 0", "calls_per_minute", "1"),
    R("answer huge", "answer_bytes = 100000", "answer_bytes = 9999999999", "answer_bytes", "4194304"),
    R("side effect unknown", '["read", "chain"]', '["read", "delete"]', "`delete`", "shell", at="side_effects"),
)
PROCESS = (
    R("argument with NUL", '"--verbose"', '"a\\u0000b"', "U+0000", "remove"),
    R("argument with escape", '"--verbose"', '"\\u001b[2J"', "U+001B", "remove"),
    R("argument too long", '"--verbose"', f'"{"x" * 16_385}"', "16385 characters", "16384"),
    R("argument no string", '"--verbose"', "1", "`1` is an integer", "quotes", at="args ="),
    R(
        "intent without text",
        '"--verbose"',
        '"{intent}"',
        "stands in an argument while",
        'contract = "text"',
        at="args =",
    ),
    R("env no table", 'env = { LOG_LEVEL = "debug", TZ = "UTC" }', 'env = ["A=b"]', "no table", "NAME"),
    R("env odd name", "LOG_LEVEL", '"LOG LEVEL"', "`LOG LEVEL` is not accepted", "no digit", at="env ="),
    R("env no string", '"UTC"', "1", "variable `TZ` is an integer", "NAME", at="env ="),
    R("env preload", "LOG_LEVEL", "LD_PRELOAD", "`LD_PRELOAD` is not a manifest's", "take it out", at="env ="),
    R("env of loader", "LOG_LEVEL", "PYTHONHOME", "`PYTHONHOME` is not a manifest's", 'contract = "text"', at="env ="),
    R("env of secret", "LOG_LEVEL", "github-token", "is not accepted", "no digit", at="env ="),
    R("cwd relative", 'cwd = "/workspace"', 'cwd = "src"', "`src` is not absolute", "begin it"),
    R("contract unknown", 'contract = "line"', 'contract = "pipe"', "`pipe` is not known", "line"),
    R(
        "standby of stream",
        'contract = "line"',
        'contract = "stdio"',
        "standby is `2` while",
        "standby = 0",
        at="standby",
    ),
    R("base unpinned", 'base = "closure"', 'base = "debian"', "base `debian` is not accepted", "covenant layer list"),
    R("layer unpinned", '"tools@sha256:0123', '"tools:0123', "layer `tools:0123", "covenant layer list", at="layers ="),
    R(
        "tree of no layer",
        '"/usr/bin/git',
        '"layer:other", "/usr/bin/git',
        "layer `other` is not in",
        "tools",
        at='allow = ["layer',
    ),
    R("shm of all", "dev_shm_mb = 16", "dev_shm_mb = 64", "dev_shm_mb is `64` of a disk_mb of `64`", "65"),
)
WORKSPACE = (
    R("workspace mode unknown", 'mode = "overlay"', 'mode = "bind"', "`bind` is not known", "overlay"),
    R("workspace without mode", 'mode = "overlay"\n', "", "[workspace] has no mode", "overlay", at="[workspace]"),
    R("workspace from nowhere", 'from = ["/srv/projects"]', "from = []", "where it may lie", "/home"),
    R("workspace from relative", '"/srv/projects"', '"projects"', "`projects` is not absolute", "begin", at="from ="),
    R("workspace path relative", '"/work/project"', '"work"', "`work` is not absolute", "begin", at='path = "work"'),
    R("mask absolute", '"*.secret"', '"/x"', "`/x` is no pattern of paths", "workspace's directory", at="mask ="),
    R("mask with set", '"*.secret"', '"[ab]"', "`[ab]` has a set", "alone", at="mask ="),
    R("protect within a name", '"deploy/**"', '"deploy**"', "has `**` within", "/**", at="protect ="),
    R("protect too long", '"deploy/**"', f'"{"x" * 201}"', "201 characters", "200", at="protect ="),
    R("workspace too small", "max_mb = 24", "max_mb = 7", "`7`", "8"),
    R("workspace of all", "max_mb = 24", "max_mb = 48", "max_mb is `48` of a disk_mb of `64`", "65"),
    R("apply unknown", 'apply = "never"', 'apply = "always"', "`always` is not known", "ask"),
    R(
        "workspace cannot start",
        "exec = true",
        "exec = false",
        "`workspace` is named while",
        "exec = true",
        at='allow = ["/usr',
    ),
)
SERVICES = (
    R(
        "provider odd",
        'provider = "local"',
        'provider = "Local"',
        "`Local`",
        "providers.toml",
        at='{ provider = "Local"',
    ),
    R(
        "provider twice",
        'provider = "local"',
        'provider = "anthropic"',
        "`anthropic` is listed twice",
        "keep one",
        at='{ provider = "anthropic", models = ["test-1"',
    ),
    R("model with a star", '"claude-*"', '"cl*ude"', "`cl*ude`", "at its end", at='{ provider = "anthropic"'),
    R("model twice", '"claude-*"', '"a", "a"', "`a` is listed twice", "keep one", at='{ provider = "anthropic"'),
    R("models empty", '["claude-*"]', "[]", "models is an empty list", "NAME", at='{ provider = "anthropic"'),
    R(
        "model unknown key",
        'provider = "local",',
        'provider = "local", url = "x",',
        "unknown key `url`",
        "provider",
        at='{ provider = "local"',
    ),
    *_range("requests_per_minute", 60, 1, 2**31 - 1),
    *_range("tokens_per_hour", 200000, 1, 2**31 - 1),
    *_range("max_output_tokens", 4096, 1, 2**31 - 1),
)
_PLACE = '"unix:/srv/full/web.sock"'
PUBLISH = (
    *_range("port", 8080, 1, 65535),
    R(
        "published twice",
        "port = 8081",
        "port = 8080",
        "`8080` is listed twice",
        "keep one",
        at='[[publish]]\nport = 8080\nto = "127',
    ),
    R("place twice", '"127.0.0.1:18081"', _PLACE, "listed twice", "keep one", at="[[publish]]\nport = 8081"),
    R("place missing", f"to = {_PLACE}\n", "", "`publish[0].to` is missing", "no default", at="[[publish]]"),
    R("place odd", _PLACE, '"tcp:1"', "`tcp:1` is no place", "unix:/PATH", at='to = "tcp:1"'),
    R("place everywhere", _PLACE, '"0.0.0.0:8080"', "`0.0.0.0:8080` is no place", "127.0.0.1:", at='to = "0.0.0.0'),
    R(
        "place a low port",
        _PLACE,
        '"127.0.0.1:80"',
        "`127.0.0.1:80` is no place",
        "from 1024",
        at='to = "127.0.0.1:80"',
    ),
    R("place a high port", _PLACE, '"127.0.0.1:65536"', "is no place", "from 1024", at='to = "127.0.0.1:65536"'),
    R("place a long port", _PLACE, '"127.0.0.1:018081"', "is no place", "from 1024", at='to = "127.0.0.1:018081"'),
    R("socket relative", _PLACE, '"unix:web.sock"', "`web.sock` is not absolute", "begin it", at='to = "unix:web'),
    R("socket with dots", _PLACE, '"unix:/srv/../web"', "`/srv/../web` is not normalised", "", at='to = "unix:/srv/..'),
    R("socket too long", _PLACE, f'"unix:/{"x" * 107}"', "has 108 bytes", "at most 107", at='to = "unix:/xxx'),
    R("socket abstract", _PLACE, '"unix:@web"', "`@web` is not absolute", "begin it", at='to = "unix:@web"'),
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
ALL = (
    *AGENT,
    *CAPABILITIES,
    *RESOURCES,
    *SECTIONS,
    *PERMISSIONS,
    *PROCESS,
    *WORKSPACE,
    *SERVICES,
    *PUBLISH,
    *STRUCTURE,
    *UNKNOWN,
)
