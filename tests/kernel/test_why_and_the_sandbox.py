"""``policy why`` beside a real sandbox of the same package: what it says is denied is denied there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policy.why import ask, files
from tests.kernel.test_command_line import call
from tests.kernel.test_executables import GRANT, START
from tests.kernel.world import World

MORE = GRANT["more"] + '[permissions.filesystem]\nread = ["/usr/share/doc", "/usr/share/common-licenses/GPL-3"]\n'
PATHS = [
    *(
        "/",
        "/usr",
        "/usr/share",
        "/usr/share/doc",
        "/etc",
        "/etc/passwd",
        "/etc/passwd/x",
        "/etc/group",
        "/etc/shadow",
        "/etc/hosts",
        "/etc/hosts/x",
        "/proc",
        "/dev",
        "/sys",
        "/sys/kernel",
    ),
    *(
        "/etc/hosts",
        "/etc/hosts/x",
        "/dev/shm",
        "/dev/net",
        "/dev/net/tun",
        "/tmp",
        "/tmp/lines",
        "/workspace",
        "/workspace/main.py",
    ),
    *("/bin", "/bin/sort", "/usr/bin/python3", "/usr/bin/perl", "/root", "/home"),
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/ptmx", "/dev/fuse", "/dev/kmsg"),
    *("/dev/mem", "/dev/stdin", "/dev/stdout", "/dev/fd/1", "/proc/self/comm", "/proc/self/oom_score_adj"),
    *("/proc/self/uid_map", "/proc/self/mem", "/proc/self/fd/0", "/proc/self/environ"),
    *("/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory"),
    *(
        "/run",
        "/run/covenant",
        "/run/covenant/policy.json",
        "/run/covenant/denials.jsonl",
        "/run/covenant/policy.json/x",
    ),
    *("/run/covenant/more", "/run/credentials"),
    # A granted file, what would lie below it, and a link to it that is not granted; the same of other files.
    *("/usr/share/common-licenses/GPL-3", "/usr/share/common-licenses/GPL-3/x", "/usr/share/common-licenses/GPL-3/x/y"),
    *("/usr/share/common-licenses", "/usr/share/common-licenses/GPL", "/usr/share/common-licenses/GPL/x"),
    *("/workspace/main.py/x", "/dev/null/x", "/proc/self/comm/x", "/proc/self/environ/x", "/bin/sort/x"),
]
PROGRAMS = ["/usr/bin/sort", "/bin/sort", "/usr/bin/python3", "/bin/python3", "/usr/bin/perl", "/bin/sh", "/tmp/lines"]

PROBE = f"""
def opened(path, flags):
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError:
        return False
    return True
answer = {{
    "read": {{p: opened(p, os.O_RDONLY) for p in {PATHS!r}}},
    "write": {{p: opened(p, os.O_WRONLY) for p in {PATHS!r}}},
    "start": {{p: start(p, "--version")[0] == 0 for p in {PROGRAMS!r}}},
}}
"""
# Exceptions: directories cannot be opened to write, and a sandbox lacks some files that belong to gVisor.
LAX = {"write": {"/tmp"}, "read": {"/dev/kmsg", "/dev/mem"}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def test_what_is_said_to_be_denied_is_denied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from covenant.cli.policy import artefact_view, questions

    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    there = world.ask(START + PROBE, more=MORE)
    package: Path = world.package({"main.py": ""}, name="asked", more=MORE)
    sight = questions.sight(artefact_view.package(package), None)
    said = {
        "read": {path: ask.ask(files.Open(path), sight).allowed for path in PATHS},
        "write": {path: ask.ask(files.Open(path, True), sight).allowed for path in PATHS},
        "start": {path: ask.ask(files.Execute(path), sight).allowed for path in PROGRAMS},
    }
    odd = {
        (how, path): allowed
        for how, answers in said.items()
        for path, allowed in answers.items()
        if allowed != there[how][path] and path not in LAX.get(how, ())
    }
    assert odd == {}
    assert there["start"]["/usr/bin/python3"] is True
    done = call(world.home, "policy", "why", package, "--exec", "/usr/bin/python3", "--json")
    assert json.loads(done.stdout)["allowed"] is True
