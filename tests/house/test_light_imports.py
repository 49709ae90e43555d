"""`covenant --help` is click and the standard library's light half: by import list, not by clock."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = (
    "_cffi_backend",
    "aiohttp",
    "aiosqlite",
    "anyio",
    "asyncio",
    "cryptography",
    "ctypes",
    "elftools",
    "email",
    "http.client",
    "importlib.metadata",
    "jsonschema_rs",
    "multiprocessing",
    "numpy",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pydantic_core",
    "pyroute2",
    "pyseccomp",
    "re2",
    "rich",
    "seccomp",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "tempfile",
    "textual",
    "tomllib",
    "zipfile",
)

_AFTER = """
import json, sys
from covenant.cli import main
sys.argv[0] = "covenant"
try:
    main.entry()
except SystemExit as e:
    status = e.code
else:
    status = 0
print("\\n@" + json.dumps({"status": status or 0, "modules": sorted(sys.modules)}))
"""


def _modules(*arguments: str) -> set[str]:
    command = [sys.executable, "-c", _AFTER, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "\n@" in done.stdout, done.stderr
    found = json.loads(done.stdout.rsplit("\n@", 1)[1])
    assert found["status"] == 0, done.stdout + done.stderr
    return set(found["modules"])


def test_help_imports_nothing_heavy() -> None:
    assert sorted(_modules("--help").intersection(HEAVY)) == []


def test_list_is_alive() -> None:
    """The control: a command that needs a manifest does import what the list names."""
    command = [sys.executable, "-c", "import sys, policy.manifest.parse; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "pydantic" in done.stdout.split(), done.stderr


def test_what_asks_supervisor_is_light() -> None:
    """The command's own half of a run that the supervisor does: sockets and what `--help` has."""
    names = "covenant.cli.run.run, covenant.cli.run.supervisor_client, sandbox.serve.api.client"
    code = f"import sys, {names}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "sandbox.serve.api.client" in done.stdout.split(), done.stderr
    assert sorted(set(done.stdout.split()).intersection(HEAVY) - {"socket"}) == []


def test_services_start_without_what_only_answer_needs() -> None:
    names = "sandbox.serve.main, sandbox.serve.metrics_worker, covenant.daemon, sandbox.control.prometheus as p"
    code = f"import sys, {names}; "
    alone = code + "print(*sys.modules)"
    answered = code + "p.text([p.family('n', 'gauge', 'About.', [])]); print(*sys.modules)"
    found = [
        "prometheus_client"
        in subprocess.run([sys.executable, "-c", one], capture_output=True, text=True).stdout.split()
        for one in (alone, answered)
    ]
    assert found == [False, True]


def test_verb_of_screens_is_light_until_it_runs() -> None:
    assert sorted(_modules("tui", "--help").intersection({"covenant.tui", "textual", "rich", "asyncio"})) == []
