"""One judge: `manifest check`, `why`, `denials` and a run say the same of the same manifest."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy import decide, errors
from policy.denials import Denial
from policy.host import GrantedPath
from policy.why import denied, sight
from tests import rules_kit as kit
from tests import signing_kit
from tests.unit.policy.compile import sample

HOST = structs.replace(
    kit.HOST,
    runtimes={"python3": sample.closure("python3", "/usr/bin/python3")},
    executables={path: sample.closure(path, path) for path in ("/usr/bin/cat", "/bin/sh")},
    granted={path: GrantedPath(path, "dir") for path in ("/srv/docs", "/srv/other")},
)
NEVER = {"/srv/state": "it holds what decides"}
ROLE = ('version = "0.1.0"', 'version = "0.1.0"\nrole = "{}"')
PROGRAM = '\n[permissions.executables]\nallow = ["{}"]\n'
DENIED = 'profile = "python3"\nallow = ["{}"]'


def role(name: str) -> tuple[str, str]:
    return ROLE[0], ROLE[1].format(name)


def call(name: str) -> tuple[str, str]:
    return 'profile = "python3"', DENIED.format(name)


def read(path: str) -> tuple[str, str]:
    return 'read = ["/srv/docs"]', f'read = ["{path}"]'


# The manifest, and what of it is refused: the class of the first refusal, None where it runs.
SKILL = '\n[permissions.skills]\nallow = ["matrix://tool/mcp/fs/read@1.0"]\n'
CORPUS: dict[str, tuple[str, type[errors.CovenantError] | None]] = {
    "good": (kit.MANIFEST, None),
    "within its role": (kit.text(role("observer")), None),
    "a call": (kit.text(call("getcpu")), None),
    "a socket without a network": (kit.text(call("socket")), None),
    "a program": (kit.text(more=PROGRAM.format("/bin/sh")), None),
    "a program against its role": (
        kit.text(role("observer"), more=PROGRAM.format("/usr/bin/cat")),
        errors.RoleViolation,
    ),
    "memory against its role": (
        kit.text(role("observer"), ("memory_mb = 128", "memory_mb = 600")),
        errors.RoleViolation,
    ),
    "an unknown role": (kit.text(role("nobody")), errors.RoleViolation),
    "a denied call": (kit.text(call("ptrace")), errors.DenyListViolation),
    "an unknown call": (kit.text(call("no_such_call")), errors.UnknownSyscallError),
    "execve without a program": (kit.text(call("execve")), errors.SchemaViolation),
    "a path never granted": (kit.text(read("/root")), errors.NeverGrantableError),
    "a path of this host's state": (kit.text(read("/srv/state/x")), errors.NeverGrantableError),
    "a path that is not there": (kit.text(read("/srv/none")), errors.NotEnforceableError),
    "a program that is not there": (kit.text(more=PROGRAM.format("/usr/bin/none")), errors.NotEnforceableError),
    "an entry that is not there": (kit.text(('entry = "main.py"', 'entry = "other.py"')), errors.SchemaViolation),
    "more memory than there is": (kit.text(("memory_mb = 128", "memory_mb = 99999")), errors.ResourceViolation),
    "a skill": (kit.text(more=SKILL), errors.NotEnforceableError),
    "an unknown profile": (kit.text(('profile = "python3"', 'profile = "python4"')), errors.ManifestError),
}


def run(document: str) -> decide.Decision:
    known = signing_kit.verify(kit.signed(document))
    manifest = decide.manifest_of(known.package)
    return decide.authorise(known, manifest, host=HOST, now_ms=kit.NOW, extra_never=NEVER)


@pytest.mark.parametrize("name", CORPUS)
def test_run_and_check_agree(name: str) -> None:
    document, expected = CORPUS[name]
    package = kit.signed(document)
    manifest = decide.manifest_of(package)
    judged = decide.judged(package, manifest, HOST, extra_never=NEVER)
    if expected is None:
        assert judged == ()
        assert run(document).refusals == ()
        return
    with pytest.raises(expected) as refused:
        run(document)
    assert type(refused.value) is expected
    assert (type(judged[0]), str(judged[0]), judged[0].hint) == (expected, str(refused.value), refused.value.hint)


@pytest.mark.parametrize("name", [name for name, (_, expected) in CORPUS.items() if expected is None])
def test_why_and_run_see_the_same_policy(name: str) -> None:
    package = kit.signed(CORPUS[name][0])
    manifest = decide.manifest_of(package)
    looked = decide.compile_unsigned(package, manifest, host=HOST, extra_never=NEVER)
    ran = run(CORPUS[name][0])
    assert looked.policy_digest == ran.policy_digest
    seen = [sight.of(one.artefacts, manifest, files=package.files, host=HOST, never=NEVER) for one in (looked, ran)]
    for denial in (Denial("exec", "/bin/sh", "not_granted"), Denial("path", "/srv/other", "not_granted")):
        # The agent's own file explains by the decision of the run, `covenant denials` by a look at the package.
        assert denied.explain(denial, seen[0]) == denied.explain(denial, seen[1])


def test_role_that_refuses_is_not_said_to_allow() -> None:
    """A role without programs allowed the call execve, and so was said to allow the program."""
    manifest = kit.manifest(role("observer"))
    seen = sight.of(run(kit.text(role("observer"))).artefacts, manifest, files=(), host=HOST, never={})
    for target in ("/usr/bin/cat", "/bin/sh"):
        answer = denied.explain(Denial("exec", target, "not_granted"), seen).answer
        assert answer is not None
        assert answer.bounds == {"role `observer`": False}
        with pytest.raises(errors.RoleViolation):
            run(kit.text(role("observer"), more=PROGRAM.format(target)))
    reading = denied.explain(Denial("path", "/srv/other", "not_granted"), seen).answer
    assert reading is not None
    assert reading.bounds == {"role `observer`": True}
    assert run(kit.text(role("observer"), read("/srv/other"))).refusals == ()
