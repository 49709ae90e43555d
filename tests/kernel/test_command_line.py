"""The command line as a process, as root: one document a call, whose rights, what is said and what is logged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.world import AGENTS, HEAD, TAIL, World

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
GOOD = {"main.py": HEAD + "answer = intent['text']" + TAIL}


def call(
    home: Path, *arguments: str | Path, stdin: bytes = b"", uid: int = 0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """``python -m covenant`` with this home; ``env`` is added, an empty value takes a name out."""
    merged = {**os.environ, "COVENANT_HOME": str(home), "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "covenant", *map(str, arguments)],
        input=stdin,
        env={name: value for name, value in merged.items() if value},
        capture_output=True,
        timeout=120,
        user=uid,
        group=uid,
        extra_groups=[],
    )


def document(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    """Exactly one JSON document, on one line of its own."""
    assert done.stdout.count(b"\n") == 1, (done.stdout, done.stderr)
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


# --- one document, one exit status --------------------------------------------------------------------

# The package is PKG, a directory that does not exist OUT. Kind, or the error's code, and the exit status.
CALLS: list[tuple[str, str, int]] = [
    ("keys new second --no-passphrase", "key_created", 0),
    ("keys list", "keys", 0),
    ("keys public ann", "key_public", 0),
    ("trust show", "trust_root", 0),
    ("keys new bob --no-passphrase", "key_created", 0),
    ("trust add bob --sign-with ann", "trust_changed", 0),
    ("trust set bob --threshold 2 --sign-with ann", "trust_changed", 0),
    ("trust rotate bob --to ann --sign-with ann", "trust_root", 1),
    ("trust revoke --key bob --reason lost --sign-with ann", "trust_changed", 0),
    ("trust renew --expires 400d --sign-with ann", "trust_changed", 0),
    ("trust enforce", "trust_enforced", 0),
    ("trust export OUT", "trust_exported", 0),
    ("trust import OUT", "trust_root", 1),
    ("trust remove ann --sign-with ann", "trust_root", 1),
    ("trust renew", "usage", 2),
    ("manifest new OUT --id a", "manifest_created", 0),
    ("manifest new PKG", "package_invalid", 1),
    ("manifest schema", "manifest_schema", 0),
    ("manifest check PKG", "manifest_checked", 0),
    ("manifest sign PKG --key ann", "manifest_signed", 0),
    ("manifest verify PKG", "manifest_verified", 0),
    ("manifest show PKG", "manifest", 0),
    ("manifest schema --tools", "manifest_schema", 0),
    ("tools list PKG", "package_invalid", 1),
    ("tools describe PKG fs", "usage", 2),
    ("tools verify", "usage", 2),
    ("tools pin OUT", "package_invalid", 1),
    ("policy compile PKG --out OUT", "policy_compiled", 0),
    ("policy explain PKG", "policy_explained", 0),
    ("policy prove PKG", "policy_proved", 0),
    ("policy diff PKG PKG", "policy_diff", 0),
    ("policy why PKG --syscall read", "policy_why", 0),
    ("policy why PKG --syscall ptrace", "policy_why", 3),
    ("run PKG hi", "intent_result", 0),
    ("audit recent -n 3", "audit_recent", 0),
    ("audit verify", "audit_integrity", 0),
    ("doctor", "doctor", 0),
    ("help", "error_codes", 0),
    ("help unsigned", "error_code", 0),
    ("", "usage", 2),
    ("nonsense", "usage", 2),
    ("keys", "usage", 2),
    ("keys new", "usage", 2),
    ("keys new a/b", "usage", 2),
    ("keys new ann --no-passphrase", "key_file", 1),
    ("keys public nobody", "key_file", 1),
    ("trust init", "usage", 2),
    ("trust init --key ann", "trust_root", 1),
    ("manifest check", "usage", 2),
    ("manifest check OUT", "package_invalid", 1),
    ("manifest sign PKG", "usage", 2),
    ("manifest sign PKG --key ann --serial x", "usage", 2),
    ("manifest sign PKG --key ann --expires soon", "usage", 2),
    ("policy compile PKG", "usage", 2),
    ("policy compile PKG --out PKG", "usage", 2),
    ("policy explain OUT", "package_invalid", 1),
    ("run PKG", "usage", 2),
    ("run PKG hi --timeout nan", "usage", 2),
    ("run PKG hi --timeout inf", "usage", 2),
    ("run PKG hi --nonsense", "usage", 2),
    ("run PKG hi --as covenant-agent", "usage", 2),
    ("run OUT hi", "package_invalid", 1),
    ("dev OUT hi", "package_invalid", 1),
    ("audit recent -n 0", "usage", 2),
    ("help no_such_code", "usage", 2),
]


@pytest.fixture
def home(world: World) -> Path:
    """A home with the key ``ann`` that its trust root lists; the world's own root gives way."""
    shutil.rmtree(world.state / "trust")
    assert call(world.home, "keys", "new", "ann", "--no-passphrase").returncode == 0
    assert call(world.home, "trust", "init", "--key", "ann").returncode == 0
    return world.home


