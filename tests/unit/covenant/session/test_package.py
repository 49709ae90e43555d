"""The manifest of a session: every word of a caller is in it as typed, and it grants what the options say."""

from __future__ import annotations

import base64

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from covenant.session import package, profiles, typed
from covenant.session.package import Options, Volume
from covenant.session.typed import Destination, SecretWord
from policy import errors
from policy.manifest import parse
from policy.manifest.agent import Manifest

KEYS = [base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + bytes([n]) * 32).decode() for n in (1, 2)]
BASE, LAYER = f"debian-minimal@sha256:{'a' * 64}", f"app@sha256:{'b' * 64}"
PLAIN = Options(base=BASE, cores=2)


def made(options: Options = PLAIN, *command: str, profile: str = "shell") -> Manifest:
    raw = package.manifest(profile, profiles.load(profile), options, command or ("sh",))
    return parse.parse(raw.encode())


def test_manifest_grants_profile_alone() -> None:
    found = made(PLAIN, "/usr/bin/env", "-i")
    assert (found.agent.id, found.agent.runtime, found.agent.entry) == ("exec-env", "command", "/usr/bin/env")
    assert found.process.args == ("-i",)
    assert (found.process.contract, found.process.cwd, found.root.base, found.root.layers) == (
        "stdio",
        "/tmp",
        BASE,
        (),
    )
    assert found.permissions.executables.trees == ("root",)
    assert (found.resources.network, found.permissions.network, found.agent.role) == ("off", (), None)
    assert (found.permissions.filesystem.read, found.permissions.credentials.grants) == ((), ())
    assert found.sandbox.filesystem == "ephemeral"


def test_manifest_has_each_option() -> None:
    options = Options(
        base=BASE,
        layers=(LAYER,),
        search=("/srv/app/bin",),
        read=("/srv/docs",),
        write=(Volume("/srv/room", 16), Volume("/srv/more", 8)),
        secrets=(SecretWord("mail"),),
        env=(("A", "b=c"),),
        role="operator-agent",
        contract="terminal",
    )
    found, profile = made(options), profiles.load("shell")
    assert found.root.layers == (LAYER,)
    assert dict(found.process.env) == {"A": "b=c", "PATH": "/srv/app/bin:/usr/bin:/bin"}
    assert (found.permissions.filesystem.read, found.permissions.filesystem.write) == (
        ("/srv/docs",),
        ("/srv/room", "/srv/more"),
    )
    assert (found.sandbox.filesystem, found.resources.disk_mb) == ("host", profile.disk_mb + 24)
    assert (found.permissions.credentials.grants, found.permissions.credentials.files) == (("mail",), True)
    assert (found.agent.role, found.process.contract) == ("operator-agent", "terminal")


@pytest.mark.parametrize(
    ("net", "mode"),
    [
        ((), "off"),
        ((Destination("a.example.com", 443),), "outbound-https-only"),
        ((Destination("a.example.com", 443), Destination("10.0.0.1", 80)), "full"),
    ],
)
def test_network_is_narrowest(net: tuple[Destination, ...], mode: str) -> None:
    found = made(structs.replace(PLAIN, net=net))
    assert found.resources.network == mode
    assert [(one.host, one.protocol) for one in found.permissions.network] == [
        (one.host, "tls" if one.port == 443 else "tcp") for one in net
    ]


def test_injected_secret_is_for_every_request() -> None:
    words = ("api.example.com=github", "mail.example.com=mail:X-Api-Key")
    found = made(structs.replace(PLAIN, inject=tuple(map(typed.inject, words))))
    assert found.resources.network == "outbound-https-only"
    assert found.permissions.credentials.grants == ()
    rules = [(host, one.secret, one.header, one.format) for _, host, one in found.permissions.injected]
    assert rules == [
        ("api.example.com", "github", "Authorization", "Bearer {}"),
        ("mail.example.com", "mail", "X-Api-Key", "{}"),
    ]
    assert {(one.methods, one.paths) for _, _, one in found.permissions.injected} == {(("*",), ("/*",))}


@pytest.mark.parametrize("word", ["api.example.com", "=x", "a=", "a=b c", "a=b:", "a=b:Host", "a=b:X Y"])
def test_odd_injection_is_refused(word: str) -> None:
    with pytest.raises(errors.UsageError):
        typed.inject(word)


def test_key_of_ssh_signs_at_its_hosts() -> None:
    key, other = (f"ssh-ed25519 {KEYS[number]}" for number in (0, 1))
    hosts = (("git.example.org=deploy", (key,)), ("build.example.org:2222=deploy", (key, other)))
    options = structs.replace(PLAIN, ssh=tuple((typed.ssh(word), keys) for word, keys in hosts))
    found = made(structs.replace(options, net=(Destination("build.example.org", 2222),)))
    assert found.resources.network == "full"
    assert {(one.host, tuple(one.ports), one.protocol) for one in found.permissions.network} == {
        ("git.example.org", ((22, 22),), "tcp"),
        ("build.example.org", ((2222, 2222),), "tcp"),
    }
    (agent,) = found.services.ssh_agent
    assert agent.secret == "deploy"
    assert {one.name: one.keys for one in agent.hosts} == {
        "git.example.org": (key,),
        "build.example.org": (key, other),
    }


