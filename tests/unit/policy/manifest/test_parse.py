"""Defaults, what was written, unknown sections, and each rule that accepts or refuses a manifest."""

from __future__ import annotations

import pydantic
import pytest

from policy import errors
from policy.manifest import agent, parse
from tests.manifest_corpus import ALL, FULL, Refusal, spoiled

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


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_refusal_names_line_value_and_mend(case: Refusal) -> None:
    document = spoiled(case.old, case.new)
    error = refuse(document)
    assert case.message in error.message
    assert case.hint in error.hint
    file, line, column = error.where.split(":")
    assert (file, int(line)) == ("agent.toml", case.line(document))
    row = document.splitlines()[int(line) - 1]
    # A key or a value begins there: something, after nothing, a space or a mark.
    assert not row[int(column) - 1].isspace()
    assert int(column) == 1 or row[int(column) - 2] in " [.,"
    assert error.message == error.message.strip()
    assert "\n" not in error.message


def test_full_is_accepted_unspoiled() -> None:
    assert accept(FULL).agent.id == "full"


def test_section_missing() -> None:
    error = refuse('[resources]\nnetwork = "off"\n')
    assert (error.message, error.where) == ("section `[agent]` is missing", "agent.toml")


def test_section_as_value() -> None:
    error = refuse("spawn = 1\n" + LEAST)
    assert error.message == "spawn `1` is an integer, not a table"
    assert error.where == "agent.toml:1:9"


def test_network_as_table() -> None:
    error = refuse(LEAST + '[permissions.network]\nhost = "a.com"\n')
    assert error.hint == "write [[permissions.network]], with two brackets on each side"
    assert error.where == "agent.toml:7:14"


def test_sections_as_arrays_of_tables() -> None:
    error = refuse(LEAST.replace("[agent]", "[[agent]]"))
    assert "an array of tables, not a table" in error.message


def test_https_only_takes_443_tls_alone() -> None:
    entry = '[[permissions.network]]\nhost = "a.com"\nports = [{}]\nprotocol = "{}"\n'
    assert accept(LEAST + entry.format("443", "tls")).permissions.network[0].ports == ((443, 443),)
    error = refuse(LEAST + entry.format("443, 80", "tls"))
    assert error.message == "port `80` is outside the network mode `outbound-https-only`"
    assert error.where == "agent.toml:9:9"
    error = refuse(LEAST + entry.format("443", "udp"))
    assert error.message == "protocol `udp` is outside the network mode `outbound-https-only`"
    assert error.where == "agent.toml:10:12"


def test_empty_network_list_is_no_open_network() -> None:
    assert accept(LEAST + '[permissions]\nnetwork = []\n[resources]\nnetwork = "off"\n').permissions.network == ()
    for mode in ("outbound-https-only", "full"):
        error = refuse(LEAST + f'[permissions]\nnetwork = []\n[resources]\nnetwork = "{mode}"\n')
        assert "empty list" in error.message
        assert error.where == "agent.toml:8:11"


def test_network_entry_twice() -> None:
    entry = '[[permissions.network]]\nhost = "a.com"\nports = [443]\nprotocol = "tls"\n'
    error = refuse(LEAST + entry + entry)
    assert error.message == "the entry for host `a.com` is written twice"
    assert error.where == "agent.toml:11:15"


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
    assert caught.value.where == "agent.toml:7:2"
    parse.require_network(accept(LEAST + '[resources]\nnetwork = "off"\n'))


def test_unknown_section_is_tolerated_and_listed() -> None:
    m = accept(LEAST + "[telemetry]\nx = 1\n[[fauna]]\ny = {}\n[metrics.deep]\n")
    assert m.unknown_sections == ("fauna", "metrics", "telemetry")


def test_too_many_unknown_sections() -> None:
    error = refuse(LEAST + "".join(f"[telemetry{n}]\n" for n in range(65)))
    assert "`65` unknown sections" in error.message


def test_hermes_of_another_runtime_is_parsed_by_type() -> None:
    block = '[hermes]\napproval_policy = "whatever"\ntools_allowed = ["a", "a", ""]\n'
    assert accept(LEAST + block).hermes.approval_policy == "whatever"
    hermes = LEAST.replace("python3", "hermes")
    error = refuse(hermes + '[hermes]\napproval_policy = "whatever"\n')
    assert error.message == "approval_policy `whatever` is not known"
    assert error.where == "agent.toml:8:19"
    assert "empty" in refuse(hermes + '[hermes]\ntools_allowed = ["a", ""]\n').message


def test_hermes_ignores_entry_and_has_no_permissions() -> None:
    hermes = LEAST.replace("python3", "hermes")
    assert accept(hermes.replace('"main.py"', '"/any/../thing"')).agent.entry == "/any/../thing"
    assert accept(hermes.replace('entry = "main.py"\n', "")).agent.entry == ""
    error = refuse(hermes + '[permissions.filesystem]\nread = ["/srv"]\n')
    assert error.message == "`permissions.filesystem` is written while the runtime is `hermes`"
    assert error.where == "agent.toml:7:14"


