"""Check ``covenant keys``, ``trust`` and ``manifest`` as an operator uses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covenant.cli import times
from policy import errors
from policy.signing import envelope
from sandbox.storage.trust_state import State
from tests import signing_kit as kit
from tests import ssh_agent_kit
from tests.cli_kit import call, document, done, refused


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "pkg"
    for name, data in kit.FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def trusted(package: Path) -> Path:
    """Return a package signed by a key of the installed trust root."""
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("manifest", "sign", package, "--key", "ann")
    return package


def test_fix_for_unknown_key_ends_the_refusal(trusted: Path) -> None:
    """Each of the two ways of the fix, as it is printed, is enough."""
    done("keys", "new", "me", "--no-passphrase")
    done("manifest", "sign", trusted, "--key", "me", "--fresh")
    ours, _, other = str(refused("unknown_key", "manifest", "verify", trusted).hint).partition("; ")
    sign, add = (text[text.index("covenant") :].partition(",")[0].split()[1:] for text in (ours, other))
    done(*(str(trusted) if word == "PACKAGE" else word.replace("NAME", "ann") for word in sign))
    done("manifest", "verify", trusted)
    done("manifest", "sign", trusted, "--key", "me", "--fresh")
    refused("unknown_key", "manifest", "verify", trusted)
    done(*(word.replace("NAME", "me").replace("ROOTKEY", "ann") for word in add))
    done("manifest", "verify", trusted)


def test_sign_warns_of_what_run_refuses_here(trusted: Path) -> None:
    done("keys", "new", "me", "--no-passphrase")
    sign = ("manifest", "sign", trusted, "--key", "me", "--fresh")
    warning = "warning: key `me` is not in the trust root of this host: runs here refuse its signature\n"
    fix = "covenant trust add me --sign-with ROOTKEY"
    assert f"{warning}  fix: {fix}\n" in call(*sign).stderr
    assert "is not in the trust root" not in call("manifest", "sign", trusted, "--key", "ann", "--fresh").stderr
    done(*fix.replace("ROOTKEY", "ann").split()[1:])
    manifest = trusted / "agent.toml"
    manifest.write_text(manifest.read_text().replace("[agent]\n", '[agent]\nrole = "raeder"\n'))
    said = call(*sign).stderr
    assert warning not in said
    assert "role `raeder` is not known (agent.toml:2) [rule_3_role]\n  fix: did you mean `reader`?" in said
    # Not for this host: what it refuses says nothing.
    assert call(*sign, "--audience", "elsewhere").stderr == ""


def test_sign_warns_of_signature_that_does_not_count(trusted: Path) -> None:
    done("keys", "new", "bob", "--no-passphrase")
    done(
        "trust",
        "add",
        "bob",
        "--public",
        done("keys", "public", "bob").strip(),
        "--agents",
        "team-*",
        "--sign-with",
        "ann",
    )
    # Beside ann's signature, which counts.
    said = call("manifest", "sign", trusted, "--key", "bob").stderr
    assert said.startswith("warning: the signature of `bob` does not count for this agent id and role\n  fix: covenant")
    # Alone.
    said = call("manifest", "sign", trusted, "--key", "bob", "--fresh").stderr
    assert said.startswith("warning: runs on this host refuse the package for now: no signer may sign for agent `")
    assert refused("unknown_key", "manifest", "verify", trusted).hint in said
    # The fix.
    done("trust", "set", "bob", "--agents", "*", "--sign-with", "ann")
    done("manifest", "verify", trusted)
    assert "warning" not in call("manifest", "sign", trusted, "--key", "bob", "--fresh").stderr
    # Another signature is needed.
    done("trust", "set", "bob", "--threshold", "2", "--sign-with", "ann")
    said = call("manifest", "sign", trusted, "--key", "bob", "--fresh").stderr
    assert "refuse the package for now: 1 operators signed and 2 are needed\n  fix: another operator" in said


# --- keys ---------------------------------------------------------------------------------------


def test_keys(covenant_home: Path) -> None:
    assert done("keys", "list") == ""
    keyid = done("keys", "new", "ann", "--no-passphrase").strip()
    raw = bytes.fromhex(done("keys", "public", "ann").strip())
    assert document("keys", "public", "ann") == {
        "kind": "key_public", "name": "ann", "keyid": keyid, "public": raw.hex()
    }  # fmt: skip
    assert document("keys", "list")["keys"] == [{"name": "ann", "keyid": keyid, "passphrase": False}]
    assert keyid in done("keys", "list")
    assert (covenant_home / "keys" / "ann.key").exists()
    refused("key_file", "keys", "new", "ann", "--no-passphrase")
    assert refused("key_file", "keys", "new", "bob").hint == "give --passphrase-file FILE or --no-passphrase"
    refused("key_file", "keys", "public", "bob")
    refused("usage", "keys", "new", "../x", "--no-passphrase")


def test_passphrase_comes_from_file_or_stdin_and_never_from_argument(tmp_path: Path) -> None:
    file = tmp_path / "pass"
    file.write_text("open sesame\n")
    file.chmod(0o600)
    done("keys", "new", "ann", "--passphrase-file", file)
    done("trust", "init", "--key", "ann", "--passphrase-file", "-", stdin="open sesame\n")
    refused("key_file", "keys", "new", "bob")  # no terminal
    refused("key_file", "keys", "new", "bob", "--passphrase-file", "-", stdin="\n")
    refused("usage", "keys", "new", "bob", "--no-passphrase", "--passphrase-file", file)
    file.chmod(0o644)
    refused("key_file", "keys", "new", "bob", "--passphrase-file", file)
    file.chmod(0o600)
    if os.geteuid() == 0:  # the file's owner knows the passphrase
        os.chown(file, 12345, 12345)
        assert "uid 12345" in refused("key_file", "keys", "new", "bob", "--passphrase-file", file).message
    assert [k["name"] for k in document("keys", "list")["keys"]] == ["ann"]
    assert call("keys", "new", "bob", "--passphrase", "x").exit_code == 2


# --- trust --------------------------------------------------------------------------------------


def test_trust_init_and_show(covenant_home: Path) -> None:
    assert "there is no trust root" in refused("trust_root", "trust", "show").message
    refused("key_file", "trust", "init", "--key", "ann")
    keyid = done("keys", "new", "ann", "--no-passphrase").strip()
    made = document("trust", "init", "--key", "ann", "--agents", "team-*", "--roles", "reader", "--expires", "30d")
    assert made["kind"] == "trust_created"
    shown = document("trust", "show")
    assert (shown["version"], shown["threshold"], shown["expired"]) == (1, 1, False)
    (key,) = shown["keys"]
    assert (key["name"], key["keyid"]) == ("ann", keyid)
    assert key["scope"] == {"agents": ["team-*"], "roles": ["reader"], "approve_unlimited": True}
    assert 29 * kit.DAY < shown["expires_at"] - times.now_ms() <= 30 * kit.DAY
    assert "team-*" in done("trust", "show")
    assert (covenant_home / "trust" / "root.json").stat().st_mode & 0o777 == 0o600
    refused("trust_root", "trust", "init", "--key", "ann")


def test_as_root_root_is_installed_in_state_too(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("keys", "new", "ann", "--no-passphrase")
    real = os.geteuid()
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: False)
    assert document("trust", "init", "--key", "ann")["state"] is None
    assert not (covenant_home / "supervisor").exists()
    assert document("trust", "show")["source"] == str(covenant_home / "trust" / "root.json")
    refused("trust_root", "trust", "init", "--key", "ann")
    # Then as root: the same document becomes version 1 of the state.
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: True)
    done("keys", "new", "eve", "--no-passphrase")
    assert "not version 1 with the key `eve`" in refused("trust_root", "trust", "init", "--key", "eve").message
    for other in (["--agents", "a*"], ["--roles", "reader"], ["--expires", "1d"]):
        refused("trust_root", "trust", "init", "--key", "ann", *other)
    assert not (covenant_home / "supervisor" / "trust").exists()
    assert document("trust", "init", "--key", "ann")["state"] == str(covenant_home / "supervisor")
    assert document("trust", "show")["source"] == str(covenant_home / "supervisor")
    with State(covenant_home / "supervisor") as state:
        assert state.present_root().raw == (covenant_home / "trust" / "root.json").read_bytes()
    refused("trust_root", "trust", "init", "--key", "ann")
    assert os.geteuid() == real


def test_working_copy_with_key_that_nobody_asked_for_is_not_installed(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A root lists its own keys: a root that lists ann but is signed by eve alone is well-formed.
    ann = bytes.fromhex(document("keys", "new", "ann", "--no-passphrase")["public"])
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: False)
    done("trust", "init", "--key", "ann")
    copy = covenant_home / "trust" / "root.json"
    honest = copy.read_bytes()
    eve = kit.operator(2, name="eve")
    for keys, signer in (([{**eve, "name": "ann", "public": ann.hex()}, eve], 2), ([{**eve, "name": "ann"}], 2)):
        copy.write_bytes(kit.root_bytes(kit.root_document(*keys), signer))
        monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: True)
        assert "working copy" in refused("trust_root", "trust", "init", "--key", "ann").message
        with State(covenant_home / "supervisor") as state:
            assert not state.has_root()
    copy.write_bytes(honest)
    done("trust", "init", "--key", "ann")


def test_state_another_uids_is_not_read(covenant_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    # A path below a file cannot be read, like a path below another user's directory.
    (tmp_path / "closed").write_bytes(b"")
    monkeypatch.setenv("COVENANT_STATE", str(tmp_path / "closed" / "state"))
    assert document("trust", "show")["source"] == str(covenant_home / "trust" / "root.json")


@pytest.mark.parametrize(
    "bad", [["--agents", "a*b"], ["--roles", "Read*"], ["--expires", "0d"], ["--expires", "9999d"], ["--expires", "1y"]]
)
def test_trust_init_refuses_what_it_cannot_mean(bad: list[str]) -> None:
    done("keys", "new", "ann", "--no-passphrase")
    assert isinstance(call("trust", "init", "--key", "ann", *bad).exception, errors.CovenantError)
    refused("trust_root", "trust", "show")


# --- manifest -------------------------------------------------------------------------------------


def test_check_says_what_is_there_and_what_sign_would_refuse(package: Path) -> None:
    assert document("manifest", "check", package)["notes"] == []
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"")
    (package / "agent.toml").write_bytes(kit.MANIFEST.replace(b'network = "off"', b"") + b"[custom]\nx = 1\n")
    checked = document("manifest", "check", package)
    assert checked["unknown_sections"] == ["custom"]
    assert len(checked["notes"]) == 3
    assert "resources.network = outbound-https-only" in done("manifest", "check", package)
    (package / "agent.toml").write_bytes(b"[agent")
    refused("manifest_syntax", "manifest", "check", package)
    refused("package_invalid", "manifest", "check", package / "missing")


def test_sign_verify_show(trusted: Path) -> None:
    verified = document("manifest", "verify", trusted)
    assert verified["agent_id"] == "hello"
    assert [s["name"] for s in verified["signers"]] == ["ann"]
    assert set(verified["statement"]["subjects"]) == set(kit.FILES)
    assert verified["statement"]["audience"] is None
    assert 89 * kit.DAY < verified["statement"]["expires_at"] - times.now_ms() <= 90 * kit.DAY
    assert abs(verified["statement"]["serial"] - times.now_ms()) < 600_000
    assert "signed by ann" in done("manifest", "verify", trusted)
    shown = document("manifest", "show", trusted)
    assert shown["signers"] == ["ann"]
    assert shown["refusal"] is None
    assert shown["manifest"]["resources"]["network"] == "off"
    assert "memory_mb = 512  (default)" in done("manifest", "show", trusted)


def test_sign_prints_files_defaults_and_unknown_sections(trusted: Path) -> None:
    (trusted / "agent.toml").write_bytes(kit.MANIFEST + b"[custom]\nx = 1\n")
    result = call("manifest", "sign", trusted, "--key", "ann", "--audience", "h1", "--serial", "7", "--expires", "2h")
    assert result.exit_code == 0
    for name in kit.FILES:
        assert f"  {name}\n" in result.stdout
    assert "resources.pids_max = 64" in result.stdout
    assert "serial 7" in result.stdout
    assert "for host h1" in result.stdout
    assert "[custom]" in result.stderr
    signed = document("manifest", "sign", trusted, "--key", "ann")
    assert signed["statement"]["unknown_sections"] == ["custom"]
    assert "resources.pids_max" in {row["key"] for row in signed["defaults"]}


def test_sign_and_check_print_what_is_granted_not_what_text_seems_to_say(trusted: Path) -> None:
    # The name is one string, but in an editor it looks like sections with limits.
    lines = (
        '"""hello \\',
        "",
        "[agent] \\",
        "role = 'observer' \\",
        "[permissions.syscalls] \\",
        "allow = [] \\",
        '"""',
    )
    seems = "\n".join(lines)
    text = kit.MANIFEST.decode().replace('name = "hello"', f"name = {seems}")
    far = " " * 300
    text += f'[permissions.filesystem]\nread = ["/srv/docs",{far}"/srv/other"]\n'
    text += '[permissions.syscalls]\nallow = ["mlockall"]\ndeny = ["chmod"]\n'
    (trusted / "agent.toml").write_text(text)
    for verb in (["check"], ["sign", "--key", "ann"]):
        said = done("manifest", verb[0], trusted, *verb[1:]).splitlines()
        granted = [line.strip() for line in said if line.startswith("  ") and ": " in line]
        assert "identity: no role, so the ceiling of none" in granted
        assert [line for line in granted if line.startswith(("filesystem", "syscalls"))] == [
            "filesystem: read /srv/docs",
            "filesystem: read /srv/other",
            "syscalls: profile python3",
            "syscalls: call mlockall",
            "syscalls: not call chmod",
        ]
        assert "resources: memory_mb 512 MiB" in granted
        assert "backend: linux-gvisor" in granted
        assert document("manifest", verb[0], trusted, *verb[1:])["grants"]["filesystem"] == [
            "read /srv/docs",
            "read /srv/other",
        ]
    full = kit.MANIFEST.replace(b'"off"', b'"full"')
    (trusted / "agent.toml").write_bytes(full)
    assert "  network: connect any public host tcp 1-65535\n" in done("manifest", "check", trusted)
    # Two nested blocks are one line each, without the hundred blocks between them.
    entry = '[[permissions.network]]\nhost = "{}"\nports = [443, "8000-8010"]\nprotocol = "{}"\n'
    tables = entry.format("2000::/3", "tcp") + entry.format("2001:db8::1", "udp")
    (trusted / "agent.toml").write_bytes(full + tables.encode())
    assert document("manifest", "check", trusted)["grants"]["network"] == [
        "connect 2000::/3 tcp 443,8000-8010",
        "connect 2001:db8::1 udp 443,8000-8010",
    ]
    local = kit.MANIFEST.replace(b"linux-gvisor", b"trusted-local").replace(b"required = true", b"required = false")
    (trusted / "agent.toml").write_bytes(local)
    assert "  backend: trusted-local, which is no sandbox" in done("manifest", "check", trusted)


