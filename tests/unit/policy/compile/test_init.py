"""When an agent has an init, what its artefacts say of it, and the paths that it keeps."""

from __future__ import annotations

import pytest

from policy import errors
from policy.compile import init
from policy.decompile import read as reading
from policy.explain import report
from policy.host import GrantedPath
from policy.why import ask, files
from tests.unit.policy.compile import sample

PROGRAMS = '[permissions.executables]\nallow = ["/usr/bin/cat"]\n'
TAIL = ["/usr/bin/python3.11", "main.py"]


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ("", False),
        (PROGRAMS, True),
        *(
            (PROGRAMS + f'[permissions.syscalls]\ndeny = ["{call}"]\n', False)
            for call in sorted(init.CALLS - {"execve"})
        ),
    ],
)
def test_init_is_there_beside_programs_and_its_calls(more: str, first: bool) -> None:
    made = sample.compiled(sample.manifest(more=more, resources="pids_max = 7"))
    process = made.json("config.json")["process"]
    assert process["args"] == [*([init.PROGRAM] if first else []), *TAIL]
    limits = {limit["type"]: limit["hard"] for limit in process["rlimits"]}
    assert limits["RLIMIT_NPROC"] == 7 + first
    found = reading.read(made.files)
    assert (found.init, list(found.args), found.grants.resources.pids_max) == (first, TAIL, 7)
    rules = {row.rule: row.says for row in report.explain(made, where=lambda key: key) if row.artefact == "config.json"}
    assert rules["process/args"] == "/usr/bin/python3.11 main.py"
    assert ("process/init" in rules) is first


def test_init_is_not_for_other_machines() -> None:
    made = sample.compiled(sample.manifest(more=PROGRAMS), sample.host(arch="aarch64"))
    assert made.json("config.json")["process"]["args"] == TAIL
    assert not reading.read(made.files).init


def test_init_keeps_its_directory_from_grants() -> None:
    read = '[permissions.filesystem]\nread = ["/.covenant/more"]\n'
    host = sample.host(granted={"/.covenant/more": GrantedPath("/.covenant/more", "dir")})
    sample.compiled(sample.manifest(more=read), host)
    with pytest.raises(errors.NotEnforceableError, match=r"collides with `/\.covenant`"):
        sample.compiled(sample.manifest(more=read + PROGRAMS), host)


def test_init_is_known_to_why() -> None:
    for more, there in (("", False), (PROGRAMS, True)):
        sight = ask.Sight(reading.read(sample.compiled(sample.manifest(more=more)).files))
        seen = [files.Execute(init.PROGRAM).seen(sight), files.Open(init.PROGRAM).seen(sight)]
        seen.append(files.Open(init.DIRECTORY).seen(sight))
        assert [answer.allowed for answer in seen] == [there] * 3
        assert not files.Open(init.PROGRAM, write=True).seen(sight).allowed
