"""docs/schema is what the models say, itself valid, and accepts what we publish.

Regenerate with: .venv/bin/python tests/golden/test_schema.py
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

from covenant.cli.main import cli
from policy.manifest.reference import json_schema

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "docs" / "schema"
FILES = {
    "agent": json_schema.for_agent,
    "statement": json_schema.for_statement,
    "tools": json_schema.for_tools,
}
# Beside the interpreter, as in every environment that the project sets up.
CHECK = pathlib.Path(sys.executable).parent / "check-jsonschema"
MANIFESTS = sorted([*(ROOT / "agents").rglob("agent.toml"), *(ROOT / "tests/golden/manifest").glob("*.toml")])


def path(name: str) -> pathlib.Path:
    return SCHEMAS / f"{name}.schema.json"


def check(*arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CHECK, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", list(FILES))
def test_schema_is_what_models_say(name: str) -> None:
    assert path(name).read_text() == json_schema.text(FILES[name]()), "regenerate docs/schema (see above)"


@pytest.mark.parametrize(("name", "options"), [("agent", []), ("statement", ["--statement"]), ("tools", ["--tools"])])
def test_command_prints_it(name: str, options: list[str]) -> None:
    done = CliRunner().invoke(cli, ["manifest", "schema", *options])
    assert (done.exit_code, done.stdout) == (0, path(name).read_text())


def test_schemas_hold_to_metaschema() -> None:
    done = check("--check-metaschema", *map(path, FILES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_program_accepts_every_manifest_that_we_publish() -> None:
    assert len(MANIFESTS) >= 7
    done = check("--schemafile", path("agent"), *MANIFESTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_program_accepts_seeds_tool_manifest() -> None:
    done = check("--schemafile", path("tools"), ROOT / "tests/golden/tools/seed.json")
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_program_refuses_slip(tmp_path: pathlib.Path) -> None:
    """The control: the same program, the same schema, one letter."""
    spelt = tmp_path / "agent.toml"
    spelt.write_text((ROOT / "agents/hello/agent.toml").read_text().replace("memory_mb", "memory_md", 1))
    done = check("--schemafile", path("agent"), spelt)
    assert done.returncode == 1
    assert "memory_md" in done.stdout


def test_files_are_ascii_with_ids_that_nobody_owns() -> None:
    for name in FILES:
        document = json.loads(path(name).read_bytes().decode("ascii"))
        assert document["$id"] == f"https://covenant.invalid/schema/{name}.schema.json"
        assert document["$schema"] == json_schema.DIALECT


if __name__ == "__main__":
    for each, make in FILES.items():
        path(each).write_text(json_schema.text(make()))
