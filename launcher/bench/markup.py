"""HTML and SVG elements from values. Every text is escaped; only `Markup` is taken as it is. Pure."""

from __future__ import annotations

from html import escape
from typing import Final

from launcher.printable import printable

_VOID: Final = frozenset({"meta", "img", "br", "rect", "line", "circle", "path"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Content = str | None


def tag(name: str, /, *content: Content, **attributes: str | float | None) -> Markup:
    """`<name attribute="value">content</name>`. An attribute that is None is left out.

    In attributes' names `_` stands for `-`, and one at the end is dropped: `class_`, `text_anchor`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not content:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    return Markup(
        "".join(each if isinstance(each, Markup) else text(each) for each in content if each is not None)
    )


def text(value: str) -> Markup:
    """Escaped for content and for quoted attributes, without invisible and bidirectional characters."""
    return Markup(escape(printable(value), quote=True))


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
