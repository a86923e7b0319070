"""Fixtures that several test files use."""

from __future__ import annotations

from support.keys import path  # noqa: F401  a fixture
