"""Bars with spreads, as SVG that reads on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

Bar = tuple[str, float, float, float]  # name, median, least, most

WIDTH: Final = 720
LEFT: Final = 130
ROW: Final = 24
RIGHT: Final = 110
OURS: Final = "#d9480f"
OTHERS: Final = "#748ffc"


def bars(charts: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """One chart below the other, each with its own scale."""
    parts, y = [], 10
    for title, rows in charts:
        top = max((most for *_, most in rows), default=1.0) or 1.0
        scale = (WIDTH - LEFT - RIGHT) / top
        parts.append(f'<text x="{LEFT}" y="{y + 16}" font-weight="bold">{escape(title)}</text>')
        y += 28
        for name, median, least, most in rows:
            colour = OURS if name.startswith("ours") else OTHERS
            middle = y + ROW // 2
            parts += [
                f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{LEFT}" y="{y + 4}" width="{median * scale:.1f}" height="{ROW - 8}" fill="{colour}"/>',
                (
                    f'<line x1="{LEFT + least * scale:.1f}" x2="{LEFT + most * scale:.1f}" y1="{middle}" '
                    f'y2="{middle}" stroke="currentColor" stroke-width="2"/>'
                ),
                f'<text x="{LEFT + most * scale + 8:.1f}" y="{middle + 4}">{median:.1f}</text>',
            ]
            y += ROW
        y += 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" '
        'font-size="13" fill="currentColor" color="#868e96">\n' + "\n".join(parts) + "\n</svg>\n"
    )