def test_directory_where_unfinished_envelope_would_lie_is_no_crash(trusted: Path) -> None:
    unfinished = trusted / ".agent.dsse.json.new"
    unfinished.mkdir()
    assert "cannot be written" in refused("package_invalid", "manifest", "sign", trusted, "--key", "ann").message
    unfinished.rmdir()
    unfinished.write_bytes(b"half")
    done("manifest", "sign", trusted, "--key", "ann")
    assert not unfinished.exists()


def test_sign_refuses_before_it_asks_for_passphrase(package: Path, tmp_path: Path) -> None:
    file = tmp_path / "pass"
    file.write_text("p")
    file.chmod(0o600)
    done("keys", "new", "ann", "--passphrase-file", file)
    (package / "agent.toml").write_bytes(kit.MANIFEST.replace(b'network = "off"', b""))
    refused("manifest_invalid", "manifest", "sign", package, "--key", "ann")
    (package / "agent.toml").write_bytes(kit.MANIFEST)
    refused("key_file", "manifest", "sign", package, "--key", "ann")  # no terminal
    assert not (package / "agent.dsse.json").exists()
    done("manifest", "sign", package, "--key", "ann", "--passphrase-file", file)


CHANGES: dict[str, tuple[str, Any]] = {
    "one byte of main.py": ("digest_mismatch", lambda p: (p / "main.py").write_bytes(b"print('hj')\n")),
    "the manifest": ("digest_mismatch", lambda p: (p / "agent.toml").write_bytes(kit.MANIFEST + b"\n")),
    "a new file": ("digest_mismatch", lambda p: (p / "new").write_bytes(b"")),
    "a removed file": ("digest_mismatch", lambda p: (p / "main.py").unlink()),
    "no envelope": ("unsigned", lambda p: (p / "agent.dsse.json").unlink()),
    "a broken envelope": ("rule_2_signature", lambda p: (p / "agent.dsse.json").write_bytes(b"{}")),
    "a symlink": ("digest_mismatch", lambda p: (p / "link").symlink_to("main.py")),
    "a symlink to another place": ("package_invalid", lambda p: (p / "link").symlink_to("/etc/hostname")),
    "an unknown key": ("unknown_key", lambda p: _sign(p, "--fresh", key="eve")),
    "an audience": ("wrong_audience", lambda p: _sign(p, "--audience", "another-host")),
    "a serial from the future": ("serial_rollback", lambda p: _sign(p, "--serial", str(2**52))),
    "an operator who did not sign": ("rule_2_signature", lambda p: _sign_for_operator(p, b"bob")),
}


