"""The pages with generated tables hold what their generator writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_pages_are_fresh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "docs_pages.py"), str(tmp_path)], check=True)
    assert {page.name for page in tmp_path.iterdir()} == {"architecture.md", "supervision.md"}
    for page in tmp_path.iterdir():
        assert (DOCS / page.name).read_text() == page.read_text(), f"{page.name} is stale: run scripts/docs"


def test_every_package_is_on_the_map() -> None:
    page = (DOCS / "architecture.md").read_text()
    for package in (ROOT / "launcher").iterdir():
        if (package / "__init__.py").exists():
            assert f"| `{package.name}`" in page, package.name
