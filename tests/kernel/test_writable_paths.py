"""A written path as it is compiled for a host with a project quota: runsc takes the mount and its flags hold.

No host is probed to have such a quota yet, so the fact is given here; everything else is a real run.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.host import HostFacts
from sandbox import host
from tests.kernel.world import HEAD, TAIL, World

CODE = """
answer = {{}}
def tried(name, act):
    try: answer[name] = act() or "done"
    except OSError as e: answer[name] = e.errno
tried("read", lambda: open("{path}/text").read())
tried("write", lambda: os.close(os.open("{path}/new", os.O_CREAT | os.O_WRONLY, 0o666)))
tried("change", lambda: open("{path}/text", "a").write("x") and "")
tried("closed", lambda: os.open("{path}/closed", os.O_WRONLY))
tried("link", lambda: open("{path}/link").read())
tried("outside", lambda: open("{path}/outside").read())
tried("chmod", lambda: os.chmod("{path}/new", 0o4755))
"""


@pytest.fixture
def written() -> Iterator[Path]:
    """A directory that root alone can change, with a file in it that everybody may write."""
    path = Path(f"/srv/covenant-test-written-{os.getpid()}")
    path.mkdir(mode=0o755)
    (path / "text").write_text("as it was")
    (path / "text").chmod(0o666)
    (path / "closed").write_text("root's")
    (path / "closed").chmod(0o600)
    (path / "link").symlink_to("text")
    (path / "outside").symlink_to("/etc/hostname")
    yield path
    shutil.rmtree(path)


def grant(path: Path) -> dict[str, Any]:
    return {"filesystem": "host", "more": f'[permissions.filesystem]\nwrite = ["{path}"]\n'}


def test_a_written_path_takes_what_its_owner_allows_and_no_link_leads_out_of_it(
    world: World, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = CODE.format(path=written)
    assert Path("/etc/hostname").exists()
    with pytest.raises(errors.NotEnforceableError, match="needs a project quota"):
        world.run_code(HEAD + code + TAIL, **grant(written))
    real = host.probe

    def with_quota(config: Any) -> HostFacts:
        return dataclasses.replace(real(config), project_quota=True)

    monkeypatch.setattr(host, "probe", with_quota)
    got = world.ask(code, **grant(written))
    assert got == {
        "read": "as it was",
        "write": 13,  # the directory is root's; which uid may write waits for the quota itself
        "change": "done",
        "closed": 13,
        # gVisor reads the link and walks on within the agent's root: nothing of the host is behind it.
        "link": "as it wasx",
        "outside": 2,
        "chmod": 2,
    }
    assert (written / "text").read_text() == "as it wasx"
    assert sorted(p.name for p in written.iterdir()) == ["closed", "link", "outside", "text"]
