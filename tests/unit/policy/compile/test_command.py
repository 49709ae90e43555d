"""A policy with a command, layers and a contract: what it compiles to, and that the proof sees each change of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from policy import data, errors, prove
from policy.compile import bundle
from policy.compile.artefacts import Artefacts, canonical
from policy.compile.targets import all as targets
from policy.explain import diff, report
from policy.host import Closure, ClosureFile
from policy.manifest.agent import Manifest
from policy.rules import nine
from tests.unit.policy.compile import sample

HEX = "0123456789abcdef" * 4
SHELL = Closure("command", "/usr/bin/sh", (ClosureFile("/usr/bin/sh", "file", 0o755, 1, "e" * 64),), layered=True)
MORE = f"""
[permissions.executables]
allow = ["layer:tools"]
[process]
args = ["-c", "echo {{intent}}"]
env = {{ TZ = "UTC", HOME = "/srv" }}
cwd = "/srv"
contract = "text"
[root]
base = "debian@sha256:{HEX}"
layers = ["tools@sha256:{HEX}"]
"""


def shell(more: str = MORE, **fields: Any) -> Manifest:
    """A manifest that starts a shell of a layer."""
    return sample.manifest(more=more, runtime='command"\n# "', **fields)


def facts() -> Any:
    """A machine whose layers have a shell."""
    return sample.host(runtimes={"command": SHELL})


def proved(manifest: Manifest, artefacts: Artefacts) -> None:
    """Hold artefacts to a manifest."""
    effective = nine.requested(manifest, roles=data.roles())
    prove.prove(effective, artefacts, known=prove.Facts.of(manifest, facts(), "d" * 64))


def test_command_compiles_and_is_proved() -> None:
    manifest = shell()
    made = sample.compiled(manifest, facts())
    process = made.json("config.json")["process"]
    assert process["args"] == ["/.covenant/init", "/usr/bin/sh", "-c", "echo {intent}"]
    assert process["cwd"] == "/srv"
    assert [one for one in process["env"] if one.startswith(("HOME", "TZ"))] == ["HOME=/srv", "TZ=UTC"]
    assert made.json("mounts.json")["root"]["image"] == {
        "layers": [{"name": name, "digest": HEX} for name in ("debian", "tools")],
        "executable": ["layer:tools"],
        "programs": ["/usr/bin/sh"],
    }
    assert made.json("supervision.json")["process"] == {"contract": "text", "intent": "argument"}
    proved(manifest, made)


def test_each_rule_of_command_has_its_cause() -> None:
    manifest = shell()
    rows = {
        f"{row.artefact}:{row.rule}": row
        for row in report.explain(sample.compiled(manifest, facts()), where=manifest.where)
    }
    assert rows["mounts.json:layer/tools"].key == "root.layers[0]"
    assert rows["mounts.json:layer/debian"].key == "root.base"
    assert rows["mounts.json:programs/layer:tools"].key == "permissions.executables.allow[0]"
    assert rows["supervision.json:process/contract"].key == "process.contract"
    assert rows["config.json:process/env"].key == "process.env"


def _argument(documents: dict[str, Any]) -> None:
    documents["config.json"]["process"]["args"][2] = "rm"


def _variable(documents: dict[str, Any]) -> None:
    documents["config.json"]["process"]["env"].remove("TZ=UTC")


def _preload(documents: dict[str, Any]) -> None:
    env = documents["config.json"]["process"]["env"]
    documents["config.json"]["process"]["env"] = sorted([*env, "LD_PRELOAD=/tmp/x"])


def _directory(documents: dict[str, Any]) -> None:
    documents["config.json"]["process"]["cwd"] = "/"


def _terminal(documents: dict[str, Any]) -> None:
    documents["config.json"]["process"]["terminal"] = True


def _layer(documents: dict[str, Any]) -> None:
    documents["mounts.json"]["root"]["image"]["layers"][1]["digest"] = HEX[::-1]


def _tree(documents: dict[str, Any]) -> None:
    documents["mounts.json"]["root"]["image"]["executable"] = ["layer:debian", "layer:tools"]


def _program(documents: dict[str, Any]) -> None:
    documents["mounts.json"]["root"]["image"]["programs"] = ["/usr/bin/env", "/usr/bin/sh"]


def _contract(documents: dict[str, Any]) -> None:
    documents["supervision.json"]["process"] = {"contract": "stdio", "intent": "none"}


def _intent(documents: dict[str, Any]) -> None:
    documents["supervision.json"]["process"]["intent"] = "stdin"


CHANGES = (_argument, _variable, _preload, _directory, _terminal, _layer, _tree, _program, _contract, _intent)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_artefact_is_not_proved(change: Callable[[dict[str, Any]], None]) -> None:
    manifest = shell()
    made = sample.compiled(manifest, facts())
    documents = {name: json.loads(made.files[name]) for name in ("config.json", "mounts.json", "supervision.json")}
    change(documents)
    changed = Artefacts({**made.files, **{name: canonical(one) for name, one in documents.items()}})
    with pytest.raises((errors.ProofError, errors.ArtefactError)):
        proved(manifest, changed)


def test_intent_is_one_argument_of_run() -> None:
    made = sample.compiled(shell(), facts())
    arguments = bundle.with_intent(made, "a b; {intent} $(id)")
    raw = bundle.instantiate(made, run_id="00000000-0000-4000-8000-000000000001", uid=2_000_000, arguments=arguments)
    assert json.loads(raw)["process"]["args"] == ["/.covenant/init", "/usr/bin/sh", "-c", "echo a b; {intent} $(id)"]


def test_shared_memory_is_part_of_disk() -> None:
    manifest = sample.manifest(resources="disk_mb = 64", more="dev_shm_mb = 16")
    made = sample.compiled(manifest, sample.host())
    sizes = {m["destination"]: m["options"][-1] for m in made.json("mounts.json")["mounts"]}
    assert (sizes["/tmp"], sizes["/dev/shm"]) == ("size=48m", "size=16m")
    effective = nine.requested(manifest, roles=data.roles())
    prove.prove(effective, made, known=prove.Facts.of(manifest, sample.host(), "d" * 64))


def test_parent_that_leaves_too_little_disk_is_told() -> None:
    manifest = sample.manifest(resources="disk_mb = 64", more="dev_shm_mb = 16")
    whole = nine.requested(manifest, roles=data.roles())
    less = structs.replace(whole.resources, disk_mb=16)
    with pytest.raises(errors.NotEnforceableError, match="dev_shm_mb is 16"):
        sample.compiled(manifest, sample.host(), ceiling=_with_resources(whole, less))


def _with_resources(whole: Any, resources: Any) -> Any:
    import dataclasses

    return dataclasses.replace(whole, resources=resources)


def test_diff_tells_of_tree_and_process() -> None:
    before = sample.compiled(shell(MORE.replace('"layer:tools"', "")), facts())
    after = sample.compiled(shell(), facts())
    found = diff.compare_artefacts(before, after)
    assert found.widens
    assert "execute every program of layer tools" in [line for row in found.rows for line in row.added]
    spoken = sample.compiled(shell(MORE.replace("TZ", "LC_ALL")), facts())
    assert "how it is started" in diff.compare_artefacts(after, spoken).differs


def test_program_of_a_tree_is_no_wider_than_the_tree() -> None:
    """A manifest that names programs of its layers is narrower than one that grants all of the same root."""
    whole = sample.compiled(shell(MORE.replace('"layer:tools"', '"root"')), facts())
    manifest = shell(MORE.replace('"layer:tools"', '"/usr/bin/cat"'))
    program = ClosureFile("/usr/bin/cat", "file", 0o755, 1, "e" * 64)
    cat = Closure("/usr/bin/cat", "/usr/bin/cat", (program,), layered=True)
    named = sample.compiled(manifest, structs.replace(facts(), executables={"/usr/bin/cat": cat}))
    assert "/usr/bin/cat" in named.json("mounts.json")["root"]["image"]["programs"]
    found = diff.compare_artefacts(whole, named)
    assert (found.widens, [row.removed for row in found.rows]) == (False, [("execute every program of root",)])
    assert diff.compare_artefacts(named, whole).widens
    # The control: a program of the host, and one of another root.
    assert diff.compare_artefacts(whole, sample.compiled(manifest, _with_cat())).widens
    other = sample.compiled(shell(MORE.replace('"layer:tools"', '"root"').replace("tools@", "others@")), facts())
    assert diff.compare_artefacts(other, named).widens


def test_child_gets_no_tree_that_its_parent_has_not() -> None:
    parent = sample.compiled(shell(MORE.replace('"layer:tools"', '"/usr/bin/cat"')), _with_cat())
    child = sample.compiled(shell(), facts())
    with pytest.raises(errors.ProofError, match="execute every program"):
        prove.within(child, parent, remaining_seconds=None)


def _with_cat() -> Any:
    return structs.replace(facts(), executables={"/usr/bin/cat": sample.closure("/usr/bin/cat", "/usr/bin/cat")})


@pytest.mark.parametrize("target", ["kubernetes", "systemd"])
def test_other_target_has_no_layers(target: str) -> None:
    manifest = shell()
    effective = nine.requested(manifest, roles=data.roles())
    order = targets.Order(manifest=manifest, effective=effective, host=facts(), package_digest="d" * 64)
    with pytest.raises(errors.NotEnforceableError, match="has no place for"):
        targets.compile(target, order)
