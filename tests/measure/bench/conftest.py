"""Fixtures that several test files use."""

from __future__ import annotations

from support.bench_endpoint import endpoint  # noqa: F401  a fixture
