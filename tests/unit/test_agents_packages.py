"""The sample packages as data: what they claim, and that the hostile ones refuse to start on this machine."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import stat
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from policy import errors
from policy.manifest import fields, parse
from policy.manifest.agent import Manifest
from policy.manifest.permissions import NetworkEntry
from scripts.machine import shared_modules
from tests.kernel import hostile_table as table
from tests.unit import agent_modules

AGENTS = Path(__file__).resolve().parents[2] / "agents"
HOSTILE = AGENTS / "hostile"
PACKAGES = sorted(path.parent for path in AGENTS.rglob("agent.toml"))
HOSTILE_PACKAGES = [path for path in PACKAGES if path.parent == HOSTILE]
PYTHON_PACKAGES = [path for path in HOSTILE_PACKAGES if (path / "main.py").exists()]
PROBES, GRANTED = table.load()
NETWORK_PROBES = table.load_network()
NETWORKED = {probe.package for probe in NETWORK_PROBES}


def _name(package: Path) -> str:
    return str(package.relative_to(AGENTS))


def _committed(package: Path) -> list[Path]:
    """Files of a package without what tools leave in it (bin/ is built, see .gitignore)."""
    return [path for path in package.rglob("*") if not {"__pycache__", "bin"} & set(path.parts)]


def _shape(document: Any, prefix: str = "") -> set[str]:
    """The dotted keys of a TOML document."""
    if not isinstance(document, dict):
        return {prefix}
    inner = (_shape(value, f"{prefix}.{key}" if prefix else key) for key, value in document.items())
    return set().union(*inner)


# --- every package


@pytest.mark.parametrize("package", PACKAGES, ids=_name)
def test_manifest_parses_and_names_file_of_package(package: Path) -> None:
    manifest = parse.parse((package / "agent.toml").read_bytes())
    built = manifest.agent.entry.startswith("bin/")
    assert built or (package / manifest.agent.entry).is_file()


@pytest.mark.parametrize("package", PACKAGES, ids=_name)
def test_manifest_takes_safe_side(package: Path) -> None:
    manifest = parse.parse((package / "agent.toml").read_bytes())
    assert manifest.sandbox.required
    assert manifest.sandbox.backend == "linux-gvisor"
    assert manifest.wrote("resources.network")
    assert manifest.resources.network == ("full" if package.name in NETWORKED else "off")
    assert manifest.permissions.filesystem.write == ()
    assert manifest.unknown_sections == ()


def test_no_two_packages_share_id() -> None:
    ids = [parse.parse((package / "agent.toml").read_bytes()).agent.id for package in PACKAGES]
    assert len(ids) == len(set(ids)) == len(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES, ids=_name)
def test_package_holds_only_plain_files_and_no_keys_or_init(package: Path) -> None:
    for path in _committed(package):
        mode = path.lstat().st_mode
        assert stat.S_ISREG(mode) or stat.S_ISDIR(mode), path
        assert path.suffix != ".key", path
        assert path.name != "__init__.py", path


# --- hello: the page that authors copy


def _models(model: Any, prefix: str = "") -> set[str]:
    """Every dotted key that a manifest can have, from the parser's own models."""
    keys: set[str] = set()
    for name, info in fields.keys(model).items():
        inner, dotted = info.annotation, f"{prefix}{name}"
        keys |= _models(inner, dotted + ".") if hasattr(inner, "model_fields") else {dotted}
    return keys


def test_hello_shows_every_key_that_manifest_can_have() -> None:
    text = (AGENTS / "hello" / "agent.toml").read_text()
    # What is commented out is shown too: uncommented, the page must still be TOML with known keys.
    shown = "\n".join(
        line.removeprefix("# ")
        if line.startswith(("# ", "# [")) and ("=" in line or line.startswith("# [")) and "key =" not in line
        else line
        for line in text.splitlines()
    )
    document = tomllib.loads(shown)
    entries = document["permissions"].pop("network")
    assert document["process"]["env"].pop("LOG_LEVEL")
    document["process"]["env"] = ""  # a table of any names, and so one key
    assert _shape(document) == _models(Manifest) - {"permissions.network"}
    assert set(entries[0]) == set(NetworkEntry.model_fields)


