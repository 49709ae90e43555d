"""Keys of SSH in the artefacts: what is compiled, what is read back, and what this host or manifest cannot hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policy import data, denials, errors
from policy.compile import init
from policy.decompile import read as reading
from policy.denials import Denial
from policy.explain import own_limits, report
from policy.grants.effective import Effective
from policy.rules import nine
from policy.ssh import wire
from policy.why import ask, denied, files, logins
from tests import ssh_kit
from tests.unit.policy.compile import sample

KEY = ssh_kit.ROWS[0][2]
PROGRAMS = '[permissions.executables]\nallow = ["/usr/bin/cat"]\n'
ENTRY = f'[[services.ssh_agent]]\nsecret = "deploy"\nhosts = [{{ name = "git.example.org", keys = ["{KEY}"] }}]\n'
RULE = b'iifname "agent0" tcp dport { 81 } accept'
Files = dict[str, bytes]


def requested(more: str) -> Effective:
    return nine.requested(sample.manifest(more=more), roles=data.roles())


def compiled(more: str = PROGRAMS + ENTRY, **fields: str) -> Files:
    return dict(sample.compiled(sample.manifest(more=more, resources="pids_max = 7", **fields)).files)


@pytest.mark.parametrize("network", ["off", "outbound-https-only", "full"])
def test_keys_are_read_back(network: str) -> None:
    found = reading.read(compiled(network=network))
    assert found.grants.ssh.triples() == [("deploy", "git.example.org", KEY)]
    assert (found.relay, found.reached.linked, found.grants.resources.pids_max) == (True, True, 7)
    assert list(found.args) == ["/usr/bin/python3.11", "main.py"]
    assert f"SSH_AUTH_SOCK={init.SSH_SOCKET}" in found.process.env


def test_login_is_signed_at_a_named_host() -> None:
    seen = ask.Sight(reading.read(compiled()))
    answer = ask.ask(logins.SignLogin("git.example.org"), seen)
    assert (answer.allowed, answer.rule) == (True, f"gates.json:ssh/deploy/git.example.org/{KEY}")
    for where, host in ((seen, "www.example.org"), (ask.Sight(reading.read(compiled(PROGRAMS))), "git.example.org")):
        refused = ask.ask(logins.SignLogin(host), where)
        assert (refused.allowed, refused.add, "[[services.ssh_agent]]" in refused.because) == (False, (), True)
    with pytest.raises(errors.UsageError):
        logins.SignLogin("*.example.org")


def test_run_without_keys_has_no_relay() -> None:
    found = reading.read(compiled(PROGRAMS))
    assert (found.relay, bool(found.grants.ssh), found.reached.linked) == (False, False, False)
    assert not any(one.startswith("SSH_AUTH_SOCK=") for one in found.process.env)


SPOILED: dict[str, Callable[[Files], None]] = {}


def spoils(name: str, file: str, old: bytes, new: bytes) -> None:
    def spoil(found: Files) -> None:
        assert found[file].count(old) >= 1, (file, old)
        found[file] = found[file].replace(old, new, 1)

    SPOILED[name] = spoil


spoils("another port", "firewall.nft", b"{ 81 } accept", b"{ 81, 22 } accept")
spoils("every port", "firewall.nft", b" tcp dport { 81 } accept", b" accept")
spoils("another device", "firewall.nft", RULE, RULE.replace(b"agent0", b"uplink0"))
spoils("port of the plan", "gates.json", b'"listen":81', b'"listen":82')
spoils("no key", "gates.json", b'"key":"ssh-ed25519 ', b'"key":"ssh-ed25519 A')
spoils("no secret", "gates.json", b'"secret":"deploy"', b'"secret":""')
spoils("no host", "gates.json", b'"git.example.org"', b'"git example.org"')
spoils("no relay", "config.json", b'"/.covenant/ssh-relay",', b"")
spoils("relay alone", "config.json", b'"/.covenant/init",', b"")
spoils("no gateway port", "network.json", b'"ssh_agent_port":81,', b"")


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_artefact_is_refused(name: str) -> None:
    found = compiled()
    SPOILED[name](found)
    with pytest.raises(errors.ArtefactError):
        reading.read(found)


@pytest.mark.parametrize("call", sorted(init.SSH_CALLS - {"execve"}))
def test_denied_call_of_relay_is_refused_with_fix(call: str) -> None:
    more = f'{PROGRAMS}[permissions.syscalls]\ndeny = ["{call}"]\n{ENTRY}'
    with pytest.raises(errors.NotEnforceableError) as refused:
        compiled(more)
    assert refused.value.hint == f"take {call} out of permissions.syscalls.deny"


def test_other_machine_is_refused() -> None:
    with pytest.raises(errors.NotEnforceableError, match="no socket here") as refused:
        sample.compiled(sample.manifest(more=PROGRAMS + ENTRY), sample.host(arch="aarch64"))
    assert refused.value.hint == "run it on x86_64"


def test_manifest_without_program_or_place_is_refused() -> None:
    with pytest.raises(errors.ManifestError, match="no program is granted"):
        sample.manifest(more=ENTRY)
    with pytest.raises(errors.ManifestError, match="no place for its socket"):
        sample.manifest(more=PROGRAMS + ENTRY, filesystem="read-only-package")


def test_child_gets_no_host_more_than_its_parent() -> None:
    other = ENTRY.replace("git.example.org", "other.example.org")
    wide, narrow = (requested(PROGRAMS + one) for one in (ENTRY + _second(), ENTRY))
    assert narrow.is_subset(wide)
    assert not wide.is_subset(narrow)
    strange = requested(PROGRAMS + other)
    assert not strange.meet(narrow).ssh


def _second() -> str:
    line = wire.write_line(wire.string("ssh-ed25519") + wire.string(b"x" * 32))
    return f'[[services.ssh_agent]]\nsecret = "build"\nhosts = [{{ name = "b.example.org", keys = ["{line}"] }}]\n'


def test_verbs_name_the_service() -> None:
    manifest = sample.manifest(more=PROGRAMS + ENTRY)
    made = sample.compiled(manifest)
    says = [row.says for row in report.explain(made, where=lambda key: key)]
    assert "deploy signs logins at git.example.org" in says
    assert any(init.SSH_SOCKET in one for one in says)
    assert '"ssh-agent"' in own_limits.encoded(requested(PROGRAMS + ENTRY), manifest).decode()
    sight = ask.Sight(reading.read(made.files))
    seen = [files.Execute(init.SSH_RELAY).seen(sight), files.Open(init.SSH_RELAY).seen(sight)]
    assert [one.allowed for one in seen] == [True, True]
    told = denied.explain(Denial("ssh", KEY, "host_not_granted"), sight)
    assert (denials.LAYERS["ssh"], KEY in told.note) == ("the gate that signs logins", True)
    told = denied.explain(Denial("ssh", "SHA256:x at git.example.org", "key_not_granted"), sight)
    assert 'name = "git.example.org"' in told.note
    assert "no line" in denied.explain(Denial("ssh", "lock", "request_refused"), sight).note
