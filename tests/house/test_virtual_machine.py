"""`make vm`, `vagrant up` and the workflow go through the same steps; the driver ends a machine that hangs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from scripts.machine import sources, takeback, where
from scripts.machine.console import SetupError
from scripts.machine.record import Record
from scripts.virtual import guest, image, payload, recipe

SOURCES = """\
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/some.gpg

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: http://other.example/tool
Suites: stable
Components: main
"""
FILES = {"/etc/apt/sources.list.d/debian.sources": SOURCES}


def _machine(clone: pathlib.Path, tmp_path: pathlib.Path) -> where.Machine:
    return where.Machine(clone, Record(tmp_path), "Debian", "bookworm", root=True)


# --- one script, three ways


def _steps(clone: pathlib.Path) -> set[str]:
    """Every step of provision.sh, as its last lines dispatch them."""
    text = (clone / "vagrant/provision.sh").read_text()
    dispatch = text[text.rindex("case $step in") :]
    return set(re.findall(r"[a-z][a-z0-9-]+(?=[ |)])", dispatch.partition("esac")[0])) & set(
        re.findall(r"^#   ([a-z][a-z0-9-]+) {2,}", text, re.MULTILINE)
    )


def test_every_step_runs_in_make_vm(clone: pathlib.Path) -> None:
    driver = "".join((clone / f"scripts/virtual/{name}.py").read_text() for name in ("image", "payload"))
    ran = set(recipe.STEPS) | set(re.findall(r'\[steps, "([a-z-]+)"\]', driver))
    words = re.search(r"provision\.sh (.*)", (clone / "vagrant/guest.sh").read_text())
    assert words
    assert '"${suite:-check}"' in words[1].split()
    ran |= {*words[1].split(), *guest.SUITES} - {'"${suite:-check}"'}
    assert len(ran) == 9
    assert ran == _steps(clone)


def test_other_two_ways_run_same_steps(clone: pathlib.Path) -> None:
    script = (clone / "vagrant/provision.sh").read_text()
    whole = re.search(r"= all \]; then steps=\((.*)\)", script)
    assert whole
    assert "sudo ./vagrant/provision.sh all" in (clone / ".github/workflows/gvisor-live.yml").read_text()
    text = (clone / "vagrant/Vagrantfile").read_text()
    said = re.findall(r"#\{PROVISION\} ([^\"]*)\"", text)
    assert re.sub(r"#\{.*?\}", "", " ".join(said)).split() == whole[1].split()
    machines = dict(re.findall(r'^  "([a-z0-9-]+)" => \[(.*)\],$', text, re.MULTILINE))
    assert set(machines) == {"rootful", "v2-only", "no-kvm"}
    named = {word for steps in machines.values() for word in re.findall(r'"([a-z0-9-]+)"', steps)}
    assert {*whole[1].split(), *named} == _steps(clone)


@pytest.mark.parametrize("name", ["provision.sh", "guest.sh", "changed.sh", "newest_runsc.sh"])
def test_scripts_parse_and_can_be_run(clone: pathlib.Path, name: str) -> None:
    path = clone / "vagrant" / name
    assert os.access(path, os.X_OK)
    assert subprocess.run(["/bin/bash", "-n", str(path)], capture_output=True).stderr == b""


def test_parts_of_lock_are_whole(clone: pathlib.Path) -> None:
    """Each name in provision.sh is in the lock, and the need of testinfra is named."""
    text = (clone / "vagrant/provision.sh").read_text()
    pinned = set(re.findall(r"^([a-z0-9-]+)==", (clone / "locks/dev.txt").read_text(), re.MULTILINE))
    found = re.search(r"^SUITE=\((.*)\)$", text, re.MULTILINE)
    assert found
    assert set(found[1].split()) <= pinned
    group = tomllib.loads((clone / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    assert "pytest-testinfra" in {re.split(r"[>=]", line)[0] for line in group}


# What a machine without some distributions says of its tests: their modules are not found, by import or otherwise.
WITHOUT = """
import importlib.abc, sys
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in GONE else find(name, package)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def _pinned(lock: pathlib.Path) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+)==", lock.read_text(), re.MULTILINE))


