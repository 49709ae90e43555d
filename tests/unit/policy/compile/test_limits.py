"""Ceilings, writable paths, pinned programs, secrets and what the supervisor holds: each as its artefact says it."""

from __future__ import annotations

import dataclasses

import pytest

from policy import errors
from policy.explain import report
from policy.host import Closure, ClosureFile
from tests.unit.policy.compile import sample

WRITE = '[permissions.filesystem]\nread = ["/opt/a"]\nwrite = ["/srv/data"]'
IO = {"io_read_bps": "rbps", "io_write_bps": "wbps", "io_read_iops": "riops", "io_write_iops": "wiops"}


def test_no_limit_of_input_and_output_is_no_file() -> None:
    document = sample.compiled(sample.manifest()).json("cgroup.json")
    assert document["version"] == 2
    assert {entry["controller"] for entry in document["v2"]} == {"cpu", "memory", "pids"}
    assert document["v1"]


@pytest.mark.parametrize("name", IO)
def test_limit_of_input_and_output_is_word_of_io_max_and_version_1_holds_none(name: str) -> None:
    found = sample.manifest(resources=f"{name} = 1000")
    artefacts = sample.compiled(found)
    document = artefacts.json("cgroup.json")
    assert document["v1"] is None
    (entry,) = (entry for entry in document["v2"] if entry["controller"] == "io")
    words = " ".join(f"{word}={1000 if key == name else 'max'}" for key, word in IO.items())
    assert entry == {"controller": "io", "file": "io.max", "value": f"$DEVICE {words}", "required": True}
    rows = {f"{r.artefact}:{r.rule}": r for r in report.explain(artefacts, where=found.where)}
    told = rows["cgroup.json:v2/io.max"]
    assert (told.key, told.where, told.reason) == (f"resources.{name}", "agent.toml:9", name)


def test_all_limits_of_input_and_output_stand_in_one_line() -> None:
    found = sample.manifest(resources="\n".join(f"{name} = {n}" for n, name in enumerate(IO, 1)))
    (entry,) = (e for e in sample.compiled(found).json("cgroup.json")["v2"] if e["file"] == "io.max")
    assert entry["value"] == "$DEVICE rbps=1 wbps=2 riops=3 wiops=4"


def test_written_path_is_mount_without_rights_and_links_where_something_bounds_it() -> None:
    found = sample.manifest(filesystem="host", more=WRITE)
    mounts = {m["destination"]: m for m in sample.compiled(found, sample.host(room_mb=8)).json("mounts.json")["mounts"]}
    assert mounts["/srv/data"]["options"] == ["rw", "nosuid", "nodev", "noexec", "nosymfollow", "idmapped"]
    assert mounts["/opt/a"]["options"] == ["ro", "nosuid", "nodev", "noexec"]
    with pytest.raises(errors.NotEnforceableError, match="write path `/srv/data` is bounded by nothing") as caught:
        sample.compiled(found)
    assert caught.value.where == found.where("permissions.filesystem.write")


def test_scratch_has_what_written_paths_leave_of_disk_mb() -> None:
    found = sample.manifest(filesystem="host", more=WRITE, resources="disk_mb = 20\nmemory_mb = 100")
    artefacts = sample.compiled(found, sample.host(room_mb=8))
    plan = artefacts.json("mounts.json")
    assert plan["rooms"] == {"/srv/data": 8}
    (scratch,) = (m for m in plan["mounts"] if m["destination"] == "/tmp")
    assert scratch["options"][-1] == "size=12m"
    # The scratch lives in memory, the written path does not.
    assert artefacts.json("cgroup.json")["v2"][0]["value"] == str((100 + 12 + 64 + 32) << 20)
    rows = {f"{r.artefact}:{r.rule}": r for r in report.explain(artefacts, where=found.where)}
    assert rows["mounts.json:/srv/data"].says.endswith(", 8 MiB at most")
    with pytest.raises(errors.NotEnforceableError, match="the file systems of the written paths have 20 MiB") as caught:
        sample.compiled(found, sample.host(room_mb=20))
    assert caught.value.where == found.where("resources.disk_mb")
    sample.compiled(found, sample.host(room_mb=19))


def test_written_path_covers_what_is_read_below_it() -> None:
    more = '[permissions.filesystem]\nread = ["/srv/data/in"]\nwrite = ["/srv/data"]'
    found = sample.manifest(filesystem="host", more=more)
    mounts = sample.compiled(found, sample.host(room_mb=8)).json("mounts.json")["mounts"]
    assert [m["destination"] for m in mounts if m["destination"].startswith("/srv")] == ["/srv/data"]


def programs(*allow: str) -> str:
    return f"[permissions.executables]\nallow = [{', '.join(f'{chr(34)}{one}{chr(34)}' for one in allow)}]"


def test_granted_program_says_its_digest_and_runtime_does_not() -> None:
    closures = sample.compiled(sample.manifest(more=programs("/usr/bin/cat"))).json("mounts.json")["root"]["closures"]
    assert [(c["name"], c.get("sha256")) for c in closures] == [("python3", None), ("/usr/bin/cat", "a" * 64)]


