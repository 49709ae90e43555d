"""The options of a workspace's overlay as the kernel shows them."""

from __future__ import annotations

import pytest

from sandbox.attest import workspace

LAYERS = {"lowerdir": "changes/mask:lower", "upperdir": "changes/upper", "workdir": "changes/work"}
SHOWN = ("rw", "lowerdir=changes/mask:lower", "upperdir=changes/upper", "workdir=changes/work", "redirect_dir=nofollow")
DEFAULTS = {"index": "off", "metacopy": "off", "nfs_export": "off", "redirect_dir": "off", "xino": "off"}


def found(*shown: str, **defaults: str) -> list[str]:
    return [what for _, what in workspace.options_found("/work", LAYERS, shown, {**DEFAULTS, **defaults})]


def test_options_of_start_are_no_drift() -> None:
    assert found(*SHOWN, "uuid=on") == []
    assert found(*SHOWN, "index=off", "metacopy=off", index="on", metacopy="on") == []


@pytest.mark.parametrize(
    ("option", "says"),
    [
        *((f"{key}=on", f"{key}=on") for key in ("metacopy", "index", "nfs_export", "xino", "redirect_dir")),
        *(
            ("redirect_dir=follow", "redirect_dir=follow"),
            ("userxattr", "userxattr="),
            ("verity=on", "verity=on"),
            ("volatile", "volatile="),
        ),
        *(("lowerdir=elsewhere", "lowerdir=elsewhere"), ("upperdir=/tmp", "upperdir=/tmp"), ("ro", "ro=")),
    ],
)
def test_option_of_another_value_is_drift(option: str, says: str) -> None:
    assert says in found(*SHOWN, option)


@pytest.mark.parametrize("key", ["metacopy", "index", "xino"])
def test_option_that_is_not_shown_has_value_of_module(key: str) -> None:
    assert found(*SHOWN, **{key: "on"}) == [f"{key}=on"]


def test_missing_layer_is_drift() -> None:
    assert found(*SHOWN[:2], *SHOWN[3:]) == ["upperdir="]