def test_every_verb_answers_with_one_document_and_its_status(world: World, home: Path) -> None:
    package = world.package(GOOD)
    wrong = []
    for number, (line, kind, status) in enumerate(CALLS):
        places = {"PKG": str(package), "OUT": str(world.base / f"out-{number}")}
        done = call(home, *(places.get(word, word) for word in line.split()), "--json")
        found = document(done)
        said = found["code"] if found["kind"] == "error" else found["kind"]
        if (said, done.returncode) != (kind, status) or (status and set(found) < {"message", "code", "hint", "where"}):
            wrong.append((line, found, done.returncode, done.stderr))
    assert wrong == []


def test_first_trust_root_is_in_log_before_it_holds(world: World, home: Path) -> None:
    (row,) = [row["kind"] for row in world.rows() if row["kind"]["type"] == "trust_changed"]
    installed = next((world.state / "trust").iterdir()).read_bytes()
    assert (row["version_from"], row["version_to"], row["operator"], row["signers"]) == (None, 1, "ann", ["ann"])
    assert row["digest"] == hashlib.sha256(installed).hexdigest()
    # A log that cannot be written to leaves the authority as it was.
    shutil.rmtree(world.state / "trust")
    (world.state / "audit" / "events.jsonl").write_bytes(b"")
    assert document(call(home, "trust", "init", "--key", "ann", "--json"))["code"] == "ledger"
    assert not (world.state / "trust").exists()


def test_audit_verify_answers_no_with_status_3(world: World, home: Path) -> None:
    package = world.package(GOOD)
    assert document(call(home, "run", package, "hi", "--json"))["code"] == "unsigned"
    assert call(home, "audit", "verify").returncode == 0
    events = home / "supervisor" / "audit" / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"unsigned", b"Unsigned"))
    done = call(home, "audit", "verify", "--json")
    assert (done.returncode, document(done)["report"]["valid"]) == (3, False)


# --- run and dev ----------------------------------------------------------------------------------------


def test_intent_may_come_from_stdin(world: World) -> None:
    path = world.sign(world.package(GOOD))
    text = "zwei Zeilen\nund ß"
    assert json.loads(document(call(world.home, "run", path, "-", "--json", stdin=text.encode()))["text"]) == text
    for stdin in (b"\xff", b"x" * (1 << 20)):
        done = call(world.home, "run", path, "-", "--json", stdin=stdin)
        assert (done.returncode, document(done)["code"]) == (2, "usage")
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "covenant", "run", str(path), "-", "--json"]
    env = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(closed, env=env, capture_output=True, timeout=60)
    assert (done.returncode, document(done)["code"]) == (2, "usage")
    # What no agent could be given was refused before anything was written down as started.
    assert [row["kind"]["type"] for row in world.rows()].count("run_started") == 1