def test_hello_writes_one_key_line_and_no_field_that_cannot_be_enforced_yet() -> None:
    raw = (AGENTS / "hello" / "agent.toml").read_bytes()
    written = parse.parse(raw).written
    lines = [line for line in raw.decode().splitlines() if line.split("#")[0].strip() and not line.startswith("[")]
    assert len(lines) == len(_shape(tomllib.loads(raw.decode())))
    refused = {"io_read_bps", "io_write_bps", "io_read_iops", "io_write_iops", "net_bps"}
    assert not {f"resources.{key}" for key in refused} & written
    assert "sandbox.standby" not in written


def test_hello_writes_defaults_of_every_limit() -> None:
    bare = parse.parse(b'[agent]\nid = "x"\nname = "x"\nversion = "1"\nruntime = "python3"\nentry = "main.py"\n')
    hello = parse.parse((AGENTS / "hello" / "agent.toml").read_bytes())
    assert hello.resources.model_copy(update={"network": bare.resources.network}) == bare.resources


def _run(command: list[str], intent: object, cwd: Path) -> dict[str, Any]:
    line = intent if isinstance(intent, bytes) else json.dumps(intent).encode() + b"\n"
    done = subprocess.run(command, input=line, capture_output=True, timeout=30, cwd=cwd, check=True)
    assert done.stdout.count(b"\n") == 1
    answer: dict[str, Any] = json.loads(done.stdout)
    assert set(answer) == {"text", "sources"}
    return answer


def test_hello_keeps_contract() -> None:
    answer = _run(["/usr/bin/python3", "-B", "main.py"], {"id": "1", "text": 'say "hi"\n'}, AGENTS / "hello")
    assert answer == {"text": 'Hello! You said: say "hi"\n', "sources": []}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat and the hat", "1 line, 5 words, 19 characters; most often: the (2), and (1), cat (1), hat (1)"),
        (
            "constructor __proto__\nconstructor",
            "2 lines, 3 words, 33 characters; most often: constructor (2), proto (1)",
        ),
        ("\N{GRINNING FACE}", "1 line, 0 words, 1 character"),
        ("", "0 lines, 0 words, 0 characters"),
        ("a" * 50, "1 line, 1 word, 50 characters; most often: " + "a" * 40 + "... (1)"),
    ],
)
def test_wordcount_counts(text: str, expected: str) -> None:
    assert _run(["/usr/bin/node", "main.js"], {"text": text}, AGENTS / "wordcount")["text"] == expected


# --- the hostile packages: the modules that they share


def test_copies_of_shared_modules_are_equal() -> None:
    copies = shared_modules.copies()
    assert {Path(copy).parent.name for copy in copies} == {path.name for path in PYTHON_PACKAGES}
    for copy, source in copies.items():
        assert (AGENTS.parent / copy).read_bytes() == (AGENTS.parent / source).read_bytes(), copy


def test_copy_replaces_stale_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(HOSTILE / "common", tmp_path / shared_modules.COMMON)
    for copy in shared_modules.copies():
        (tmp_path / copy).parent.mkdir(exist_ok=True)
    stale = tmp_path / "agents/hostile/exec/gate.py"
    stale.write_text("stale")
    shared_modules.copy(tmp_path)
    assert stale.read_bytes() == (HOSTILE / "common/gate.py").read_bytes()
    assert len(capsys.readouterr().out.splitlines()) == len(shared_modules.copies())
    shared_modules.copy(tmp_path)
    assert capsys.readouterr().out == ""


def test_git_has_one_source_of_each_module() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "agents/hostile"], cwd=AGENTS.parent, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not set(shared_modules.copies()) & set(listed)
    assert set(shared_modules.copies().values()) <= set(listed)


# --- the hostile packages: the gate


def test_on_bare_host_one_for_node_refuses() -> None:
    done = subprocess.run(
        ["/usr/bin/node", "main.js"], input=b'{"text": "node_connect"}\n', capture_output=True, cwd=HOSTILE / "node"
    )
    assert done.returncode == 78
    assert done.stdout == b""
    assert done.stderr.startswith(b"refused: this is hostile code and runs only under gVisor, but the kernel is `")


