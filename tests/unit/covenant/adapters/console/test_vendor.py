"""The vendored modules of the console are those of locks/console.json, unchanged since scripts/vendor_console."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[5]
VENDOR = ROOT / "covenant/adapters/console/static/vendor"
LOCK = json.loads((ROOT / "locks/console.json").read_bytes())["packages"]
MADE = json.loads((VENDOR / "vendor.json").read_bytes())
LICENSES = {"MIT", "Apache-2.0"}


def test_files_have_their_digests_and_no_others() -> None:
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    known = {name: one["sha256"] for name, one in MADE["files"].items()}
    assert {name: digests[name] for name in known} == known
    assert digests.keys() - known.keys() == {"vendor.json", "LICENSES.txt"}


def test_packages_are_those_of_the_lock() -> None:
    locked = {name.removeprefix("node_modules/"): one for name, one in LOCK.items() if name}
    assert locked.keys() == MADE["packages"].keys() == LOCK[""]["dependencies"].keys()
    for name, one in MADE["packages"].items():
        assert {key: locked[name][key] for key in one} == one
        assert one["version"] == LOCK[""]["dependencies"][name]
        assert one["integrity"].startswith("sha512-")
        assert one["license"] in LICENSES
    assert "://" not in (ROOT / "locks/console.json").read_text()


def test_licenses_are_shipped() -> None:
    text = (VENDOR / "LICENSES.txt").read_text()
    for name, one in MADE["packages"].items():
        assert f"{name} {one['version']} ({one['license']})" in text


def test_modules_import_only_files_beside_them() -> None:
    for path in VENDOR.glob("*.js"):
        text = path.read_text()
        names = re.findall(r'(?:from|import)\s*"([^"\s]+)"', text)
        assert all((VENDOR / name).is_file() and name.startswith("./") for name in names), (path, names)
        assert "sourceMappingURL" not in text
