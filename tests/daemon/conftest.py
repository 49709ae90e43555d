"""Fixtures of the tests of the HTTP adapter."""

from __future__ import annotations

import pytest

from tests import http_kit


@pytest.fixture
def echo() -> http_kit.Echo:
    """Handlers that answer with what they are asked."""
    return http_kit.Echo()
