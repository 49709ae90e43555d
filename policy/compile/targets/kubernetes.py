"""Effective grants to Kubernetes objects: a Pod under gVisor, its policies, and its Localhost seccomp profile.

JSON throughout, which kubectl takes. The package is not mounted: the image, pinned by its digest, holds it at
/workspace beside the interpreter (docs/adr/0021-targets-and-their-losses.md says why, and what that loses). No host
path is ever mounted. What the target cannot hold is in policy/data/targets.toml.

The pod waits behind a scheduling gate until its operator has seen the policies in force: a NetworkPolicy that is
applied at the same time as its pod may come after the agent's first packet.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from policy import errors
from policy.compile import cgroup, oci, seccomp
from policy.compile.artefacts import canonical
from policy.compile.mounts import SCRATCH, WORKSPACE
from policy.compile.targets import cilium, loss
from policy.compile.targets.kubernetes_names import label, literal
from policy.compile.targets.limits import limit, scratch_mb
from policy.grants.effective import Effective
from policy.grants.sets import spans
from policy.manifest import text
from policy.manifest.agent import Manifest

RUNTIME_CLASS = "gvisor"
PREFIX = "covenant-supervisor"
GATE = f"{PREFIX}/policies-in-force"
# Where the image has the interpreters of decisions.md; rust-bin has none.
INTERPRETERS = {"python3": "/usr/bin/python3", "node": "/usr/bin/node", "rust-bin": ""}
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - of the pod: containerd puts a scratch there that disk_mb would not bound
_ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}
# What the container itself may lay down on the node's disk beside volumes: its log and nothing else.
_LOG_MIB = 32
_MIN_BANDWIDTH_BITS = 1000  # the plugin takes 1k to 1P
_REFERENCE = re.compile(r"[a-z0-9]+([._:/-]+[a-z0-9]+)*@sha256:[0-9a-f]{64}")
_IMAGE_CHARACTERS = 512


def check_image(image: str) -> str:
    """``image`` itself when it is a reference pinned by digest: ``REGISTRY/NAME@sha256:...``.

    Raises:
        errors.UsageError: it is something else; a tag can be moved to other bytes.
    """
    digest = image.rpartition(":")[2]
    if len(image) > _IMAGE_CHARACTERS or not _REFERENCE.fullmatch(image) or len(set(digest)) == 1:
        raise errors.UsageError(
            f"image {text.quote(image)} is not pinned by a digest", hint="--image REGISTRY/NAME@sha256:64-HEX-DIGITS"
        )
    return image


def compile(
    effective: Effective,
    manifest: Manifest,
    *,
    arch: str,
    package_digest: str,
    image: str,
    accepted: tuple[str, ...],
) -> dict[str, bytes]:
    """The files by name; ``image`` as ``check_image`` takes it, ``accepted`` the losses that were accepted.

    Raises:
        errors.NotEnforceableError: a limit that every manifest has is missing.
    """
    profile = canonical(
        seccomp.compile(effective.syscalls.names, arch=arch, network=effective.network.mode != "off").oci
    )
    profile_name = f"covenant-{hashlib.sha256(profile).hexdigest()[:16]}.json"
    # The one label that the policies select by: equal exactly for pods of the same package, grants, image and filter.
    decided = canonical([package_digest, effective.canonical(), image, profile_name])
    policy = hashlib.sha256(decided).hexdigest()
    selector = {f"{PREFIX}/policy": policy[:32]}
    # Not the agent's id alone: the policy of a newer package would take the place of the one that an older pod has.
    name = label(manifest.agent.id, policy)
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": PREFIX, **selector}
    annotations = {
        f"{PREFIX}/policy-digest": policy,
        f"{PREFIX}/package-digest": package_digest,
        f"{PREFIX}/accepted-losses": " ".join(accepted),
        **_bandwidth(effective),
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": _spec(effective, manifest, arch=arch, image=image, profile=profile_name),
    }
    return {
        "pod.json": canonical(pod),
        "networkpolicy.json": canonical(_network_policy(effective, name, labels, selector)),
        "ciliumnetworkpolicy.json": canonical(
            cilium.compile(effective, name=name, labels=labels, selector=selector),
        ),
        profile_name: profile,
    }


def _spec(effective: Effective, manifest: Manifest, *, arch: str, image: str, profile: str) -> dict[str, Any]:
    # hostUsers is left out: runsc does not say that it supports user namespaces of pods, and the kubelet refuses a
    # pod that wants them of such a runtime. gVisor's own kernel is what uids of the agent exist in.
    return {
        "runtimeClassName": RUNTIME_CLASS,
        "schedulingGates": [{"name": GATE}],
        "nodeSelector": {"kubernetes.io/os": "linux", "kubernetes.io/arch": _ARCHES[arch]},
        "restartPolicy": "Never",
        "activeDeadlineSeconds": max(1, loss.deadline_ms(effective) // 1000),
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostNetwork": False,
        "hostPID": False,
        "hostIPC": False,
        "shareProcessNamespace": False,
        "hostname": oci.HOSTNAME,
        **_resolver(effective),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": oci.TEMPLATE_UID,
            "runAsGroup": oci.TEMPLATE_UID,
            "seccompProfile": {"type": "Localhost", "localhostProfile": profile},
        },
        "containers": [_container(effective, manifest, image, profile)],
        "volumes": _volumes(effective),
    }


def _container(effective: Effective, manifest: Manifest, image: str, profile: str) -> dict[str, Any]:
    scratch = scratch_mb(effective) > 0
    environment = {
        "HOME": SCRATCH if scratch else WORKSPACE,
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        **({"TMPDIR": SCRATCH} if scratch else {}),
    }
    run_id = {"name": "COVENANT_RUN_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    amounts = _resources(effective)
    return {
        "name": oci.HOSTNAME,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [literal(word) for word in oci.arguments(manifest, INTERPRETERS[manifest.agent.runtime])],
        "workingDir": WORKSPACE,
        "env": [run_id, *({"name": name, "value": value} for name, value in environment.items())],
        # The contract of a run: the intent is one line of stdin, which ends with the one client that attached.
        "stdin": True,
        "stdinOnce": True,
        "tty": False,
        "resources": amounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": oci.TEMPLATE_UID,
            "runAsGroup": oci.TEMPLATE_UID,
            "procMount": "Default",
            "seccompProfile": {"type": "Localhost", "localhostProfile": profile},
        },
        "volumeMounts": [
            {"name": "scratch" if scratch else "empty", "mountPath": SCRATCH, "readOnly": not scratch},
            {"name": "empty", "mountPath": SHARED_MEMORY, "readOnly": True},
        ],
    }


def _resources(effective: Effective) -> dict[str, Any]:
    """Limits and requests. Memory is asked for in full, which also keeps swap from the pod."""
    memory = limit(effective, "memory_mb") + scratch_mb(effective)
    memory += cgroup.overhead_mb(limit(effective, "pids_max"))
    cpu = limit(effective, "cpu_millis")
    # The kubelet makes cpu.weight from the request, 1,000 thousandths being 1,024 shares, our weight of 100.
    asked = min(cpu, max(1, limit(effective, "cpu_weight") * 10))
    rest = {"memory": f"{memory}Mi", "ephemeral-storage": f"{_LOG_MIB}Mi"}
    return {"limits": {"cpu": f"{cpu}m", **rest}, "requests": {"cpu": f"{asked}m", **rest}}


def _volumes(effective: Effective) -> list[dict[str, Any]]:
    """Memory, never a path of the node; ``empty`` is only ever mounted read-only."""
    scratch = scratch_mb(effective)
    sizes = {"empty": "4Ki", **({"scratch": f"{scratch}Mi"} if scratch else {})}
    return [{"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}} for name, size in sizes.items()]


def _resolver(effective: Effective) -> dict[str, Any]:
    """The cluster's resolver for an agent that has names, without search domains before them; else none at all."""
    if effective.network.names:
        return {"dnsPolicy": "ClusterFirst", "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]}}
    return {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}


def _bandwidth(effective: Effective) -> dict[str, str]:
    """The annotations of the bandwidth plugin, in bits a second."""
    if effective.resources.net_bps is None:
        return {}
    bits = str(max(_MIN_BANDWIDTH_BITS, effective.resources.net_bps * 8))
    return {f"kubernetes.io/{way}-bandwidth": bits for way in ("egress", "ingress")}


def _network_policy(
    effective: Effective, name: str, labels: dict[str, str], selector: dict[str, str]
) -> dict[str, Any]:
    """Nothing in, and out only the addresses that are granted without TLS; names and TLS are Cilium's."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": _egress(effective),
        },
    }


def _egress(effective: Effective) -> list[dict[str, Any]]:
    names = {pattern for pattern, _ in effective.network.names}
    by_access: dict[tuple[str, spans.Spans], list[str]] = {}
    for entry in effective.network.entries:
        if entry.host not in names and entry.protocol != "tls":
            by_access.setdefault((entry.protocol.upper(), entry.ports), []).extend(cilium.cidrs(entry.host))
    return [
        {
            "to": [{"ipBlock": {"cidr": cidr}} for cidr in blocks],
            "ports": [
                {"protocol": protocol, "port": first, **({"endPort": last} if last > first else {})}
                for first, last in ports
            ],
        }
        for (protocol, ports), blocks in sorted(by_access.items())
    ]