def test_dev_runs_what_was_just_edited_and_says_whose_key_it_was(world: World) -> None:
    path = world.package(GOOD)
    done = call(world.home, "dev", path, "first")
    assert (done.returncode, done.stdout) == (0, b'"first"\n')
    assert b"dev: signed with a local key" in done.stderr
    assert b"not an operator's signature" in done.stderr
    (path / "main.py").write_text(HEAD + "answer = 'edited'" + TAIL)
    assert json.loads(document(call(world.home, "dev", path, "second", "--json"))["text"]) == "edited"
    assert sorted(p.name for p in path.iterdir()) == ["agent.toml", "main.py"]
    # What dev signed is good for nothing else.
    assert document(call(world.home, "run", path, "third", "--json"))["code"] == "unsigned"
    started = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_started"]
    assert [(s["operator"], s["signers"]) for s in started] == [("dev@local", ["dev@local"])] * 2


def test_run_names_home_state_and_trust_root_and_each_unknown_section_once(world: World) -> None:
    more = "[elsewhere]\nkey = 1"
    answering = world.sign(world.package(GOOD, more=more))
    failing = world.sign(world.package({"main.py": "print('no result')"}, name="failing", id="failing", more=more))
    for path, status in ((answering, 0), (failing, 1)):
        for options in ([], ["--json"]):
            done = call(world.home, "run", path, "hi", *options)
            said = done.stderr.decode()
            assert done.returncode == status, said
            assert f"home {world.home}, state {world.state}, trust root version 1" in said
            assert said.count("[elsewhere]") == 1


def test_trusted_local_says_what_it_does_not_enforce_whatever_end(world: World) -> None:
    fields = {"required": "false", "backend": "trusted-local"}
    for name, code, status in (("good", GOOD["main.py"], 0), ("bad", "print('no result')", 1)):
        path = world.sign(world.package({"main.py": code}, name=name, id=name, **fields))
        for options in ([], ["--json"]):
            done = call(world.home, "run", path, "hi", *options)
            assert done.returncode == status, done.stderr
            assert b"not enforced: executables" in done.stderr
    # There is no sandbox to look at, and the artefacts of another backend would be a lie.
    path = world.package(GOOD, **fields)
    assert document(call(world.home, "policy", "explain", path, "--json"))["code"] == "backend_refused"


@pytest.mark.parametrize("linked", ["static", "dynamic"])
def test_compiled_agent_answers_through_supervisor(world: World, linked: str) -> None:
    program = world.base / "checksum"
    build = [sys.executable, str(ROOT / "scripts" / "build_agents"), "--dynamic", str(program)]
    subprocess.run(build, check=True, capture_output=True)
    built = program if linked == "dynamic" else AGENTS / "checksum" / "bin" / "checksum"
    manifest = (AGENTS / "checksum" / "agent.toml").read_bytes()
    path = world.sign(world.package({"agent.toml": manifest, "bin/checksum": built.read_bytes()}))
    done = document(call(world.home, "run", path, "The quick brown fox jumps over the lazy dog", "--json"))
    # The check value of CRC-32 for this sentence.
    assert "414fa339" in done["text"], done


# --- what is refused is in the log ----------------------------------------------------------------------


