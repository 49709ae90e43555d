"""[workspace] compiled, read back, explained and proved; what is falsified is no proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from policy import data, errors
from policy.compile import mounts
from policy.explain import own_limits, report
from policy.why import files
from policy.why.ask import Sight, ask
from tests import proof_kit
from tests.proof_kit import Documents
from tests.unit.policy.compile import sample

TEXT = (
    '[workspace]\nmode = "overlay"\npath = "/work/x"\nfrom = ["/srv/b", "/srv/a"]\nmax_mb = 24\nmask = ["*.secret"]\n'
    'protect = ["deploy/**"]\napply = "never"\n'
)
PROGRAMS = 'exec = true\n[permissions.executables]\nallow = ["workspace"]\n'


def compiled(text: str = TEXT, disk_mb: int = 64) -> proof_kit.Case:
    return proof_kit.case(sample.manifest(more=text, resources=f"disk_mb = {disk_mb}"))


def mount(case: proof_kit.Case) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [one for one in case.artefacts.json("mounts.json")["mounts"] if one["source"] == "workspace"]
    return found


def test_workspace_is_a_mount_with_terms() -> None:
    case = compiled()
    assert mount(case) == {
        "destination": "/work/x",
        "type": "bind",
        "source": "workspace",
        "kind": "dir",
        "options": ["rw", "nosuid", "nodev", "noexec"],
    }
    terms = case.artefacts.json("mounts.json")["workspace"]
    assert (terms["apply"], terms["below"], terms["max_mb"]) == ("never", ["/srv/a", "/srv/b"], 24)
    assert {"*.secret", ".env"} <= set(terms["mask"])
    assert {"deploy/**", "**/.git/hooks/**"} <= set(terms["protect"])
    found = case.prove().found.seen
    assert found.workspace is not None
    assert (found.workspace.place, found.workspace.programs) == ("/work/x", False)
    assert found.scratch_mb == 64 - 24, "its changes are a part of disk_mb"


def test_programs_of_workspace_lose_noexec_in_the_root() -> None:
    case = compiled(TEXT + PROGRAMS)
    assert mount(case)["options"] == ["rw", "nosuid", "nodev"]
    assert case.prove().found.grants.executables.trees == frozenset({"workspace"})


def test_native_modules_of_workspace_load() -> None:
    """On the host it has no noexec in either case: gVisor maps a library from there."""
    assert mounts.host_flags("workspace", ("rw", "nosuid", "nodev", "noexec")) == ("rw", "nosuid", "nodev")
    assert "noexec" in mounts.host_flags("/srv/out", ("rw", "nosuid", "nodev", "noexec")), "a write grant keeps it"


def test_no_workspace_is_no_term() -> None:
    case = compiled("")
    assert "workspace" not in case.artefacts.json("mounts.json")
    assert case.prove().found.seen.workspace is None


@pytest.mark.parametrize(
    "place", ["/tmp/x", "/workspace", "/workspace/x", "/proc", "/dev/shm", "/usr", "/run/covenant"]
)
def test_place_that_is_taken_is_refused_and_its_fix_works(place: str) -> None:
    text = TEXT.replace("/work/x", place)
    with pytest.raises(errors.NotEnforceableError, match=r"collides with|covers") as refusal:
        compiled(text)
    assert "/work" in refusal.value.hint
    compiled(TEXT.replace("/work/x", "/work")).prove()


def test_each_term_is_explained_with_its_cause() -> None:
    found = {one.rule: one for one in report.explain(compiled().artefacts, where=str)}
    assert found["workspace/apply"].says == "no changes are applied"
    keys = {name: found[f"workspace/{name}"].key for name in ("apply", "below", "mask", "max_mb", "protect")}
    assert keys == {name: f"workspace.{'from' if name == 'below' else name}" for name in keys}
    assert found["/work/x"].key == "workspace.mode"


def test_agent_reads_its_terms() -> None:
    case = compiled()
    document = own_limits.document(case.effective, sample.manifest(more=TEXT, resources="disk_mb = 64"))
    assert document["workspace"]["path"] == "/work/x"
    assert ".env" in document["workspace"]["mask"]


def test_why_knows_workspace() -> None:
    sight = Sight(compiled(TEXT + PROGRAMS).prove().found)
    answers = {path: ask(files.Open(f"/work/x/{path}", write=True), sight) for path in ("a", ".env", ".git/config")}
    assert [one.allowed for one in answers.values()] == [True, False, True]
    assert "covenant workspace apply" in answers["a"].because
    assert "masked" in answers[".env"].because
    assert "never applied" in answers[".git/config"].because
    by_operator = TEXT.replace('apply = "never"', 'apply = "operator"')
    answer = ask(files.Open("/work/x/a", write=True), Sight(compiled(by_operator).prove().found))
    assert "an operator has to approve" in answer.because
    assert ask(files.Execute("/work/x/run"), sight).allowed
    assert not ask(files.Execute("/work/x/run"), Sight(compiled().prove().found)).allowed


def term(name: str, value: object) -> Callable[[Documents], None]:
    return lambda d: d["mounts.json"]["workspace"].update({name: value})


def option(*options: str) -> Callable[[Documents], None]:
    def edit(d: Documents) -> None:
        for document, key in (("mounts.json", "source"), ("config.json", "destination")):
            for one in d[document]["mounts"]:
                if one[key] == "workspace" or one["destination"] == "/work/x":
                    one["options"] = [*(["bind"] if document == "config.json" else []), *options]

    return edit


FAULTS: dict[str, tuple[Callable[[Documents], None], str]] = {
    "applied where the manifest says never": (term("apply", "ask"), "workspace"),
    "approved where the manifest says never": (term("apply", "operator"), "workspace"),
    "lies elsewhere": (term("below", ["/"]), "workspace|normalised"),
    "lies anywhere below": (term("below", ["/srv"]), "workspace"),
    "lies nowhere": (term("below", []), "empty"),
    "a mask less": (lambda d: d["mounts.json"]["workspace"]["mask"].remove(".env"), "workspace"),
    "a protected path less": (lambda d: d["mounts.json"]["workspace"]["protect"].remove(".envrc"), "workspace"),
    "more room": (term("max_mb", 25), "a file may have|workspace"),
    "no bound": (term("max_mb", 0), "bounds nothing"),
    "an unknown word": (term("apply", "always"), "apply|always|one of"),
    "a term more": (term("mode", "bind"), "mode"),
    "a mask that is not sorted": (lambda d: d["mounts.json"]["workspace"]["mask"].reverse(), "not sorted"),
    "no terms": (lambda d: d["mounts.json"].pop("workspace"), "0 of its terms"),
    "programs can be started": (option("rw", "nosuid", "nodev"), "workspace|executables"),
    "setuid programs": (option("rw", "nodev", "noexec"), "no mount of a known kind"),
    "devices": (option("rw", "nosuid", "noexec"), "no mount of a known kind"),
    "no cause": (lambda d: d["provenance.json"]["rules"].pop("mounts.json:workspace/mask"), "has no cause"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_falsified_workspace_is_no_proof(name: str) -> None:
    case = compiled()
    case.prove()
    edit, why = FAULTS[name]
    with pytest.raises((errors.ProofError, errors.ArtefactError), match=why):
        case.prove(case.falsified(edit))


def test_built_in_lists_are_in_the_policy_digest() -> None:
    """A version of the program with another list makes another policy."""
    found = set(compiled().artefacts.json("mounts.json")["workspace"]["protect"])
    assert set(data.workspace_files().protect) <= found
