"""README.md, its session by hand: from the first command to the last, in a clone whose agents the demo has signed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.house.test_docs import commands
from tests.kernel.test_command_line import call
from tests.kernel.world import ROOT, World


def test_session_can_be_followed(world: World, tmp_path: Path) -> None:
    # The page begins with a home that is not there yet; this one has the closures alone.
    shutil.rmtree(world.state / "trust")
    section = (ROOT / "README.md").read_text().partition("## A session by hand\n")[2].partition("\n## ")[0]
    places = {"mine": str(tmp_path / "mine"), "/tmp/hello-policy": str(tmp_path / "policy")}
    ran = []
    for line in commands(section):
        program, *words = shlex.split(line)
        if program == "export":
            continue
        if program == "cp":
            shutil.copytree(ROOT / words[1], places[words[2]], ignore=shutil.ignore_patterns("__pycache__"))
            assert (tmp_path / "mine/agent.dsse.json").exists(), "set-up signs the agents of a clone"
            continue
        assert program == "covenant"
        done = call(world.home, *(places.get(word, word) for word in words))
        # `why` says no by its status: this agent has no network.
        wanted = 3 if words[:2] == ["policy", "why"] else 0
        assert done.returncode == wanted, (line, done.stdout, done.stderr)
        ran.append(words[0])
    assert len(ran) >= 13
    assert {"keys", "trust", "manifest", "policy", "run", "audit", "doctor"} == set(ran)


def test_services_of_page_can_be_started(world: World) -> None:
    shutil.rmtree(world.state / "trust")
    for words in (("keys", "new", "operator", "--no-passphrase"), ("trust", "init", "--key", "operator")):
        assert call(world.home, *words).returncode == 0
    (world.base / "bin").mkdir()
    for name, code in {
        "covenant": "from covenant.__main__ import entry; entry()",
        "covenantd": "from covenant.start import entry; entry()",
        "covenant-supervisor": "import sys; from sandbox.serve import main; sys.exit(main.main(sys.argv[1:]))",
    }.items():
        program = world.base / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(code)} "$@"\n')
        program.chmod(0o755)
    page = (ROOT / "README.md").read_text()
    section = page.partition("## With a daemon\n")[2].partition("\n## ")[0]
    start, ask = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    serve = "until test -S $COVENANT_HOME/supervisor/supervisor.sock -a -S $COVENANT_HOME/sock; do sleep 0.1; done\n"
    shell = subprocess.Popen(
        ["/bin/bash", "-ec", start + serve + ask + "wait\n"],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{world.base}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "COVENANT_HOME": str(world.home),
            "COVENANT_HTTP_PORT": "0",
            "PYTHONPATH": str(ROOT),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=180)
    finally:
        if shell.returncode is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    assert shell.returncode == 0, said
    assert re.search(r'^"seccomp": \d+ of [\d,]+ files of /usr/share/doc mention it; packages: ', said, re.MULTILINE)