def _sign(package: Path, *options: str, key: str = "ann") -> None:
    if key != "ann":
        done("keys", "new", key, "--no-passphrase")
    done("manifest", "sign", package, "--key", key, *options)


def _sign_for_operator(package: Path, name: bytes) -> None:
    (package / "agent.toml").write_bytes(kit.MANIFEST.replace(b"[agent]", b'[agent]\noperator = "' + name + b'"'))
    _sign(package)


@pytest.mark.parametrize("name", CHANGES)
def test_verify_refuses_each_change_with_its_own_code(name: str, trusted: Path) -> None:
    done("manifest", "verify", trusted)
    code, change = CHANGES[name]
    change(trusted)
    refused(code, "manifest", "verify", trusted)


def test_show_says_of_one_reading_what_it_says_is_signed(trusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the package were read twice, a user who can write it could show one manifest and have another verified."""
    from sandbox.storage import package_reader as reader

    real, readings = reader.read, list[Any]()
    signed = (trusted / "agent.toml").read_bytes()
    (trusted / "agent.toml").write_bytes(signed.replace(b"0.1.0", b"9.9.9"))

    def swapping(path: Any) -> Any:
        made = real(path)
        readings.append(made)
        (trusted / "agent.toml").write_bytes(signed)
        return made

    monkeypatch.setattr(reader, "read", swapping)
    shown = document("manifest", "show", trusted)
    assert (shown["manifest"]["agent"]["version"], len(readings)) == ("9.9.9", 1)
    assert shown["statement"] is None
    assert (shown["signers"], shown["refusal"]["code"]) == ([], "digest_mismatch")
    again = document("manifest", "show", trusted)
    assert (again["manifest"]["agent"]["version"], again["signers"]) == ("0.1.0", ["ann"])


def test_number_of_signatures_is_that_of_envelope(trusted: Path) -> None:
    """A false signature under the second key's id is replaced and not counted."""
    done("keys", "new", "bob", "--no-passphrase")
    bob = next(k["keyid"] for k in document("keys", "list")["keys"] if k["name"] == "bob")
    file = trusted / "agent.dsse.json"
    file.write_bytes(envelope.decode(file.read_bytes()).signed_by(envelope.Signature(bob, bytes(64))).encode())
    assert document("manifest", "sign", trusted, "--key", "bob")["signatures"] == 2
    assert len(envelope.decode(file.read_bytes()).signatures) == 2


def test_second_operator_adds_signature_to_same_statement(trusted: Path) -> None:
    before = document("manifest", "verify", trusted)
    done("keys", "new", "bob", "--no-passphrase")
    added = document("manifest", "sign", trusted, "--key", "bob")
    assert (added["how"], added["signatures"]) == ("added", 2)
    after = document("manifest", "verify", trusted)
    assert after["payload_digest"] == before["payload_digest"]
    assert after["statement"] == before["statement"] == added["statement"]
    # One of the two signs again: the command adds nothing and removes no signature.
    for name in ("ann", "bob"):
        error = refused("rule_2_signature", "manifest", "sign", trusted, "--key", name)
        assert "have signed the package already" in error.message
    assert document("manifest", "verify", trusted) == after
    fresh = document("manifest", "sign", trusted, "--key", "bob", "--fresh")
    assert (fresh["how"], fresh["signatures"]) == ("replaced", 1)
    refused("unknown_key", "manifest", "verify", trusted)


def test_sign_says_which_it_did(trusted: Path) -> None:
    assert "this key alone had signed the one before" in done("manifest", "sign", trusted, "--key", "ann")
    done("keys", "new", "bob", "--no-passphrase")
    said = done("manifest", "sign", trusted, "--key", "bob")
    assert said.startswith("added a signature to 3 files of hello with bob ")
    assert "beside ann, over the same statement" in said
    (trusted / "main.py").write_bytes(b"changed")
    said = done("manifest", "sign", trusted, "--key", "ann")
    assert "the files are not those that were signed" in said
    assert said.startswith("made a new statement and signed 3 files")


def test_key_of_ssh_agent_signs_as_key_file_does(
    trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in ([], ["--key", "ann", "--ssh-agent", "bob"]):
        refused("usage", "manifest", "sign", trusted, *arguments)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    refused("ssh_agent", "manifest", "sign", trusted, "--ssh-agent", "bob@laptop")
    with ssh_agent_kit.running(tmp_path) as agent:
        monkeypatch.setenv("SSH_AUTH_SOCK", agent.socket)
        agent.add("bob@laptop")
        signed = document("manifest", "sign", trusted, "--ssh-agent", "bob@laptop")
        assert (signed["how"], signed["key"]) == ("added", "bob@laptop")
        (listed,) = document("keys", "list")["agent"]
        assert (listed["comment"], listed["keyid"]) == ("bob@laptop", signed["keyid"])
        assert listed["fingerprint"] in agent.run("ssh-add", "-l")
        text = done("keys", "list")
        assert f"{listed['keyid']}  bob@laptop  ssh-agent {listed['fingerprint']}" in text
        assert document("manifest", "sign", trusted, "--ssh-agent", listed["fingerprint"], "--fresh")["signatures"] == 1
        refused("unknown_key", "manifest", "verify", trusted)
    result = call("keys", "list")
    assert result.exit_code == 0
    assert "ssh-agent cannot be reached" in result.stderr
    assert "ann" in result.stdout


def test_operator_who_signed_is_accepted(trusted: Path) -> None:
    _sign_for_operator(trusted, b"ann")
    done("manifest", "verify", trusted)


def test_verify_knows_ratchet_and_clock_of_state(trusted: Path, covenant_home: Path) -> None:
    with State(covenant_home / "supervisor") as state:
        if not state.has_root():
            state.init_root((covenant_home / "trust" / "root.json").read_bytes(), times.now_ms())
        accepted = document("manifest", "verify", trusted)["statement"]["serial"]
        from policy.signing import trust
        from sandbox.storage import package_reader

        now_ms = times.now_ms()
        made = trust.verify(
            package_reader.read(trusted), state.present_root(), now_ms=now_ms, audience="any", serials=state
        )
        state.accept(made, now_ms=now_ms)
    done("manifest", "verify", trusted)
    _sign(trusted, "--serial", str(accepted - 1))
    refused("serial_rollback", "manifest", "verify", trusted)


def test_expired_envelope_is_refused(trusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _sign(trusted, "--expires", "1s")
    real = times.now_ms()
    monkeypatch.setattr(times, "now_ms", lambda: real + 5000)
    refused("envelope_expired", "manifest", "verify", trusted)
    shown = document("manifest", "show", trusted)
    assert shown["statement"] is None
    assert shown["refusal"]["code"] == "envelope_expired"


# --- the whole command ------------------------------------------------------------------------------


def test_as_process_errors_are_one_line_or_one_document(trusted: Path) -> None:
    program = [sys.executable, "-c", "from covenant.cli import main; main.entry()"]
    (trusted / "x\x1b[2J\u202e").write_bytes(b"")
    plain = subprocess.run([*program, "manifest", "verify", str(trusted)], capture_output=True, text=True)
    assert plain.returncode == 1
    assert plain.stdout == ""
    assert "[package_invalid]" in plain.stderr
    assert not {"\x1b", "\u202e"} & set(plain.stderr)
    machine = subprocess.run([*program, "manifest", "verify", str(trusted), "--json"], capture_output=True, text=True)
    assert machine.returncode == 1
    assert json.loads(machine.stdout)["code"] == "package_invalid"
    usage = subprocess.run([*program, "manifest", "sign", str(trusted)], capture_output=True, text=True)
    assert usage.returncode == 2


@pytest.mark.parametrize(
    ("text", "value"), [("90d", 90 * kit.DAY), ("1s", 1000), ("3650d", 3650 * kit.DAY), ("5m", 300_000)]
)
def test_durations(text: str, value: int) -> None:
    assert times.duration_ms(text, option="--expires") == value


@pytest.mark.parametrize(
    "text", ["", "90", "d", "0s", "-1d", "1.5d", "1w", "3651d", " 1d", "1d ", "1d\n", "٣d", "9" * 30 + "d"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(errors.UsageError):
        times.duration_ms(text, option="--expires")


def test_times_are_shown_in_utc() -> None:
    assert times.utc(0) == "1970-01-01 00:00 UTC"
    assert times.utc(2**53 - 1) == f"{2**53 - 1} ms"
