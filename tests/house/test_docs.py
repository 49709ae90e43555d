"""Every command that a page shows exists as it is written: scripts, make targets, verbs and their options.

What a command prints is proved elsewhere; here a page cannot promise an option that is not there.
"""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import tomllib

import click
import pytest

from covenant.cli import main
from policy import errors
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.why import amend
from sandbox import config
from sandbox.network.service import providers

_FENCE = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ANY_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_VAGUE = re.compile(r"\b(whoever|whatever|somebody|nobody|such a one)\b", re.IGNORECASE)
_OWN_FILE = re.compile(r"`((?:benchmarks|covenant|policy|sandbox|scripts|tests)/[\w./-]+\.(?:c|md|py|toml))`")
_REPLACED = re.compile(r"^Status: (replaced|superseded|withdrawn)", re.MULTILINE)
_PAGES = ("README.md", "SECURITY.md", "CHANGELOG.md", "docs")

# Programs of the system that a page may show; anything else in a fence is a mistake of the page.
_SYSTEM = frozenset(
    {
        "export",
        "git",
        "ssh-keygen",
        "sudo",
        "cd",
        "apt-get",
        "rm",
        "sha512sum",
        "install",
        "npm",
        "printf",
        "python3",
        "cp",
        "sed",
        "kill",
        # Services, which tests/kernel/test_page_readme.py starts.
        "covenant-supervisor",
        "covenantd",
    }
)
# Programs of the system by their paths, and one that the page before made.
_PATHS = frozenset({"/usr/bin/python3", "/opt/llm/bin/pip", "/srv/greeter/venv/bin/pip"})

_MOST_WORDS = 1500
# Pages to look something up in, each with the reason why it is one page and longer.
_REFERENCES = {
    "docs/attestation-changes.md": "one line for each change that a test makes",
    "docs/containment-network.md": "one line for each probe of the suite",
    "docs/containment-sandbox.md": "one line for each probe of the suite",
    "docs/errors.md": "one row for each code, searched by the code",
    "docs/manifest-grants.md": "one row for each key, made from the models",
    "docs/manifest-keys.md": "one row for each key, made from the models",
    "docs/mutants-survivors.md": "one line for each mutant that survives",
    "docs/transcript.md": "the output of a program",
}


def commands(text: str) -> list[str]:
    """The command lines of a page's fences; in a `console` fence those after `$ ` or `# `."""
    found = []
    for block in _FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith(("$ ", "# "))]
        found.extend(prompted or [line for line in lines if line.strip() and not line.startswith("#")])
    return found


def _pages(clone: pathlib.Path) -> list[pathlib.Path]:
    found: list[pathlib.Path] = []
    for name in _PAGES:
        path = clone / name
        found.extend(sorted(path.rglob("*.md")) if path.is_dir() else [path])
    return found


