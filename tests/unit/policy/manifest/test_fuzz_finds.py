"""Keep as tests the faults that fuzzing the author's text found (tests/fuzz)."""

from __future__ import annotations

import pytest

from policy import errors
from policy.grants.network import Network
from policy.grants.paths import PathSet
from policy.manifest import parse

DIGEST = "0123456789abcdef" * 4
HEAD = '[agent]\nid = "a"\nname = "a"\nversion = "1"\nruntime = "python3"\nentry = "main.py"\n'


@pytest.mark.parametrize("path", [f"/usr/bin/cat@sha256:{DIGEST}", "/usr/bin/cat@SHA1:ab", "/usr/bin/cat@sha256:"])
def test_pinned_path_holds_no_second_digest(path: str) -> None:
    """`PATH@sha256:A@sha256:B` was read as a file named `PATH@sha256:A`: one text, two readings."""
    text = f'{HEAD}[permissions.executables]\nallow = ["{path}@sha256:{DIGEST}"]\n'
    with pytest.raises(errors.ManifestError) as refused:
        parse.parse(text.encode())
    assert refused.value.code == "manifest_invalid"
    assert "digest" in refused.value.message


@pytest.mark.parametrize("bad", ["a\x1b[31m", "a\u202eb", "a\nb", "\ud800", "x" * 5000])
def test_what_grants_refuse_is_shown_without_steering_terminal(bad: str) -> None:
    """Roles, artefacts and `policy why` pass names to the grants that no manifest parser has checked."""
    refusals = []
    for make in (
        lambda: PathSet.of([bad]),
        lambda: Network.of([(bad, [(1, 1)], "tcp")]),
        lambda: Network.top().to_name("*" + bad),
        lambda: Network.top().to_address(bad),
    ):
        with pytest.raises(errors.ManifestError) as refused:
            make()
        refusals.append(refused.value.message)
    for message in refusals:
        assert message.isprintable()
        assert len(message) < 300