def test_gate_for_node_looks_for_same_signs_and_is_first_thing_that_runs(gvisor_gate: ModuleType) -> None:
    gate = (HOSTILE / "node" / "gate.js").read_text()
    assert json.dumps(gvisor_gate._UNAME_VERSION) in gate
    assert json.dumps(list(gvisor_gate._LANDMARKS)) in gate
    code = [line for line in (HOSTILE / "node" / "main.js").read_text().splitlines() if not line.startswith("//")]
    assert [line for line in code if line][:2] == ['"use strict";', 'require("./gate.js").requireGvisor();']
    assert "require(" not in gate.replace('require("node:fs")', "").replace('require("node:os")', "")


@pytest.mark.parametrize("package", PYTHON_PACKAGES, ids=_name)
def test_on_bare_host_it_refuses_and_touches_nothing(package: Path, tmp_path: Path) -> None:
    """Run under an audit hook: nothing but reading of the gate's own files and of /proc may happen."""
    log = tmp_path / "events"
    script = tmp_path / "watch.py"
    script.write_text(
        "import json, runpy, sys\n"
        f"log = open({str(log)!r}, 'w')\n"
        "done = False\n"
        "def hook(event, args):\n"
        "    if not done: log.write(json.dumps([event, [repr(a) for a in args]]) + '\\n')\n"
        f"sys.path.insert(0, {str(package)!r})\n"
        "sys.addaudithook(hook)\n"
        "try:\n"
        f"    runpy.run_path({str(package / 'main.py')!r}, run_name='__main__')\n"
        "finally:\n"
        "    done = True\n"
        "    log.close()\n"
    )
    done = subprocess.run(
        ["/usr/bin/python3", str(script)],
        input=b'{"text": "mount_tmpfs"}\n',
        capture_output=True,
        timeout=30,
        cwd=package,
        env={"PATH": "/usr/bin"},  # not our own, which may keep Python from writing bytecode
        check=False,
    )
    assert done.returncode == 78
    assert done.stdout == b""
    assert done.stderr.startswith(b"refused: this is hostile code and runs only under gVisor, but ")
    assert done.stderr.count(b"\n") == 1
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(events) > 3, "the hook saw nothing"
    # What importing a module raises; a fork, a socket, ctypes, a write or a mount has an event of another name.
    importing = (
        "open",
        "import",
        "compile",
        "exec",
        "marshal.",
        "os.listdir",
        "os.scandir",
        "object.",
        "sys.",
        "code.",
    )
    assert [event for event, _ in events if not event.startswith(importing)] == []
    modes = {args[1] for event, args in events if event == "open"}
    assert modes <= {"'r'", "'rb'", "None"}
    imported = {args[0].strip("'") for event, args in events if event == "import"}
    assert not (package / "__pycache__").exists()
    assert not imported & ({path.stem for path in package.glob("*.py")} - {"gate"})