def test_refusal_is_in_log_with_rule_grant_and_place(world: World) -> None:
    linked, changed = world.sign(world.package(GOOD, name="linked")), world.sign(world.package(GOOD, name="changed"))
    (linked / "data").symlink_to("/etc/passwd")
    (changed / "main.py").write_text("pass")
    fifo = world.package(GOOD, name="fifo")
    os.mkfifo(fifo / "pipe")
    spelt = world.package({**GOOD, "agent.toml": "[agent]\nid = 1\n"}, name="spelt")
    network = world.sign(world.package(GOOD, name="network", network="full"))
    credentials = '[permissions.credentials]\ngrants = ["a", "b"]'
    vault = world.sign(world.package(GOOD, name="vault", more=credentials))
    denied = world.sign(world.package(GOOD, name="denied", more='[permissions.syscalls]\nallow = ["ptrace"]'))
    cases: list[tuple[str, Path, tuple[str, int | None, str | None, str | None]]] = [
        ("run", linked, ("package_invalid", None, None, "data")),
        ("run", changed, ("digest_mismatch", 2, None, "main.py")),
        ("dev", fifo, ("package_invalid", None, None, "pipe")),
        ("dev", spelt, ("manifest_invalid", 1, None, "agent.toml:1:2")),
        ("run", network, ("not_enforceable", None, "resources.network", "agent.toml:11")),
        ("run", vault, ("vault_unusable", None, "permissions.credentials.grants", f"{world.state}/vault")),
        ("run", denied, ("rule_7_deny_list", 7, "permissions.syscalls.allow[0]", "agent.toml:18")),
    ]
    for verb, path, expected in cases:
        assert document(call(world.home, verb, path, "hi", "--json"))["code"] == expected[0]
        row = world.rows()[-1]["kind"]
        assert row["type"] == "manifest_rejected"
        assert (row["code"], row["rule"], row["grant"], row["where"]) == expected


# --- whose rights ---------------------------------------------------------------------------------------


@pytest.fixture
def plain(world: World, tmp_path: Path) -> tuple[Path, Path]:
    """A home and a package of an ordinary user's, who can walk there."""
    for path in (tmp_path, *tmp_path.parents):
        if path != Path("/") and path.stat().st_uid == 0 and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    home = tmp_path / "plain"
    home.mkdir(mode=0o700)
    package = world.sign(world.package(GOOD))
    package.parent.chmod(0o755)
    os.chown(home, NOBODY, NOBODY)
    return home, package