def test_login_at_a_port_of_this_host_needs_no_network() -> None:
    word = typed.ssh("host.covenant:2222=deploy")
    found = made(structs.replace(PLAIN, ssh=((word, (f"ssh-ed25519 {KEYS[0]}",)),)))
    assert (found.resources.network, found.permissions.network[0].host) == ("off", "host.covenant")


@pytest.mark.parametrize("word", ["git.example.org", "=x", "a=", "a:0=x", "a:b=x", ":22=x", "a=b c", "a:22=x=y z"])
def test_odd_login_is_refused(word: str) -> None:
    with pytest.raises(errors.UsageError):
        typed.ssh(word)


def test_secret_as_variable_is_set_by_shell() -> None:
    secrets = (SecretWord("mail", "TOKEN"), SecretWord("db"), SecretWord("api", "KEY"))
    found = made(structs.replace(PLAIN, secrets=secrets), "claude", "-p", "$(id)")
    assert (found.agent.id, found.agent.entry) == ("exec-claude", "/bin/sh")
    dash, script, *rest = found.process.args
    assert (dash, rest) == ("-c", ["sh", "claude", "-p", "$(id)"])
    assert script.endswith('; exec "$@"')
    assert script.count("exit 125") == 2
    assert found.permissions.credentials.grants == ("api", "db", "mail")


def test_programs_of_layers_are_first_on_path() -> None:
    options = structs.replace(PLAIN, search=("/opt/codex/node_modules/.bin", "/opt/venv/bin"))
    assert dict(made(options).process.env)["PATH"] == "/opt/codex/node_modules/.bin:/opt/venv/bin:/usr/bin:/bin"
    assert "PATH" not in dict(made(PLAIN).process.env)


def test_path_of_caller_replaces_layers() -> None:
    options = structs.replace(PLAIN, search=("/opt/venv/bin",), env=(("PATH", "/opt/own"),))
    assert dict(made(options).process.env)["PATH"] == "/opt/own"


def test_program_chooses_one_profile() -> None:
    commands = [command for name in profiles.names() for command in profiles.load(name).commands]
    assert sorted(commands) == sorted(set(commands))
    assert (profiles.chosen("claude"), profiles.chosen("nothing")) == ("claude-code", "shell")


@pytest.mark.parametrize(("cores", "millis"), [(1, 1000), (2, 2000), (64, 2000)])
def test_processors_are_those_of_host(cores: int, millis: int) -> None:
    assert made(structs.replace(PLAIN, cores=cores)).resources.cpu_millis == millis


def test_heap_of_node_follows_memory() -> None:
    profile = structs.replace(profiles.load("node"), memory_mb=400)
    assert package.variables(profile, PLAIN)["NODE_OPTIONS"] == "--max-old-space-size=300"


@pytest.mark.parametrize(
    ("command", "agent_id"),
    [("/opt/x/claude", "exec-claude"), ("a b", "exec-a-b"), ("/", "exec-command"), ("..", "exec-command")],
)
def test_agent_id_is_of_program(command: str, agent_id: str) -> None:
    assert package.agent_id(command) == agent_id


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(max_size=40), min_size=1, max_size=8), st.lists(st.text(max_size=40), max_size=4))
def test_accepted_words_are_in_manifest(command: list[str], values: list[str]) -> None:
    """A word that the checks accept does not change what the manifest says beside it."""
    try:
        typed.command(command)
        env = tuple(typed.variable(f"V{number}={value}") for number, value in enumerate(values))
        found = made(structs.replace(PLAIN, env=env), "sh", *command)
    except errors.UsageError:
        return
    assert found.process.args == tuple(command)
    assert dict(found.process.env) == dict(env)
    assert found.permissions.executables.trees == ("root",)
    assert found.resources.network == "off"


@pytest.mark.parametrize("name", profiles.names())
def test_profile_makes_manifest(name: str) -> None:
    profile = profiles.load(name)
    found = made(PLAIN, profile=name)
    assert found.resources.memory_mb == profile.memory_mb
    assert dict(found.process.env) == {key: profiles.value_of(profile, key) for key in profile.env}
    assert profile.version >= 1
    assert all(profiles.chosen(command) == name for command in profile.commands), "each command has one profile"


def test_profile_that_is_unknown_names_nearest() -> None:
    with pytest.raises(errors.UsageError, match="`pyhton` is not known") as e:
        profiles.load("pyhton")
    assert e.value.hint.startswith("did you mean `python`? ")