def check(line: str, clone: pathlib.Path) -> None:
    """Raise unless the command exists with the options that it is given."""
    words = shlex.split(line, comments=True)
    while words and (words[0] in ("sudo", "env") or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    program, arguments = words[0], words[1:]
    if program == "make":
        done = subprocess.run(["make", "-n", *arguments], cwd=clone, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
    elif program.startswith(("./", ".ci/")):
        assert (clone / program).stat().st_mode & 0o100, program
    elif program in ("covenant", ".venv/bin/covenant"):
        check_verb(arguments)
    else:
        assert program in _SYSTEM or program in _PATHS or program.startswith(".venv/bin/"), (
            f"unknown program `{program}`"
        )


def check_verb(arguments: list[str]) -> None:
    """Walk the command tree and parse the rest as the command itself would; nothing is run."""
    command: click.Command = main.cli
    context = click.Context(command, info_name="covenant")
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        _, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command = found
        context = click.Context(command, info_name=command.name, parent=context)
    command.make_parser(context).parse_args(list(arguments))


def test_every_command_of_every_page_exists(clone: pathlib.Path) -> None:
    checked = 0
    for page in _pages(clone):
        for line in commands(page.read_text()):
            try:
                check(line, clone)
            except (AssertionError, OSError, click.ClickException) as e:
                raise AssertionError(f"{page.relative_to(clone)}: `{line}`: {e}") from e
            checked += 1
    assert checked >= 5


# What a page or a hint has pip install; a name in brackets is an extra of the one before.
_PIP = re.compile(r"\bpipx? install((?: +[^ \n`')]+)+)")


def test_own_name_is_installed_from_a_file(clone: pathlib.Path) -> None:
    """No index has the project under its name: a stranger who registers it there would be installed."""
    own = re.compile(r"covenant[-_.]?(supervisor|daemon)?(\[|[=<>~!]|$)")
    sources = [path for top in ("covenant", "sandbox", "policy") for path in (clone / top).rglob("*.py")]
    found = []
    for path in [*_pages(clone), *sources]:
        for words in _PIP.findall(path.read_text()):
            found += [(path.name, word) for word in words.replace('"', "").replace("'", "").split() if word[0] != "-"]
    assert {"install.md", "tui.md", "vault.md", "openbao.py", "tui.py", "minilm.py"} <= {name for name, _ in found}
    assert [one for one in found if own.match(one[1])] == []
    for word in ("covenant-supervisor[tui]", "covenant", "covenant_supervisor==1"):  # the control
        assert own.match(word)
    assert not own.match("./covenant_supervisor-0.1.0-py3-none-linux_x86_64.whl")


def test_no_page_of_prose_is_too_long(clone: pathlib.Path) -> None:
    pages = [
        clone / "README.md",
        clone / "SECURITY.md",
        clone / "CHANGELOG.md",
        *(clone / "docs").glob("*.md"),
        *(clone / "docs/howto").glob("*.md"),
    ]
    words = {page.relative_to(clone).as_posix(): len(page.read_text().split()) for page in pages}
    assert set(words) >= set(_REFERENCES)
    assert {name: count for name, count in words.items() if count > _MOST_WORDS and name not in _REFERENCES} == {}


@pytest.mark.parametrize(
    "line",
    [
        "covenant nothing",
        "covenant audit verify --no-such-option",
        "./scripts/absent",
        "make absent",
        "curl example.org",
    ],
)
def test_check_sees(clone: pathlib.Path, line: str) -> None:
    with pytest.raises((AssertionError, OSError, click.ClickException)):
        check(line, clone)


def test_headings_of_a_page_differ(clone: pathlib.Path) -> None:
    """A link to a section leads to the first of its name."""
    twice = []
    for page in _pages(clone):
        headings = re.findall(r"^#+ .*$", _ANY_FENCE.sub("", page.read_text()), re.MULTILINE)
        twice += [f"{page.relative_to(clone)}: {one}" for one in set(headings) if headings.count(one) > 1]
    assert twice == []


def test_pages_name_their_subjects(clone: pathlib.Path) -> None:
    """Rule 1 of writing holds for the pages as for docstrings; records of decisions and changes are as they were."""
    found = []
    for page in _pages(clone):
        if page.name == "CHANGELOG.md" or "adr" in page.parts:
            continue
        text = _ANY_FENCE.sub("", page.read_text())
        found += [f"{page.relative_to(clone)}: {match.group()}" for match in _VAGUE.finditer(text)]
    assert found == []


def test_pages_name_files_that_exist(clone: pathlib.Path) -> None:
    """A decision that was replaced names the files of its time."""
    dead, checked = [], 0
    for page in _pages(clone):
        text = page.read_text()
        if "adr" in page.parts and _REPLACED.search(text):
            continue
        for name in _OWN_FILE.findall(text):
            checked += 1
            if not (clone / name).exists():
                dead.append(f"{page.relative_to(clone)}: {name}")
    assert checked >= 50
    assert dead == []


def test_relative_links_lead_somewhere(clone: pathlib.Path) -> None:
    dead = [
        f"{page.relative_to(clone)}: {target}"
        for page in _pages(clone)
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []


_TOML = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LEAST = """[agent]
id = "probe"
name = "Probe"
version = "1"
runtime = "python3"
entry = "main.py"

[resources]
network = "full"

[sandbox]
backend = "linux-gvisor"
"""


def test_configuration_of_pages_is_accepted(clone: pathlib.Path) -> None:
    """Each part of a manifest, of config.toml and of providers.toml that a page shows, typed as it is."""
    blocks = [
        (page.name, block.replace("sha256:...", f"sha256:{'0' * 64}"))
        for page in (*(clone / "docs").glob("*.md"), *(clone / "docs" / "howto").glob("*.md"), clone / "README.md")
        for block in _TOML.findall(page.read_text())
    ]
    refused, read = [], 0
    for page, block in blocks:
        tables = set(tomllib.loads(block))
        try:
            if tables <= set(Manifest.model_fields):
                parse.parse((block if "agent" in tables else amend.document(_LEAST, block.splitlines())).encode())
            elif tables <= set(config.Config.model_fields):
                config.parse(block.encode(), file=page, state=pathlib.Path("/"))
            elif tables <= {"providers", "fetch"}:
                providers.parse_all(block.encode(), file=page)
            else:
                continue
            read += 1
        except errors.CovenantError as e:
            refused.append((page, e.message))
    assert refused == []
    assert read >= 40
