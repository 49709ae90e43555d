"""Questions about a policy away from its host: ``--host``, packages of a git revision, and Markdown."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from covenant.cli.main import cli
from covenant.cli.policy import pull_request
from policy import errors
from policy.explain.diff import Diff, DiffRow
from policy.why import amend

AGENTS = Path(__file__).resolve().parents[5] / "agents"
PLACE = "/srv/not-on-this-host"


def _git(repository: Path, *arguments: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=n@example.invalid", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", repository, *who, *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with an agent, in which we are. Its attributes would hide a file from `git archive`."""
    made = tmp_path / "repository"
    shutil.copytree(AGENTS / "hello", made / "agents/hello")
    (made / ".gitattributes").write_text("agent.toml export-ignore\n")
    _git(tmp_path, "init", "-q", "-b", "main", str(made))
    _git(made, "add", ".")
    _git(made, "commit", "-qm", "one")
    monkeypatch.chdir(made)
    return made


def _widen(repository: Path) -> None:
    manifest = repository / "agents/hello/agent.toml"
    text = manifest.read_text()
    assert "read = []" in text
    manifest.write_text(text.replace("read = []", f'read = ["{PLACE}"]'))


def _covenant(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def _json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_covenant(*arguments, "--json").stdout)
    return found


def test_revision_is_compared_with_files(repository: Path) -> None:
    same = _covenant("policy", "diff", "main:agents/hello", "agents/hello", "--host", "none")
    assert same.exit_code == 0, same.output
    _widen(repository)
    wider = _covenant("policy", "diff", "main:agents/hello", "agents/hello", "--host", "none")
    assert wider.exit_code == 3
    assert "read /srv/not-on-this-host" in wider.stdout
    assert "unknown: path `/srv/not-on-this-host`" in wider.stderr
    here = _covenant("policy", "diff", "main:agents/hello", "agents/hello")
    assert here.exit_code not in (0, 3), "this host has no such path"


@pytest.mark.parametrize("name", ["main:agents/none", "none:agents/hello", "--output=x:agents/hello"])
def test_revision_that_is_not_there_is_refused(repository: Path, name: str) -> None:
    done = _covenant("policy", "diff", "--host", "none", "--", name, "agents/hello")
    assert done.exit_code not in (0, 3)
    assert getattr(done.exception, "code", "") == "no_such_revision"
    assert sorted(path.name for path in repository.iterdir()) == [".git", ".gitattributes", "agents"]


def test_link_out_of_revision_is_refused(repository: Path) -> None:
    asked = ("policy", "diff", "main:agents/hello", "agents/hello", "--host", "none")
    link = repository / "agents/hello/link"
    link.symlink_to("agent.toml")
    _git(repository, "add", ".")
    _git(repository, "commit", "-qm", "two")
    assert _covenant(*asked).exit_code == 0
    link.unlink()
    link.symlink_to("/etc/passwd")
    _git(repository, "add", ".")
    _git(repository, "commit", "-qm", "three")
    done = _covenant(*asked)
    assert getattr(done.exception, "code", "") == "package_invalid"
    assert "absolute path" in str(done.exception)


def test_exported_facts_give_policy_of_this_host(repository: Path) -> None:
    done = _covenant("doctor", "--export", "facts.json", "--for", "agents/hello")
    assert done.exit_code == 0, done.output
    here = _json("policy", "explain", "agents/hello")
    there = _json("policy", "explain", "agents/hello", "--host", "facts.json")
    assert "unknown" not in there
    assert there["policy_digest"] == here["policy_digest"]
    none = _json("policy", "explain", "agents/hello", "--host", "none")
    assert none["policy_digest"] != here["policy_digest"]
    assert len(none["unknown"]) == 1
    assert _json("manifest", "check", "agents/hello", "--host", "facts.json")["refusals"] == []


