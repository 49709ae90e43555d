"""Check this machine, and that Covenant is installed on it as an operator would: a control for all later tests."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

from vagrant.tests import kit


def test_pure_cgroup_v2_under_systemd(host: Any) -> None:
    assert host.check_output("ps -p 1 -o comm=") == "systemd"
    assert host.check_output("stat -fc %T /sys/fs/cgroup") == "cgroup2fs"
    assert [line for line in host.file("/proc/mounts").content_string.splitlines() if " cgroup " in line] == []
    # A stock machine: nothing is switched on for us beforehand.
    assert {"cpu", "io", "memory", "pids"} <= set(host.file("/sys/fs/cgroup/cgroup.controllers").content_string.split())


def test_installed_command_is_that_of_package(host: Any) -> None:
    assert host.file("/usr/bin/covenant").linked_to == "/opt/covenant/bin/covenant"
    found = host.check_output("cd / && /opt/covenant/bin/python -I -c 'import covenant; print(covenant.__file__)'")
    assert found.startswith("/opt/covenant/lib/")
    config = host.file("/etc/covenant/config.toml")
    assert (config.user, config.mode) == ("root", 0o644)
    assert host.user("covenant-agent").shell == "/usr/sbin/nologin"


def test_doctor_is_green(operator: Any) -> None:
    document = json.loads(operator.covenant("doctor", "--json"))
    for check in document["checks"]:
        print(f"{check['status']:<9} {check['name']:<20} {check['found']}")
    assert document["enforceable"] is True
    assert [check for check in document["checks"] if check["required"] and check["status"] != "ok"] == []
    by_name = {check["name"]: check["found"] for check in document["checks"]}
    assert by_name["cgroup limits"].startswith("cgroup v2")


def test_signed_agent_of_repository_runs_and_unsigned_one_does_not(
    operator: kit.Operator, tmp_path: pathlib.Path
) -> None:
    path = pathlib.Path(shutil.copytree(kit.CLONE / "agents/hello", tmp_path / "hello"))
    assert "unsigned" in operator.covenant("run", str(path), "hi", "--json", expect=1)
    operator.sign(path)
    document = json.loads(operator.covenant("run", str(path), "hi", "--json"))
    assert document["text"] == "Hello! You said: hi"