@pytest.fixture
def gvisor_gate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The gate with every sign of gVisor; each test takes one away."""
    gate = agent_modules.load(HOSTILE / "python" / "gate.py")
    kernel = os.uname_result(("Linux", "plain", "4.4.0", gate._UNAME_VERSION, "x86_64"))
    real_lexists = os.path.lexists
    monkeypatch.setattr(gate.os, "uname", lambda: kernel)
    monkeypatch.setattr(
        gate, "open", lambda *_, **__: io.StringIO(f"Linux version 4.4.0 {kernel.version}\n"), raising=False
    )
    monkeypatch.setattr(gate.os.path, "lexists", lambda path: False if path in gate._LANDMARKS else real_lexists(path))
    return gate


def test_gate_opens_when_every_sign_is_there(gvisor_gate: ModuleType) -> None:
    assert gvisor_gate.reason_to_refuse() is None


def test_another_kernel_closes_gate(gvisor_gate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.uname_result(("Linux", "h", "4.4.0", "#1 SMP Debian 4.4.0-1", "x86_64"))
    monkeypatch.setattr(gvisor_gate.os, "uname", lambda: other)
    assert gvisor_gate.reason_to_refuse() == "the kernel is `4.4.0 #1 SMP Debian 4.4.0-1`"


def test_kernel_with_builder_closes_gate(gvisor_gate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"Linux version 4.4.0 (root@builder) (gcc) {gvisor_gate._UNAME_VERSION}\n"
    monkeypatch.setattr(gvisor_gate, "open", lambda *_, **__: io.StringIO(text), raising=False)
    assert str(gvisor_gate.reason_to_refuse()).startswith("/proc/version is ")


def test_no_proc_closes_gate(gvisor_gate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> io.StringIO:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(gvisor_gate, "open", missing, raising=False)
    assert str(gvisor_gate.reason_to_refuse()).startswith("/proc/version cannot be read")


def test_each_landmark_of_real_kernel_closes_gate(gvisor_gate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for landmark in gvisor_gate._LANDMARKS:
        monkeypatch.setattr(gvisor_gate.os.path, "lexists", lambda path, one=landmark: path == one)
        assert gvisor_gate.reason_to_refuse() == f"{landmark} exists"


@pytest.mark.parametrize("package", PYTHON_PACKAGES, ids=_name)
def test_gate_is_first_thing_that_runs(package: Path) -> None:
    body = ast.parse((package / "main.py").read_text()).body
    assert [ast.unparse(statement) for statement in body[1:5]] == [
        "import sys",
        "sys.dont_write_bytecode = True",
        "import gate",
        "gate.require_gvisor()",
    ]


# --- the hostile packages: the table


def _probes_in(package: Path) -> dict[str, bool]:
    """Probe ids of a package with whether they run alone, read from the source: importing is running."""
    found: dict[str, bool] = {}
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "probe":
                        name = ast.literal_eval(mark.args[0])
                        assert name == node.name
                        assert name not in found
                        found[name] = any(keyword.arg == "alone" for keyword in mark.keywords)
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in ("CONNECTS", "DATAGRAMS"):
                assert isinstance(node.value, ast.Dict)
                found |= {ast.literal_eval(key): False for key in node.value.keys if key is not None}
    for path in package.glob("src/*.c"):
        named = re.findall(r'^ +\{"(binary_\w+)", \w+\},( /\* alone \*/)?$', path.read_text(), re.MULTILINE)
        found |= {name: bool(alone) for name, alone in named}
    for path in package.glob("probes.js"):
        found |= dict.fromkeys(re.findall(r"^  (node_\w+): ", path.read_text(), re.MULTILINE), False)
    return found


@pytest.mark.parametrize("package", HOSTILE_PACKAGES, ids=_name)
def test_table_and_code_name_same_probes(package: Path) -> None:
    listed = {probe.id: probe.alone for probe in PROBES if probe.package == package.name}
    listed |= {act.id: False for act in GRANTED if act.package == package.name}
    listed |= {probe.id: False for probe in NETWORK_PROBES if probe.package == package.name}
    assert _probes_in(package) == listed


def test_table_is_complete_and_every_probe_has_control() -> None:
    ids = [probe.id for probe in PROBES]
    kinds = Counter(probe.control for probe in PROBES)
    assert len(ids) == len(set(ids))
    assert len(ids) >= 40
    assert kinds["a"] >= 30
    assert kinds["c"] == 0
    for probe in PROBES:
        assert bool(probe.expect) != bool(probe.limit), probe.id
        assert probe.limit is None or probe.limit in errors.TABLE, probe.id
        # INVARIANT: a control that answers as our filter does could not tell the two apart.
        assert (probe.control == "b") == bool(probe.plain), probe.id
        assert "EPERM" not in probe.plain, probe.id
        assert not set(probe.plain) & set(probe.expect), probe.id
        assert not probe.limit or probe.alone, probe.id


def test_network_table_is_complete_and_every_probe_has_control() -> None:
    ids = [probe.id for probe in NETWORK_PROBES]
    assert len(ids) == len(set(ids))
    assert not set(ids) & {probe.id for probe in PROBES}
    assert len(ids) >= 150
    for probe in NETWORK_PROBES:
        assert (probe.control == "b") == bool(probe.plain), probe.id
        # INVARIANT: a control that answers as our filter does could not tell the two apart.
        assert "EPERM" not in probe.plain, probe.id
        assert probe.bound is None or probe.grants, probe.id
        # What can only be seen by its mark must be known by its name from every other mark.
        assert not any(other.startswith(f"{probe.id}_") and other[len(probe.id) + 1 :].isdigit() for other in ids)


@pytest.mark.parametrize("package", HOSTILE_PACKAGES, ids=_name)
def test_what_packages_share_is_same(package: Path) -> None:
    """Each package is signed by itself, so each has its own copy; python/ has the first."""
    for path in package.glob("*.py"):
        first = HOSTILE / "python" / path.name
        if path.name != "main.py" and first.exists():
            assert path.read_bytes() == first.read_bytes(), path
