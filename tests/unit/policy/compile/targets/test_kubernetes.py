"""The Kubernetes objects: legal by the published schemas, and each restriction where it belongs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from policy import errors
from policy.compile import cgroup
from policy.compile.targets import kubernetes
from policy.manifest import parse
from tests.unit.policy.compile import targets_kit as kit

ROOT = Path(__file__).parents[5]
CILIUM = json.loads((Path(__file__).parent / "cilium_schema.json").read_text())
# The oldest version of Kubernetes that keeps a scheduling gate, and the newest that the package knows.
VALIDATOR = jsonschema.Draft202012Validator(CILIUM)
VERSIONS = ("1.30", kubernetes_validate.latest_version())
MANIFESTS = {
    "least": kit.manifest(filesystem="read-only-package"),
    "hello": parse.parse((ROOT / "agents/hello/agent.toml").read_bytes()),
    "librarian": parse.parse((ROOT / "agents/librarian/agent.toml").read_bytes()),
    "entries": kit.manifest(network="full", more=kit.NETWORK),
    "https": kit.manifest(network="outbound-https-only"),
    "full": kit.manifest(network="full", resources="net_bps = 1000000"),
}


def objects(name: str, **order: Any) -> dict[str, Any]:
    """The three objects and the profile of a manifest, by short name."""
    files = kit.compiled("kubernetes", MANIFESTS[name], **order).files
    (profile,) = [key for key in files if key.startswith("covenant-")]
    return {
        "pod": json.loads(files["pod.json"]),
        "policy": json.loads(files["networkpolicy.json"]),
        "cilium": json.loads(files["ciliumnetworkpolicy.json"]),
        "profile": json.loads(files[profile]),
        "profile_name": profile,
    }


def container(name: str) -> dict[str, Any]:
    (one,) = objects(name)["pod"]["spec"]["containers"]
    assert isinstance(one, dict)
    return one


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_published_schemas_take_every_object_strictly(name: str, version: str) -> None:
    made = objects(name)
    for one in ("pod", "policy"):
        kubernetes_validate.validate(made[one], version, strict=True)
    VALIDATOR.validate(made["cilium"])


@pytest.mark.parametrize(
    ("one", "path", "value"),
    [
        ("pod", ("spec", "runtimeClas"), "gvisor"),
        ("pod", ("spec", "activeDeadlineSeconds"), "30"),
        ("policy", ("spec", "egres"), []),
    ],
)
def test_schemas_refuse_misspelt_key_and_wrong_type(one: str, path: tuple[str, str], value: Any) -> None:
    changed = copy.deepcopy(objects("entries")[one])
    changed[path[0]][path[1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(changed, VERSIONS[-1], strict=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [("toFQDN", []), ("toFQDNs", [{"matchName": "a b"}]), ("toPorts", [{"ports": [{"port": "70000"}]}])],
)
def test_model_of_cilium_policy_refuses_what_crd_refuses(key: str, value: Any) -> None:
    changed = copy.deepcopy(objects("entries")["cilium"])
    changed["spec"]["egress"].append({key: value})
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(changed)


def test_pod_runs_under_gvisor_as_nobody_with_nothing_shared() -> None:
    spec = objects("least")["pod"]["spec"]
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
    assert spec["hostNetwork"] is spec["hostPID"] is spec["hostIPC"] is spec["shareProcessNamespace"] is False
    assert [gate["name"] for gate in spec["schedulingGates"]] == [kubernetes.GATE]
    assert len(spec["containers"]) == 1
    assert "initContainers" not in spec
    held = container("least")["securityContext"]
    assert held["allowPrivilegeEscalation"] is held["privileged"] is False
    assert held["readOnlyRootFilesystem"] is held["runAsNonRoot"] is True
    assert held["runAsUser"] == held["runAsGroup"] == 65534
    assert held["capabilities"] == {"drop": ["ALL"]}


def test_pod_names_profile_written_beside_it() -> None:
    made = objects("hello")
    named = {"type": "Localhost", "localhostProfile": made["profile_name"]}
    assert container("hello")["securityContext"]["seccompProfile"] == named
    assert made["pod"]["spec"]["securityContext"]["seccompProfile"] == named
    assert made["profile"]["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {call for rule in made["profile"]["syscalls"] for call in rule["names"]}
    assert {"read", "openat"} <= allowed
    assert not {"execve", "execveat", "memfd_create", "ptrace"} & allowed


def test_no_volume_is_anything_but_memory_and_only_scratch_is_writable() -> None:
    for name, found in MANIFESTS.items():
        spec = objects(name)["pod"]["spec"]
        assert all(set(volume) == {"name", "emptyDir"} for volume in spec["volumes"])
        writable = [m["mountPath"] for m in container(name)["volumeMounts"] if not m["readOnly"]]
        wanted = [] if found.sandbox.filesystem == "read-only-package" else ["/tmp"]
        assert writable == wanted
        assert {m["mountPath"] for m in container(name)["volumeMounts"]} == {"/tmp", "/dev/shm"}
    volumes = {v["name"]: v["emptyDir"] for v in objects("entries")["pod"]["spec"]["volumes"]}
    assert volumes["scratch"] == {"medium": "Memory", "sizeLimit": "100Mi"}


def test_limits_are_those_of_manifest_and_memory_is_asked_for_in_full() -> None:
    found = kit.manifest(resources="memory_mb = 300\ndisk_mb = 7\npids_max = 9\ncpu_millis = 250\ncpu_weight = 5")
    (one,) = json.loads(kit.compiled("kubernetes", found).files["pod.json"])["spec"]["containers"]
    memory = f"{300 + 7 + cgroup.overhead_mb(9)}Mi"
    rest = {"memory": memory, "ephemeral-storage": "32Mi"}
    assert one["resources"] == {"limits": {"cpu": "250m", **rest}, "requests": {"cpu": "50m", **rest}}


@pytest.mark.parametrize(
    ("resources", "more", "seconds"),
    [
        ("cpu_ms_per_task = 30000", "", 30),
        ("cpu_ms_per_task = 1999", "", 1),
        ("cpu_ms_per_task = 900", "", 1),
        ("cpu_ms_per_task = 30000", "[lifetime]\nttl_seconds = 7", 7),
        ("cpu_ms_per_task = 3000", "[lifetime]\nttl_seconds = 7", 3),
    ],
)
def test_deadline_is_earlier_clock_in_whole_seconds_downwards(resources: str, more: str, seconds: int) -> None:
    found = kit.manifest(resources=resources, more=more)
    assert json.loads(kit.compiled("kubernetes", found).files["pod.json"])["spec"]["activeDeadlineSeconds"] == seconds


def test_without_network_nothing_is_open_and_no_resolver_is_named() -> None:
    made = objects("hello")
    assert made["policy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert made["policy"]["spec"]["ingress"] == made["policy"]["spec"]["egress"] == []
    assert made["cilium"]["spec"]["egressDeny"] == [{"toEntities": ["all"]}]
    assert "egress" not in made["cilium"]["spec"]
    assert made["pod"]["spec"]["dnsPolicy"] == "None"
    assert made["pod"]["spec"]["dnsConfig"] == {"nameservers": ["127.0.0.1"]}


def test_policies_select_by_label_that_only_this_policy_has() -> None:
    made, other = objects("entries"), objects("full")
    selector = {"covenant-supervisor/policy": made["pod"]["metadata"]["labels"]["covenant-supervisor/policy"]}
    assert made["policy"]["spec"]["podSelector"] == {"matchLabels": selector}
    assert made["cilium"]["spec"]["endpointSelector"] == {"matchLabels": selector}
    assert other["policy"]["spec"]["podSelector"] != made["policy"]["spec"]["podSelector"]
    # Applied beside an older version of the same agent, neither takes the other's place.
    assert other["policy"]["metadata"]["name"] != made["policy"]["metadata"]["name"]


def test_another_package_or_image_is_another_policy() -> None:
    label = "covenant-supervisor/policy"
    image = kit.IMAGE.replace("0123", "3210")
    made = [objects("hello"), objects("hello", package_digest="e" * 63 + "d"), objects("hello", image=image)]
    assert len({one["pod"]["metadata"]["labels"][label] for one in made}) == 3
    assert objects("hello") == made[0]


def test_dollar_in_entry_stays_dollar() -> None:
    found = kit.manifest(entry="$(HOME)/a$$b.py")
    (one,) = json.loads(kit.compiled("kubernetes", found).files["pod.json"])["spec"]["containers"]
    assert one["command"] == ["/usr/bin/python3", "$$(HOME)/a$$$$b.py"]


def test_bandwidth_is_asked_for_in_bits() -> None:
    annotations = objects("full")["pod"]["metadata"]["annotations"]
    assert annotations["kubernetes.io/egress-bandwidth"] == annotations["kubernetes.io/ingress-bandwidth"] == "8000000"
    assert not any("bandwidth" in key for key in objects("https")["pod"]["metadata"]["annotations"])


@pytest.mark.parametrize(
    "image",
    [
        "registry.example/agent:latest",
        "registry.example/agent",
        "registry.example/agent@sha256:" + "0" * 64,
        "registry.example/agent@sha256:" + "0123456789ABCDEF" * 4,
        "registry.example/agent@sha256:abc",
        "registry.example/agent@sha512:" + "0123456789abcdef" * 4,
        "@sha256:" + "0123456789abcdef" * 4,
        "a\n@sha256:" + "0123456789abcdef" * 4,
        "../a@sha256:" + "0123456789abcdef" * 4,
    ],
)
def test_image_not_pinned_is_refused(image: str) -> None:
    with pytest.raises(errors.UsageError):
        kit.compiled("kubernetes", MANIFESTS["hello"], image=image)


def test_image_pinned_is_taken_as_it_is() -> None:
    for image in (kit.IMAGE, "a@sha256:" + "0123456789abcdef" * 4, kit.IMAGE.replace("registry", "localhost:5000/x")):
        assert kubernetes.check_image(image) == image


def test_accepted_losses_stand_on_pod() -> None:
    accepted = kit.restrictions("kubernetes", MANIFESTS["hello"])
    annotations = objects("hello")["pod"]["metadata"]["annotations"]
    assert annotations["covenant-supervisor/accepted-losses"].split() == sorted(accepted)