def test_entry_may_hold_brackets_which_are_no_wildcard_there() -> None:
    assert accept(LEAST.replace("main.py", "src/[id].py")).agent.entry == "src/[id].py"


def test_entry_with_leading_dot_slash_is_plain_path() -> None:
    assert accept(LEAST.replace("main.py", "./main.py")).agent.entry == "main.py"


def test_standby_needs_sandbox() -> None:
    assert "standby is `1`" in refuse(LEAST + "[sandbox]\nstandby = 1\n").message


def test_executables_carry_their_digest() -> None:
    git, jq, tree = accept(FULL).permissions.executables.allow
    assert (tree.tree, tree.sha256) == ("workspace", None)
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
    assert [f["where"] for f in found] == ["agent.toml:3:6", "agent.toml:18:13"]
    # A person is told the same, each with its own fix.
    each = errors.each(error)
    told = [{"message": one.message, "hint": one.hint, "where": one.where} for one in each]
    assert told == found
    assert type(each[0]) is errors.ManifestError
    assert "memory_mb" in found[1]["message"]


def test_file_name_is_callers() -> None:
    with pytest.raises(errors.ManifestError) as caught:
        parse.parse(b"[agent]\n", file="pkg/agent.toml")
    assert caught.value.where == "pkg/agent.toml:1:2"
    assert parse.parse(LEAST.encode(), file="x").where("agent.name") == "x:3"


def test_where_falls_back_to_table_around() -> None:
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


def test_structure_rules_hold_without_parser() -> None:
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
        (b"a = 1\nb = \0\n", "`0x00`", "agent.toml:2:5"),
        (b'[agent]\n\nid = "\xff"\n', "`0xff` is not UTF-8", "agent.toml:3:7"),
        (b'[agent]\nid = "\xed\xa0\x80"\n', "is not UTF-8", "agent.toml:2:7"),
        (b"\xef\xbb\xbf[agent]\n", "byte order mark", "agent.toml:1:1"),
        ("[agent]\n".encode("utf-16"), "byte order mark", "agent.toml:1:1"),
        (b"x = [\n" + b"[" * 20 + b"]" * 20 + b"]\n", "nested `21` deep", "agent.toml:2:16"),
        (b"# [[\nx = " + b"{a=" * 20 + b"1" + b"}" * 20, "nested `20` deep", "agent.toml:2:53"),
        (b'"""a\n""" = 1\n' + b".".join([b"a"] * 18) + b" = 1", "`16` parts", "agent.toml:3:2"),
        (b"[" + b" . ".join([b'"a"'] * 18) + b"]", "`16` parts", "agent.toml:1:6"),
        (b"a = 1\n" * 10_001, "`10000` keys", "agent.toml"),
        (b"[a]\n" * 10_001, "`10000` keys", "agent.toml"),
        (b"a = [" + b"1," * 10_001 + b"]", "`10000` keys, tables or items", "agent.toml"),
        (b"\n" * 20_001, "`20000` lines", "agent.toml"),
        (b"[agent]\nid = 1" + b"0" * 5000, "`4300` digits", "agent.toml:2:6"),
        (b'[agent]\nid = "a"\nname = "b"\nid = "c"\n', "`agent.id` is written twice", "agent.toml:4:1"),
        (b"[agent]\n[spawn]\n[agent]\n", "`agent` is written twice", "agent.toml:3:2"),
        (b"agent = {id = 1, id = 2}\n", "written twice", "agent.toml:1:18"),
        (b'[agent]\n"i\\u0064" = 1\nid = 2\n', "`agent.id` is written twice", "agent.toml:3:1"),
        (b"[[spawn]]\n[spawn]\n", "`spawn` is written twice", "agent.toml:2:2"),
        (b"[agent]\nid = off\n", "`id = off` holds no TOML value", "agent.toml:2:6"),
        (b"[agent\n", "`[agent` holds a header without its closing bracket", "agent.toml:1:7"),
        (b'[agent]\nid = "x\nname = 1', "a character that TOML does not allow", "agent.toml:2:8"),
        (b"[agent]\nid\n", "no `=` after the key", "agent.toml:2:3"),
        (b"[agent]\nid = 1 name = 2\n", "more than one key on a line", "agent.toml:2:8"),
        (b'[agent]\nid = "\\q"\n', "an escape that TOML does not know", "agent.toml:2:9"),
        (b"[agent]\nid = 2026-02-30\n", "no date", "agent.toml:2:6"),
        (b"[agent]\nid = [1,\n", "not closed", "agent.toml:2:9"),
        (b'[agent]\nid = """x\n', "not closed", "agent.toml:2:10"),
        (b'[agent]\nid = "\\ud800"\n', "an escape that is no character", "agent.toml:2:13"),
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


def test_backticks_in_value_do_not_end_quote() -> None:
    assert refuse(spoiled('id = "full"', 'id = "a`b"')).message == "agent id `a\\x60b` is not accepted"