def _gone(clone: pathlib.Path) -> set[str]:
    """The modules of the distributions that the development lock has and the virtual machine has not."""
    suite = re.search(r"^SUITE=\((.*)\)$", (clone / "vagrant/provision.sh").read_text(), re.MULTILINE)
    assert suite
    there = _pinned(clone / "locks/runtime.txt") | set(suite[1].split())
    absent = _pinned(clone / "locks/dev.txt") - there
    modules = importlib.metadata.packages_distributions()
    named = {name: {re.sub("[-_.]+", "-", one).lower() for one in found} for name, found in modules.items()}
    return {name for name, found in named.items() if found <= absent and name != "covenant"}


def _collected(clone: pathlib.Path, gone: set[str], *words: str) -> subprocess.CompletedProcess[str]:
    program = f"GONE = {sorted(gone)!r}\n{WITHOUT}"
    options = ["-p", "no:cacheprovider", "-p", "testinfra.plugin", "--collect-only", "-q", "--hosts=local://"]
    return subprocess.run(
        [sys.executable, "-c", program, *options, *words],
        cwd=clone,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


def test_suite_needs_no_more_than_machine_has(clone: pathlib.Path) -> None:
    """Its tests are collected without the other packages of a developer's machine."""
    lines = re.findall(r"^CHECKED\+?=\((.*)\)$", (clone / "vagrant/provision.sh").read_text(), re.MULTILINE)
    words = subprocess.run(
        ["/bin/bash", "-c", f"printf '%s\\n' {' '.join(lines)}"], cwd=clone, capture_output=True, text=True
    ).stdout.split()
    gone = _gone(clone)
    assert {"hypothesis", "schemathesis", "xdist"} <= gone
    done = _collected(clone, gone, *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(re.findall(r"::", done.stdout)) > 30
    # Control: a module that the tests do need is missed.
    missed = _collected(clone, gone | {"pydantic"}, *words)
    assert "No module named 'pydantic'" in missed.stdout + missed.stderr


# --- the image


def test_image_gets_machines_own_mirror_and_keys() -> None:
    assert recipe.origin(FILES, "bookworm") == sources.Entry(
        "http://mirror.example/debian", "bookworm", "/usr/share/keyrings/some.gpg"
    )
    text = recipe.guest_sources(FILES, "bookworm")
    assert [entry.suite for entry in sources.deb822(text)] == ["bookworm", "bookworm-updates", "bookworm-security"]
    assert "other.example" not in text
    assert recipe.keyrings(FILES, "bookworm") == ["/usr/share/keyrings/some.gpg"]
    with pytest.raises(SetupError):
        recipe.origin(FILES, "trixie")


def test_machine_that_no_image_is_made_from_is_told_so(clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(SetupError, match="bookworm or trixie"):
        image.provide(where.Machine(clone, Record(tmp_path), "Ubuntu 24.04", "noble", root=True))


def test_another_recipe_is_another_image(clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    machine = _machine(clone, tmp_path)
    assert recipe.digest(machine) == recipe.digest(machine)
    copy = tmp_path / "clone"
    for name in recipe.FILES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((clone / name).read_bytes())
    for path in (clone / "scripts/machine").glob("*.py"):
        (copy / "scripts/machine").mkdir(parents=True, exist_ok=True)
        (copy / "scripts/machine" / path.name).write_bytes(path.read_bytes())
    same = where.Machine(copy, machine.record, machine.system, machine.codename, root=True)
    assert recipe.digest(same) == recipe.digest(machine)
    (copy / "vagrant/cmdline").write_text("quiet\n")
    assert recipe.digest(same) != recipe.digest(machine)


def test_payload_is_clone_without_what_is_ignored(clone: pathlib.Path) -> None:
    names = {str(path) for path in payload.files(clone)}
    assert {"vagrant/guest.sh", "agents/hello/main.py", "pyproject.toml"} <= names
    assert [
        name for name in names if name.startswith((".venv/", ".demo/", "build/")) or name.endswith(".json.key")
    ] == []


# --- the machine


def test_machine_has_no_network_no_kvm_and_writes_to_nothing_that_stays(
    clone: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    words = guest.command(_machine(clone, tmp_path), tmp_path, tmp_path / "payload", tmp_path)
    assert words[words.index("-nic") + 1] == "none"
    assert "-netdev" not in words
    assert words[words.index("-accel") + 1].startswith("tcg")
    drives = [words[i + 1] for i, word in enumerate(words) if word == "-drive"]
    assert len(drives) == 3
    assert all(drive.endswith(",snapshot=on") for drive in drives)
    assert "cgroup_no_v1=all" in words[words.index("-append") + 1].split()


# A process in place of qemu: what it writes to the two files, and how it ends.
ENDINGS = {
    "done": ("echo hello >$W/results; echo 'status 0' >$W/status", 0, ""),
    "failed": ("echo hello >$W/results; echo 'status 1' >$W/status", 1, ""),
    "silent": ("exec sleep 600", None, "no word within"),
    "endless": ("echo hello >$W/results; exec sleep 600", None, "not done within"),
    "stays on": ("echo hello >$W/results; echo 'status 0' >$W/status; exec sleep 600", 0, "still on"),
    "crashed": ("echo hello >$W/results; kill -9 $$", None, "without a status"),
    "garbage": ("echo hello >$W/results; echo 'status zero' >$W/status", None, "without a status"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_machine_ends_in_any_case(
    clone: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    script, status, problem = ENDINGS[ending]
    command = ["/bin/sh", "-c", f"W={tmp_path}; echo $$ >$W/pid; {script}"]
    monkeypatch.setattr(guest, "command", lambda *_: command)
    for name, seconds in (("BOOT_SECONDS", 2), ("DEADLINE_SECONDS", 4), ("POWER_OFF_SECONDS", 1)):
        monkeypatch.setattr(guest, name, seconds)
    outcome = guest.run(_machine(clone, tmp_path), tmp_path, tmp_path, tmp_path)
    assert outcome.status == status
    assert problem in outcome.problem
    assert bool(outcome.problem) == bool(problem)
    assert not pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


# --- the hosted runner


def test_change_that_real_machine_has_to_see_is_seen(clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "vagrant").mkdir()
    (tmp_path / "vagrant/changed.sh").write_bytes((clone / "vagrant/changed.sh").read_bytes())
    (tmp_path / "vagrant/changed.sh").chmod(0o755)

    def git(*words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "init.defaultBranch=main"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(name: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        git("add", "-A")
        git("commit", "-q", "-m", name)
        return git("rev-parse", "HEAD")

    def answer(base: str) -> str:
        command = [str(tmp_path / "vagrant/changed.sh"), base]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    first = commit("sandbox/a.py")
    second = commit("docs/page.md")
    assert answer(first) == "machine=no"
    for name in ("policy/a.py", "sandbox/b.py", "agents/a/agent.toml", "vagrant/cmdline"):
        before = git("rev-parse", "HEAD")
        commit(name)
        assert answer(before) == "machine=yes", name
    assert answer(second) == "machine=yes"
    assert answer("") == answer("0" * 40) == "machine=yes"


def test_required_checks_are_jobs_of_workflows(clone: pathlib.Path) -> None:
    ruleset = json.loads((clone / ".github/rulesets/main.json").read_text())
    assert (ruleset["target"], ruleset["enforcement"], ruleset["bypass_actors"]) == ("branch", "active", [])
    assert ruleset["conditions"]["ref_name"] == {"include": ["~DEFAULT_BRANCH"], "exclude": []}
    by_type = {rule["type"]: rule.get("parameters") for rule in ruleset["rules"]}
    assert set(by_type) == {"deletion", "non_fast_forward", "required_status_checks"}
    checks = by_type["required_status_checks"]["required_status_checks"]
    required = [check["context"] for check in checks]
    # GitHub Actions' own number, as many public rulesets have it: no other app can say that a check passed.
    assert {check["integration_id"] for check in checks} == {15368}
    jobs = [
        name
        for path in (clone / ".github/workflows").glob("*.yml")
        for name in re.findall(r"^    name: (.*)$", path.read_text(), re.MULTILINE)
    ]
    assert "gvisor-live" in required
    assert all(jobs.count(name) == 1 for name in required)


def test_undo_removes_images_that_record_speaks_of(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clone = tmp_path / "clone"
    (clone / recipe.WORK).mkdir(parents=True)
    (recipe.cache() / "0123").mkdir(parents=True)
    Record(clone).add("paths", "other")
    takeback.take_back(clone)
    assert recipe.cache().exists()
    Record(clone).add("paths", recipe.WORK)
    takeback.take_back(clone)
    assert not recipe.cache().exists()
    assert not (clone / recipe.WORK).exists()
