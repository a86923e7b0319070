"""Programs and images that scripts/test keeps between runs, in the cache folder of the user who runs the tests."""

from __future__ import annotations

import os
from pathlib import Path

# Read before conftest.py gives the tests a home folder of their own.
HOME = Path.home()
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or HOME / ".cache")

TOOLS = _CACHE / "numa-launcher-tests"
NODE_CLIENTS = TOOLS / "clients"
HOST_IMAGES = _CACHE / "numa-launcher" / "virtual-host"
PIP_CACHE = Path(os.environ.get("PIP_CACHE_DIR") or _CACHE / "pip")
