"""A denial explained: the lines that are named do allow it, and what no line allows is said to be so."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import denials
from policy.decompile import read
from policy.denials import Denial
from policy.grants.effective import Effective
from policy.grants.services import SENTENCES
from policy.why import ask, denied, files, kernel, limit
from sandbox.network.dns import gate
from sandbox.network.tls import gate as tls_gate
from tests.unit.policy.compile import sample

ENTRIES = (("api.example.com", "[443]", "tls"), ("203.0.113.5", "[80]", "tcp"))


def sight(*entries: tuple[str, str, str], network: str = "full", more: str = "", **given: Any) -> ask.Sight:
    made = sample.manifest(network=network, more=sample.entries(*entries) + more, **given)
    return ask.Sight(read.read(sample.compiled(made).files))


FULL = sight(*ENTRIES)
HTTPS = sight(("api.example.com", "[443]", "tls"), network="outbound-https-only")
OFF = sight(network="off")


def wanted(lines: tuple[str, ...]) -> Mapping[str, Any]:
    return tomllib.loads("\n".join(lines))


@pytest.mark.parametrize(
    ("denial", "entry"),
    [
        (Denial("dns", "www.example.org", "name_not_granted"), ("www.example.org", 443, "tls")),
        (Denial("dns", "WWW.example.org.", "name_not_granted"), ("www.example.org", 443, "tls")),
        (Denial("sni", "www.example.org:8443/tls", "sni_not_granted"), ("www.example.org", 8443, "tls")),
        (Denial("sni", "203.0.113.9:443/tls", "not_tls"), ("203.0.113.9", 443, "tcp")),
        (Denial("sni", "[2606:4700::1]:443/tls", "no_sni"), ("2606:4700::1", 443, "tcp")),
        (Denial("packet", "203.0.113.5:81/tcp", "not_granted"), ("203.0.113.5", 81, "tcp")),
        (Denial("packet", "203.0.113.5:443/tcp", "not_granted"), ("203.0.113.5", 443, "tls")),
        (Denial("packet", "[2606:4700::1]:443/udp", "not_granted"), ("2606:4700::1", 443, "udp")),
        (Denial("packet", "10.0.0.1:5432/tcp", "not_granted"), ("10.0.0.1", 5432, "tcp")),
    ],
)
def test_lines_to_add_allow_it(denial: Denial, entry: tuple[str, int, str]) -> None:
    for before in (FULL, HTTPS, OFF):
        found = denied.explain(denial, before)
        assert found.answer is not None
        assert not found.answer.allowed
        added = wanted(found.add)
        (line,) = added["permissions"]["network"]
        assert (line["host"], line["ports"], line["protocol"]) == (entry[0], [entry[1]], entry[2])
        mode = added.get("resources", {}).get("network", before.found.reached.mode)
        entries = ENTRIES if before is FULL else ()
        after = sight(*entries, (entry[0], f"[{entry[1]}]", entry[2]), network=mode)
        again = denied.explain(denial, after)
        assert again.answer is not None
        assert again.answer.allowed
        assert again.add == ()
        assert "changed since" in again.note


@pytest.mark.parametrize(
    ("denial", "table", "key", "value"),
    [
        (Denial("memory", "memory_mb", "out_of_memory"), "resources", "memory_mb", 1024),
        (Denial("time", "cpu_ms_per_task", "deadline"), "resources", "cpu_ms_per_task", 60_000),
        (Denial("time", "cpu_time_ms", "cpu_time"), "resources", "cpu_time_ms", 1800),
        (Denial("time", "ttl_seconds", "deadline"), "lifetime", "ttl_seconds", 20),
        (Denial("pids", "pids_max", "not_granted"), "resources", "pids_max", 128),
    ],
)
def test_ceiling_is_twice_as_high(denial: Denial, table: str, key: str, value: int) -> None:
    found = denied.explain(denial, sight(resources="cpu_time_ms = 900", more="[lifetime]\nttl_seconds = 10\n"))
    assert wanted(found.add) == {table: {key: value}}
    assert denial.grant == f"{table}.{key}"


@pytest.mark.parametrize(
    ("denial", "note"),
    [
        (Denial("dns", "api.example.com", "rebinding"), "grant the address itself"),
        (Denial("dns", "a.example.com", "rate"), "no line of agent.toml allows it"),
        (Denial("sni", "api.example.com:443/tls", "ech_present"), "no line of agent.toml allows it"),
        (Denial("packet", "203.0.113.5/icmp", "protocol"), "no line of agent.toml allows it"),
        (Denial("packet", "192.0.0.1:22/tcp", "gateway"), "no line of agent.toml allows it"),
        (Denial("time", "timeout", "deadline"), "--timeout"),
        (Denial("packet", "", "not_listed"), "1000"),
        (Denial("syscall", "ioctl", "arguments"), "policy why --syscall"),
        (Denial("unknown", "x", "whatever"), "no line of agent.toml allows it"),
    ],
)
def test_what_no_line_allows(denial: Denial, note: str) -> None:
    found = denied.explain(denial, FULL)
    assert (found.add, found.answer) == ((), None)
    assert note in found.note


@pytest.mark.parametrize(
    ("code", "target", "said"),
    [
        (
            "model_not_granted",
            "POST /v1/chat/completions: the model `big-1` is not granted",
            'add to models of provider "local" in allow of [services.models]: "big-1"',
        ),
        ("search_not_granted", "GET /search: no provider of searches is granted", 'allow = ["PROVIDER"]'),
        (
            "host_not_granted",
            "GET /fetch: pages of wiki.example are not granted",
            'add to hosts of [services.fetch]: "wiki.example"',
        ),
        ("host_not_granted", "GET /fetch: the page redirects to a host that is not granted", "to which the page"),
        (
            "agent_not_granted",
            "POST /other: the agent `other` is not granted",
            'add to allow of [services.agents]: "other"',
        ),
        (
            "signal_not_granted",
            "POST /v1/logs: the signal logs is not granted",
            'add to signals of [services.telemetry]: "logs"',
        ),
        # An agent chooses the name: the line is for that name alone, and never for what a pattern of it would grant.
        ("host_not_granted", "GET /fetch: pages of *.wiki.example are not granted", "no line of agent.toml allows it"),
        ("host_not_granted", "GET /fetch: pages of ::1 are not granted", "no line of agent.toml allows it"),
        ("model_not_granted", "POST /v1: the model `*` is not granted", "no line of agent.toml allows it"),
        ("agent_not_granted", "POST /x: the agent `a`b` is not granted", "no line of agent.toml allows it"),
        ("provider_failed", "provider local", "covenant models test NAME"),
        (
            "no_provider",
            "POST /v1/logs: the collector does not answer: Connection refused",
            "agents in [export] of config.toml",
        ),
        ("provider_failed", "GET /fetch: wiki.example does not answer", "no line of agent.toml allows it"),
        ("content_refused", "POST /v1/messages: a URL", "no line of agent.toml allows it"),
        ("model_not_granted", "something else", "no line of agent.toml allows it"),
    ],
)
def test_service_that_is_not_granted_names_its_line(code: str, target: str, said: str) -> None:
    before = sight(more='[services.models]\nallow = [{ provider = "local", models = ["small-*"] }]\n')
    found = denied.explain(Denial("model", target, code), before)
    assert (found.add, said in found.note) == ((), True), found.note


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("model_not_granted", "hf.co/big:1"),
        ("host_not_granted", "wiki.example"),
        ("agent_not_granted", "other"),
        ("signal_not_granted", "traces"),
    ],
)
def test_sentence_of_gate_names_its_line(code: str, name: str) -> None:
    found = denied.explain(Denial("model", f"GET /p: {SENTENCES[code].format(name)}", code), sight())
    assert found.note.endswith(f': "{name}"'), found.note
    # A name within a cut sentence, or behind it, is none.
    for target in (f"GET /p: {SENTENCES[code].format(name)[:-1]}", f"{SENTENCES[code].format(name)}: more"):
        assert name not in denied.explain(Denial("model", target, code), sight()).note


def test_every_sentence_of_gate_has_a_line() -> None:
    for code, sentence in SENTENCES.items():
        assert "add to" in denied.explain(Denial("model", sentence.format("abc"), code), sight()).note


def test_call_and_program_are_asked_for_by_their_own_tables() -> None:
    found = denied.explain(Denial("syscall", "getcpu", "not_granted"), FULL)
    assert wanted(found.add) == {"permissions": {"syscalls": {"allow": ["getcpu"]}}}
    program = denied.explain(Denial("exec", "/usr/bin/grep", "not_granted"), FULL)
    assert wanted(program.add) == {"permissions": {"executables": {"allow": ["/usr/bin/grep"]}}}
    never = denied.explain(Denial("syscall", "ptrace", "not_granted"), FULL)
    assert never.answer is not None
    assert (never.add, bool(never.answer.never)) == ((), True)


@pytest.mark.parametrize(
    ("denial", "before", "note"),
    [
        (Denial("exec", "execve", "not_granted"), FULL, "--exec PATH"),
        (Denial("syscall", "vfork", "not_granted"), FULL, "--exec PATH"),
        (Denial("syscall", "socket", "not_granted"), OFF, "--connect HOST:PORT"),
        (Denial("syscall", "connect", "not_granted"), OFF, "--connect HOST:PORT"),
    ],
)
def test_call_of_a_missing_grant_names_the_grant(denial: Denial, before: ask.Sight, note: str) -> None:
    """The call by itself would only lead to the next refusal."""
    found = denied.explain(denial, before)
    assert (found.add, note in found.note) == ((), True)


def test_list_that_would_narrow_is_told() -> None:
    before = ask.Sight(read.read(sample.compiled(sample.manifest(network="full")).files))
    found = denied.explain(Denial("packet", "10.0.0.1:5432/tcp", "not_granted"), before)
    assert "takes the place of what the mode grants" in found.note
    assert "takes the place" not in denied.explain(Denial("packet", "10.0.0.1:5432/tcp", "not_granted"), FULL).note


def test_shared_memory_has_its_own_lines() -> None:
    found = denied.explain(Denial("path", "/dev/shm", "read_only"), OFF)
    assert wanted(found.add) == {"sandbox": {"dev_shm_mb": 64}, "resources": {"disk_mb": 164}}
    least = denied.explain(
        Denial("path", "/dev/shm", "read_only"), sight(network="off", filesystem="read-only-package")
    )
    assert wanted(least.add)["sandbox"] == {"filesystem": "ephemeral", "dev_shm_mb": 64}
    given = sight(network="off", more="dev_shm_mb = 64\n", resources="disk_mb = 164")
    again = denied.explain(Denial("path", "/dev/shm", "read_only"), given)
    assert (again.add, "changed since" in again.note) == ((), True)


def test_secret_is_asked_for_by_its_name() -> None:
    found = denied.explain(Denial("credential", "mail", "not_granted"), FULL)
    assert wanted(found.add) == {"permissions": {"credentials": {"grants": ["mail"]}}}
    absent = denied.explain(Denial("credential", "mail", "absent"), FULL)
    assert (absent.add, "vault put" in absent.note) == ((), True)
    for code in ("token", "expired", "revoked", "unavailable", "rate", "malformed"):
        other = denied.explain(Denial("credential", "", code), FULL)
        assert (other.add, other.note) == ((), "no line of agent.toml allows it")
        assert other.meaning != denied.meaning(Denial("credential", "", "whatever"))


def test_who_is_above_is_asked_as_well() -> None:
    bounds = {"parent `boss`": Effective.bottom(), "role `all`": Effective.top()}
    for denial in (Denial("dns", "a.example.org", "name_not_granted"), Denial("memory", "memory_mb", "out_of_memory")):
        answer = denied.explain(denial, ask.Sight(FULL.found, bounds=bounds)).answer
        assert answer is not None
        assert answer.bounds == {"parent `boss`": False, "role `all`": True}


def test_every_code_of_gates_has_its_words() -> None:
    for layer, codes in (("dns", gate.CODES), ("sni", tls_gate.CODES)):
        assert {(layer, code) for code in codes} == {pair for pair in denied.MEANINGS if pair[0] == layer}
    assert {layer for layer, _ in denied.MEANINGS} <= set(denials.LAYERS)


def test_why_gives_name_that_log_has() -> None:
    for question, denial in (
        (kernel.Connect("www.example.org", 443), Denial("dns", "www.example.org", "name_not_granted")),
        (kernel.Connect("203.0.113.5", 81), Denial("packet", "203.0.113.5:81/tcp", "not_granted")),
        (kernel.Connect("::ffff:203.0.113.5", 81, "udp"), Denial("packet", "203.0.113.5:81/udp", "not_granted")),
        (kernel.Connect("2606:4700::1", 443, "tls"), Denial("packet", "[2606:4700::1]:443/tcp", "not_granted")),
        # What it leads to is not known beforehand.
        (kernel.Connect("api.example.com", 80), None),
        (kernel.Call("ptrace"), None),
        (files.Open("/etc/passwd"), None),
    ):
        assert denied.of_question(question, FULL) == denial
    assert denied.of_question(kernel.Connect("203.0.113.5", 81), OFF) is None


@given(st.sampled_from([*denials.LAYERS, "x"]), st.text(max_size=40), st.sampled_from([*denied.MEANINGS]))
def test_any_target_is_explained_without_error(layer: str, target: str, known: tuple[str, str]) -> None:
    for one in (Denial(layer, target, known[1]), Denial(known[0], target, known[1])):
        found = denied.explain(one, FULL)
        assert found.meaning
        assert found.document()["denial"] == one.id


def test_ceiling_not_there_is_no_refusal() -> None:
    answer = ask.ask(limit.Limit("net_bps", 10**9), FULL)
    assert (answer.allowed, answer.add) == (True, ())


def test_child_without_package_says_where_it_belongs() -> None:
    found = denied.explain(Denial("spawn", "nosuch", "package_invalid"), FULL)
    assert "where children are looked for" in found.meaning
    assert found.note.startswith("put it beside its parent's package")