def test_run_that_supervisor_refuses_is_noted(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here and by exported facts: a provider of a supervisor without a network; none once the fix is applied."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    monkeypatch.setenv("COVENANT_STATE", str(state))
    (state / "providers.toml").write_text('[providers.near]\nkind = "ollama"\n')
    manifest = repository / "agents/hello/agent.toml"
    text = manifest.read_text().replace('role = "observer"', "")
    manifest.write_text(f'{text}\n[services.models]\nallow = [{{ provider = "near", models = ["*"] }}]\n')
    exported = _covenant("doctor", "--export", "facts.json")
    assert exported.exit_code == 0, exported.output
    for more in ((), ("--host", "facts.json")):
        for asked in (("explain", "agents/hello"), ("why", "agents/hello", "--syscall", "read")):
            said = _covenant("policy", *asked, *more)
            assert "note: run under covenant-supervisor refuses this: provider `near` is reached by" in said.stderr
            [refusal] = _json("policy", *asked, *more)["supervised_refusals"]
            assert (refusal["code"], "uplink" in refusal["hint"]) == ("not_enforceable", True)
    assert "supervised_refusals" not in _json("policy", "explain", "agents/hello", "--host", "none")
    (state / "config.toml").write_text('uplink = "eth0"\n')
    mended = _covenant("policy", "explain", "agents/hello", "--json")
    assert mended.exit_code == 0, (mended.output, mended.exception)
    assert "supervised_refusals" not in json.loads(mended.stdout)


def test_question_is_answered_without_host(repository: Path) -> None:
    _widen(repository)
    assert _covenant("policy", "why", "agents/hello", "--open", f"{PLACE}/file", "--host", "none").exit_code == 0
    assert _covenant("policy", "why", "agents/hello", "--open", "/srv/other", "--host", "none").exit_code == 3


def test_host_file_that_is_none_is_refused(repository: Path) -> None:
    done = _covenant("manifest", "check", "agents/hello", "--host", "agents/hello/agent.toml")
    assert getattr(done.exception, "code", "") == "host_facts"
    missing = _covenant("manifest", "check", "agents/hello", "--host", "missing.json")
    assert getattr(missing.exception, "code", "") == "host_facts"


def test_markdown_holds_no_text_of_manifest_outside_code() -> None:
    hostile = "`|x|` <img src=x> [link](http://example.invalid) @team \x1b[31m\n## heading"
    row = DiffRow("reads files of the host", "filesystem", "readable path", (hostile,), ())
    found = pull_request.text("old", hostile, Diff(True, (row,)), [hostile])
    assert "\n## heading" not in found
    assert "\x1b" not in found
    for line in found.splitlines():
        outside = _outside_code(line)
        assert not any(sign in outside for sign in ("<img", "](http", "@team")), line
    cells = [line for line in found.splitlines() if line.startswith("| reads")]
    assert [line.replace(r"\|", "").count("|") for line in cells] == [4]


def _outside_code(line: str) -> str:
    """Return a line without its code spans (CommonMark 6.1: a span ends at as many backticks as began it)."""
    out, rest = "", line
    while "`" in rest:
        before, _, after = rest.partition("`")
        out += before
        size = 1 + len(after) - len(after.lstrip("`"))
        inside = after.lstrip("`")
        end = inside.find("`" * size)
        assert end >= 0, line
        rest = inside[end + size :]
    return out + rest


def test_revision_of_this_directory_is_compared(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, tree in (
        ("agents/hello", "main:./"),
        ("agents/hello", "main:."),
        ("agents/hello/..", "main:./hello"),
    ):
        monkeypatch.chdir(repository / directory)
        package = "." if tree.endswith((".", "./")) else "hello"
        same = _covenant("policy", "diff", tree, package, "--host", "none")
        assert same.exit_code == 0, (tree, same.output, same.exception)


def test_export_for_missing_package_names_the_place(repository: Path) -> None:
    said = _covenant("doctor", "--export", "facts.json", "--for", "agents/helo")
    assert isinstance(said.exception, errors.PackageError)
    assert said.exception.hint == "did you mean `agents/hello`?"
    fixed = _covenant("doctor", "--export", "facts.json", "--for", "agents/hello")
    assert fixed.exit_code == 0, fixed.output


def test_why_of_command_names_all_lines(repository: Path) -> None:
    """An agent without any command: the lines that are printed make a manifest that is accepted."""
    about = ("policy", "why", "agents/hello", "--tool", "gh", "--host", "none")
    said = _covenant(*about)
    assert (said.exit_code, "command `gh` is not granted" in said.stdout) == (3, True), said.output
    lines = _json(*about)["add"]
    manifest = repository / "agents/hello/agent.toml"
    manifest.write_text(amend.document(manifest.read_text(), lines))
    assert _covenant("policy", "why", "agents/hello", "--tool", "gh", "--host", "none").exit_code == 0


@pytest.mark.parametrize("name", ["", "GH", "a b"])
def test_word_that_names_no_command_is_usage(repository: Path, name: str) -> None:
    said = _covenant("policy", "why", "agents/hello", "--tool", name, "--host", "none")
    assert isinstance(said.exception, errors.UsageError)
    assert "no name of a command" in str(said.exception)


def test_role_allows_nothing_that_is_never_granted(repository: Path) -> None:
    said = _covenant("policy", "why", "agents/hello", "--syscall", "chroot", "--host", "none")
    assert "never grantable: " in said.stdout
    assert "allows it" not in said.stdout