def test_pinned_program_is_one_that_host_has_or_nothing_is_compiled() -> None:
    right, wrong = "ab" * 32, "cd" * 32
    path = "/usr/bin/cat"
    held = Closure(path, path, (ClosureFile(path, "file", 0o755, 10, right),))
    facts = sample.host(executables={path: held})
    closures = sample.compiled(sample.manifest(more=programs(f"{path}@sha256:{right}")), facts).json("mounts.json")[
        "root"
    ]["closures"]
    assert closures[1]["sha256"] == right
    found = sample.manifest(more=programs(f"{path}@sha256:{wrong}"))
    with pytest.raises(errors.NotEnforceableError, match="has digest abab") as caught:
        sample.compiled(found, facts)
    assert caught.value.where == found.where("permissions.executables.allow")
    # A closure whose entry is a link has no digest of its own, so no pin can hold.
    linked = dataclasses.replace(held, files=(ClosureFile(path, "symlink", target="busybox"),))
    with pytest.raises(errors.NotEnforceableError, match="has digest none"):
        sample.compiled(
            sample.manifest(more=programs(f"{path}@sha256:{right}")), sample.host(executables={path: linked})
        )


def test_secrets_and_tools_are_listed_sorted_and_told_with_their_lines() -> None:
    more = (
        '[permissions.credentials]\ngrants = ["mail", "db"]\n'
        '[permissions.skills]\nallow = ["matrix://tool/mcp/fs/read@1.0"]\nside_effects = ["write", "read"]\n'
        'call_ms = 50\n[[permissions.skills.rule]]\ntool = "matrix://tool/mcp/fs/read@1.0"\nargument = "path"\n'
        'equals = "/a"\n[[permissions.skills.rule]]\ntool = "matrix://tool/mcp/fs/read@1.0"\nargument = "path"\n'
        'matches = "/b/.*"\n'
    )
    found = sample.manifest(more=more)
    artefacts = sample.compiled(found)
    assert artefacts.json("credentials.json") == {"version": 1, "names": ["db", "mail"]}
    skills = artefacts.json("supervision.json")["skills"]
    assert skills == {
        "allow": ["matrix://tool/mcp/fs/read@1.0"],
        "side_effects": ["read", "write"],
        "rules": [
            {
                "tool": "matrix://tool/mcp/fs/read@1.0",
                "argument": "path",
                "alternatives": [{"equals": '"/a"'}, {"matches": "/b/.*"}],
            }
        ],
        "limits": {"calls_per_minute": 600, "call_ms": 50, "argument_bytes": 65_536, "answer_bytes": 1_048_576},
    }
    rows = {f"{r.artefact}:{r.rule}": r for r in report.explain(artefacts, where=found.where)}
    assert rows["credentials.json:db"].key == "permissions.credentials.grants[1]"
    assert rows["supervision.json:skills/side_effects/write"].key == "permissions.skills.side_effects[0]"
    rule = rows["supervision.json:skills/rules/0"]
    assert (rule.key, rule.says) == (
        "permissions.skills.rule[0]", 'matrix://tool/mcp/fs/read@1.0 path = "/a" or //b/.*/',
    )  # fmt: skip
    kinds = {name: rows[f"supervision.json:skills/limits/{name}"].kind for name in ("call_ms", "answer_bytes")}
    assert kinds == {"call_ms": "manifest", "answer_bytes": "default"}


def test_what_supervisor_holds_when_little_is_written() -> None:
    artefacts = sample.compiled(sample.manifest())
    assert artefacts.json("supervision.json") == {
        "version": 1,
        "roles": ["*"],
        "spawn": {"max_depth": 0, "max_descendants": 0, "on_parent_exit": "terminate"},
        "lifetime": {"ttl_seconds": 0, "on_expiry": "terminate"},
        "task": {"wall_ms": 30000, "cpu_time_ms": None},
        "skills": {"allow": [], "side_effects": []},
    }


def test_what_supervisor_holds_when_all_is_written() -> None:
    more = (
        '[spawn]\nallowed = true\nmax_depth = 2\nmax_descendants = 5\non_parent_exit = "wind-down"\n'
        "[lifetime]\nunlimited = true\n"
    )
    found = sample.manifest(more=more, resources="cpu_ms_per_task = 7\ncpu_time_ms = 8")
    artefacts = sample.compiled(found)
    document = artefacts.json("supervision.json")
    assert document["spawn"] == {"max_depth": 2, "max_descendants": 5, "on_parent_exit": "wind-down"}
    assert document["lifetime"] == {"ttl_seconds": None, "on_expiry": "terminate"}
    assert document["task"] == {"wall_ms": 7, "cpu_time_ms": 8}
    rows = {f"{r.artefact}:{r.rule}": r for r in report.explain(artefacts, where=found.where)}
    assert rows["supervision.json:lifetime/ttl_seconds"].key == "lifetime.unlimited"
    assert rows["supervision.json:lifetime/ttl_seconds"].says == "no end"
