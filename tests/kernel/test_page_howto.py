"""docs/getting-started.md and docs/howto/, from the first command to the last, as typed."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandbox.control import metrics as supervisor_metrics
from tests.kernel.test_page_exec import Typist
from tests.kernel.world import ROOT

# A block, with the paragraph before it: `Write ... `NAME`` there makes the block a file.
_BLOCK = re.compile(r"(?:^([^\n]*)\n\n)? *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"Write (?:it as )?`([a-z/.]+)`")


@contextlib.contextmanager
def typing() -> Iterator[Typist]:
    """A typist whose place no mount of a sandbox covers."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="covenant-page-") as folder:
        made = Typist(Path(folder))
        yield made
        assert [p.name for p in (made.home / "supervisor/runs").iterdir() if p.is_dir()] == []


def follow(typist: Typist, page: str, **words: str) -> list[str]:
    """Type a page: make its files, run its commands, and compare what it shows. Returns what each command printed.

    ``words`` stand in the place of these words of the page.
    """
    printed: list[str] = []
    for said, language, block in _BLOCK.findall((ROOT / "docs" / page).read_text()):
        text = re.sub(r"^   ", "", block, flags=re.MULTILINE) if block.startswith("   ") else block
        for word, place in {"/srv": f"{typist.place}/srv", **words}.items():
            text = text.replace(word, place)
        if named := _FILE.search(said):
            file = typist.place / named[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif language == "sh":
            printed += [typist.typed(line)[0] for line in text.splitlines()]
        elif language == "text":
            assert printed[-1].strip() == text.strip()
    return printed


def test_first_page_can_be_followed() -> None:
    with typing() as typist:
        # What this machine lacks is no part of the page.
        (typist.place / "bin/covenant").write_text(
            (typist.place / "bin/covenant").read_text().replace("exec", '[ "$1" = doctor ] && exit 0\nexec')
        )
        printed = follow(typist, "getting-started.md")
        assert re.search(r"^\d{7}\n.*done\n\Z", next(out for out in printed if "done" in out), re.DOTALL)
        assert printed[-1] == "it works\n"


def test_agents_of_pages_answer() -> None:
    with typing() as typist:
        for page in ("python-agent", "node-agent", "writing-an-agent"):
            follow(typist, f"howto/{page}.md")


def test_keys_are_rotated_and_agent_is_revoked() -> None:
    with typing() as typist:
        typist.typed(
            "mkdir agents && covenant manifest new agents/greeter && covenant manifest sign agents/greeter --key ann"
        )
        typist.typed("covenant vault init && echo t0ken | covenant vault put greeter token")
        typist.typed("printf x | covenant keys new ann-2027 --no-passphrase")
        page = (ROOT / "docs/howto/rotate-keys.md").read_text()
        assert "covenant keys new ann-2027\n" in page
        follow(typist, "howto/rotate-keys.md", **{"covenant keys new ann-2027\n": "covenant keys list\n"})
        run = typist.typed("covenant run agents/greeter 8 --json")[0]
        (found,) = set(re.findall(r'"run_id": ?"([0-9a-f-]{36})"', run))
        # It is over, so that there is nothing to end.
        follow(
            typist,
            "howto/revoke-now.md",
            **{"covenant kill --tree RUN\n": "", "RUN": found, "--sign-with ann": "--sign-with ann-2027"},
        )
        refused = subprocess.run(
            shlex.split(f"{typist.place}/bin/covenant run agents/greeter 9"),
            cwd=typist.place,
            env={"PATH": "/usr/bin:/bin", "COVENANT_HOME": str(typist.home), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=False,
        )
        assert b"revoked" in refused.stderr


def test_rules_of_page_name_metrics_that_exist() -> None:
    page = (ROOT / "docs/howto/alerts.md").read_text()
    names = set(re.findall(r"covenant_[a-z_]+", page))
    sources = Path(supervisor_metrics.__file__).read_text() + (ROOT / "covenant/adapters/http/metrics.py").read_text()
    assert len(names) >= 9
    assert [name for name in sorted(names) if f'"{name}"' not in sources] == []
