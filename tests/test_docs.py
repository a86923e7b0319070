"""README, CHANGELOG and docs/: every link leads somewhere, and every path that a page names exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from support.source_tree import anchors

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]+)?\)")
PATH = re.compile(r"`((?:launcher|tests|scripts|docs|configs|systemd)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor[1:] in anchors(file), f"{page.name} links to {target}{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    for path in PATH.findall(page.read_text(encoding="utf-8")):
        if "NAME" not in path:
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT).as_posix() for page in PAGES[1:]]
    assert [page for page in pages if f"({page})" not in text] == []


def test_each_error_is_made_in_the_file_that_the_table_names() -> None:
    text = (ROOT / "docs" / "routes-and-errors.md").read_text(encoding="utf-8")
    table = text[text.index("## Errors") : text.index("### Retry-After")]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) > 15
    for status, _, _, where in rows:
        files = re.findall(r"`([a-z0-9_/]+\.py)`", where)
        sources = "".join(
            (ROOT / file if file.startswith("launcher/") else ROOT / "launcher" / "proxy" / file).read_text()
            for file in files
        )
        for code in re.findall(r"`([a-z_]+)`", status):
            assert code in sources, f"{code} is not in {files}"


def test_settings_exist() -> None:
    known = set(
        re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "configuration.md").read_text(), flags=re.MULTILINE)
    )
    for page in PAGES:
        if page.name in {
            "control-protocol.md",
            "bench.md",
            "tuning.md",
            "audit.md",
            "history.md",
        }:  # they name JSON fields
            continue
        named = re.findall(
            r"`(?:\w+\.)?(?!numa_launcher_)([a-z]\w+_(?:s|requests))`", page.read_text(encoding="utf-8")
        )
        assert set(named) <= known, f"{page.name} names a setting that does not exist"


def test_modules_of_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = (path for folder in ("launcher", "tests") for path in (ROOT / folder).rglob("*.py"))
    files = [f"/{path.relative_to(ROOT)}" for path in paths]
    for module in re.findall(r"(?:`|^)((?:\w+/)*\w+\.py)\b", text, flags=re.MULTILINE):
        if "NAME" not in module:
            assert any(file.endswith(f"/{module}") for file in files), module


def test_amds_figures_are_the_published_ones() -> None:
    published = tomllib.loads(
        (ROOT / "launcher" / "measure" / "bench" / "published.toml").read_text(encoding="utf-8")
    )
    several, one = (
        {row["model"]: row["total_tokens_per_s"] for row in source["results"]}
        for source in published["sources"][:2]
    )
    ratios = {row["model"]: row["ratio"] for row in published["ratios"][0]["results"]}
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for model, ratio in ratios.items():
        row = (
            f"| {model} | {several[model]:,} | {one[model]:,} | {several[model] / one[model]:.2f} | {ratio} |"
        )
        assert row in text
