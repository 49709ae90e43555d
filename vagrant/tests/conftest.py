"""One operator for the whole suite: keys are made and trusted once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vagrant.tests import kit


@pytest.fixture(scope="session")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kit.Operator]:
    """Keys are made and trusted; after the last test nothing is left."""
    made = kit.Operator(tmp_path_factory.mktemp("packages"))
    made.covenant("keys", "new", "operator", "--no-passphrase")
    made.covenant("trust", "init", "--key", "operator")
    yield made
    assert kit.leftovers() == []
