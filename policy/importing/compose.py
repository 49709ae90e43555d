"""One service of Docker compose, in the form that `docker compose config --format json` prints.

That command reads the YAML itself: it resolves variables, anchors, `extends` and short forms. So no YAML is parsed
here, and no alias is expanded.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from policy.importing import container, documents
from policy.importing.container import Container, Said
from policy.importing.documents import Document
from policy.importing.vocabulary import Context, Draft, malformed, shown

_HINT: Final = "docker compose config --format json > compose.json, and give that file"
_DANGEROUS: Final = (
    *("cap_add", "cgroup", "cgroup_parent", "device_cgroup_rules", "devices", "gpus", "group_add", "ipc", "pid"),
    *("privileged", "runtime", "security_opt", "sysctls", "userns_mode", "uts", "volumes_from"),
)
_ALWAYS: Final = frozenset({"cap_drop", "container_name", "hostname", "init", "labels", "restart", "stdin_open", "tty"})
_TAKEN: Final = frozenset(
    {"image", "command", "entrypoint", "environment", "volumes", "tmpfs", "ports", "mem_limit", "cpus", "pids_limit"}
    | {"networks", "network_mode", "read_only", "user", "deploy"}
)
_NEW_PRIVILEGES: Final = "no-new-privileges"


def read(raw: bytes, context: Context) -> Draft:
    """Read the one service of a project, or the one that has the agent's id as its name.

    Raises:
        errors.ImportSourceError: it is no JSON of compose, has several services, or a limit that cannot be held.
    """
    if not documents.decoded(raw).lstrip().startswith("{"):
        raise malformed("the source is no JSON", where=documents.FILE, hint=_HINT)
    document = documents.json_object(raw, decimals=True)
    services = documents.table(document, "services", "services")
    if not services:
        raise malformed("the source has no service", where="services", hint=_HINT)
    if len(services) > 1 and context.agent_id not in services:
        names = ", ".join(shown(name) for name in list(services)[:16])
        raise malformed(f"the source has {len(services)} services: {names}", where="services", hint="choose by --id")
    name = context.agent_id if context.agent_id in services else next(iter(services))
    service = documents.table(services, name, f"services.{name}")
    # Compose writes a dollar sign of a value as two.
    return container.drafted(_container(service), context, expands="$")


def _container(service: Document) -> Container:
    found = Container(read_only=documents.flag(service, "read_only", "read_only"))
    if image := documents.word(service, "image", "image"):
        found.image = Said("image", image)
    found.command, found.entrypoint = (_words(service, key) for key in ("command", "entrypoint"))
    found.volumes, mounted = _volumes(service)
    found.tmpfs = [*mounted, *(Said(*one) for one in _strings(service, "tmpfs"))]
    found.variables = _names(service, "environment")
    found.ports = [Said("ports", str(one)) for one in _items(service, "ports")]
    _limits(found, service)
    _network(found, service)
    for key in _DANGEROUS:
        words = [one for one in _items(service, key) if not str(one).startswith(_NEW_PRIVILEGES)]
        found.dangers += [Said(key, f"{key} {one}") for one in words]
    found.others = [Said(place, place) for place in documents.others(service, _TAKEN | _ALWAYS | set(_DANGEROUS))]
    return found


def _words(service: Document, key: str) -> list[str]:
    value = service.get(key)
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as e:
            raise malformed(f"`{key}` cannot be split: {e}", where=key, hint=_HINT) from None
    return [word for _, word in documents.strings(service, key, key)]


def _strings(service: Document, key: str) -> list[tuple[str, str]]:
    value = service.get(key)
    return [(key, value)] if isinstance(value, str) else documents.strings(service, key, key)


def _items(service: Document, key: str) -> list[Any]:
    """Return what a key holds as a list: nothing where it is absent, empty or false."""
    value = service.get(key)
    if isinstance(value, list):
        return value
    return [] if value in (None, False, "", {}) else [value]


def _names(service: Document, key: str) -> list[Said]:
    value = service.get(key)
    if isinstance(value, Mapping):
        return [Said(key, name) for name in value]
    return [Said(place, word) for place, word in documents.strings(service, key, key)]


def _volumes(service: Document) -> tuple[list[Said], list[Said]]:
    """Return the volumes and the tmpfs mounts, in the short form."""
    volumes, mounts = list[Said](), list[Said]()
    for index, one in enumerate(_items(service, "volumes")):
        place = f"volumes[{index}]"
        if isinstance(one, str):
            volumes.append(Said(place, one))
            continue
        if not isinstance(one, dict):
            raise malformed(f"`{place}` is no volume", where=place, hint=_HINT)
        kind, target = documents.word(one, "type", place), documents.word(one, "target", place)
        if kind == "tmpfs":
            size = documents.table(one, "tmpfs", place).get("size")
            mounts.append(Said(place, f"{target}:size={size}" if size else target))
            continue
        options = ["ro"] if documents.flag(one, "read_only", place) else []
        # Only a bind without further words is known: `create_host_path` and `selinux` change no right.
        odd = [key for key in documents.table(one, "bind", place) if key not in ("create_host_path", "selinux")]
        extra = [key for key in one if key not in ("type", "source", "target", "read_only", "bind", "volume")]
        source = documents.word(one, "source", place)
        volumes.append(Said(place, f"{source}:{target}:{','.join([*options, *odd, *extra])}"))
    return volumes, mounts


def _limits(found: Container, service: Document) -> None:
    limits = documents.table(
        documents.table(documents.table(service, "deploy", "deploy"), "resources", "deploy.resources"),
        "limits",
        "deploy.resources.limits",
    )
    for place, value in (("mem_limit", service.get("mem_limit")), ("deploy.memory", limits.get("memory"))):
        if value not in (None, ""):
            found.memory.append(Said(place, str(value)))
    for place, value in (("deploy.cpus", limits.get("cpus")), ("cpus", service.get("cpus"))):
        if value not in (None, ""):
            found.cpus.append(Said(place, str(value)))
    for place, value in (("deploy.pids", limits.get("pids")), ("pids_limit", service.get("pids_limit"))):
        if value not in (None, ""):
            found.pids.append(Said(place, str(value)))


def _network(found: Container, service: Document) -> None:
    mode = documents.word(service, "network_mode", "network_mode")
    if mode:
        found.networks.append(Said("network_mode", "host" if mode.startswith("service:") else mode))
    found.networks += _names(service, "networks")