def test_looking_takes_no_root(world: World, plain: tuple[Path, Path]) -> None:
    home, package = plain
    assert call(home, "manifest", "check", package, uid=NOBODY).returncode == 0
    assert call(home, "manifest", "show", package, uid=NOBODY).returncode == 0
    mine = document(call(home, "policy", "explain", package, "--json", uid=NOBODY))
    assert mine["policy_digest"] == document(call(world.home, "policy", "explain", package, "--json"))["policy_digest"]
    assert call(home, "policy", "compile", package, "--out", home / "out", uid=NOBODY).returncode == 0
    assert (home / "out" / "digest").read_text() == mine["policy_digest"] + "\n"
    found = document(call(home, "doctor", "--json", uid=NOBODY))
    assert found["kind"] == "doctor"
    assert {c["name"] for c in found["checks"] if c["status"] == "ok"} >= {"machine", "kernel", "runsc", "python3"}
    world.run(package)
    log = home / "supervisor"
    log.mkdir(mode=0o700, exist_ok=True)
    for name in ("audit", "audit-head"):
        shutil.copytree(world.state / name, log / name)
    for path in (log, *log.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    verified = document(call(home, "audit", "verify", "--json", uid=NOBODY))
    assert verified.get("report", {}).get("valid") is True, verified


def test_looking_takes_no_right_to_supervisors_state(world: World, plain: tuple[Path, Path]) -> None:
    home, package = plain
    env = {"COVENANT_STATE": str(world.state)}
    for verb in ("check", "show"):
        assert call(home, "manifest", verb, package, uid=NOBODY, env=env).returncode == 0
    done = call(home, "policy", "explain", package, uid=NOBODY, env=env)
    assert done.returncode == 0, done.stderr
    assert b"is another user's" in done.stderr
    assert document(call(home, "doctor", "--json", uid=NOBODY, env=env))["kind"] == "doctor"
    # The log of another uid is not read, and that is said.
    assert document(call(home, "audit", "verify", "--json", uid=NOBODY, env=env))["code"] == "ledger"


def test_acting_takes_root_and_makes_nothing_without_it(plain: tuple[Path, Path]) -> None:
    home, package = plain
    for verb in ("run", "dev"):
        done = call(home, verb, package, "hi", "--json", uid=NOBODY)
        assert (done.returncode, document(done)["code"]) == (1, "needs_root")
    assert {p.name for p in home.rglob("*")} <= {"supervisor"}


def test_under_sudo_home_must_be_given(world: World) -> None:
    path = world.sign(world.package(GOOD))
    env = {"SUDO_UID": "1000", "COVENANT_HOME": ""}
    for line in (f"run {path} hi", f"dev {path} hi", "keys list", "audit verify", "doctor"):
        found = document(call(world.home, *line.split(), "--json", env=env))
        assert found["code"] == "home_unsafe"
        assert "COVENANT_HOME" in found["hint"]
    assert call(world.home, "run", path, "hi", env={"SUDO_UID": "1000"}).returncode == 0


def _wide(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o044)


def _linked(path: Path) -> None:
    path.rename(path.with_name(path.name + "-elsewhere"))
    path.symlink_to(path.with_name(path.name + "-elsewhere"))


@pytest.mark.parametrize("spoil", [_wide, _linked])
@pytest.mark.parametrize(
    "place", ["", "identity", "identity/local.key", "supervisor", "supervisor/trust", "supervisor/audit"]
)
def test_home_that_others_reach_into_is_refused(world: World, place: str, spoil: Any) -> None:
    path = world.sign(world.package(GOOD))
    assert call(world.home, "run", path, "hi").returncode == 0
    spoil(world.home / place)
    done = call(world.home, "run", path, "hi", "--json")
    assert done.returncode == 1
    assert document(done)["code"] in {"home_unsafe", "key_file", "ledger", "state_damaged"}


# --- what is shown --------------------------------------------------------------------------------------

EVIL = "\x1b[31m\u202e\x9b\u200b"


def test_no_verb_lets_terminal_be_steered(world: World, home: Path) -> None:
    agent = {
        "main.py": "import json, sys\nsys.stdin.readline()\n"
        f"sys.stderr.write({EVIL!r})\nprint(json.dumps({{'text': {EVIL!r}, 'sources': [{EVIL!r}]}}))"
    }
    good = world.package(agent)
    named = world.base / f"packages{EVIL}"
    shutil.copytree(good, named)
    inside = world.package({**GOOD, f"data{EVIL}": ""}, name="inside")
    manifest = (good / "agent.toml").read_text()
    worded = world.package({**GOOD, "agent.toml": manifest.replace('"Test"', '"T\\u202e\\u001b"')}, name="worded")
    calls: list[tuple[str | Path, ...]] = [
        *(("manifest", verb, path) for verb in ("check", "show", "verify") for path in (good, named, inside, worded)),
        *(("manifest", "sign", path, "--key", "ann") for path in (good, named, inside, worded)),
        *(("policy", "explain", path) for path in (good, named, inside, worded)),
        ("policy", "compile", named, "--out", world.base / f"out{EVIL}"),
        *(("run", path, EVIL) for path in (good, named, inside, worded)),
        ("dev", named, EVIL),
        *((verb, EVIL) for verb in ("help", "keys", "manifest")),
        ("keys", "new", EVIL),
        ("keys", "public", EVIL),
        ("trust", "init", "--key", EVIL),
        ("manifest", "sign", good, "--key", "ann", "--expires", EVIL),
        ("manifest", "sign", good, "--key", "ann", "--audience", EVIL),
        ("audit", "recent"),
        ("audit", "verify", EVIL),
        ("audit", "verify", f"--{EVIL}"),
        (EVIL,),
    ]
    # The control: the agent's text does arrive, made visible.
    assert b"\\x1b[31m\\u202e\\x9b\\u200b" in call(home, "dev", good, "hi").stdout
    for arguments in calls:
        for options in ([], ["--json"]):
            done = call(home, *arguments, *options)
            shown = (done.stdout + done.stderr).decode()
            assert not set(shown) & set(EVIL) - set("[31m"), (arguments, shown)
            assert "Traceback" not in shown, shown
