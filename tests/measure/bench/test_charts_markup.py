from __future__ import annotations

from launcher.measure.bench.charts import Markup, joined, tag, text


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "<b>", tag("i", "&")) == "<p>&lt;b&gt;<i>&amp;</i></p>"
    assert joined("<", Markup("<br/>"), None) == "&lt;<br/>"


def test_attributes_are_escaped() -> None:
    assert tag("a", "x", href='" onclick="y') == '<a href="&quot; onclick=&quot;y">x</a>'
    assert tag("a", "x", title="it's") == '<a title="it&#x27;s">x</a>'


def test_names_and_values_of_attributes() -> None:
    assert tag("text", "x", class_="axis", text_anchor="end", x=1.5, y=2, hidden=None) == (
        '<text class="axis" text-anchor="end" x="1.5" y="2">x</text>'
    )


def test_empty_elements_are_closed() -> None:
    assert tag("line", x1=0, x2=0.1 + 0.2) == '<line x1="0" x2="0.3"/>'
    assert tag("td") == "<td></td>"


def test_invisible_and_bidirectional_characters_are_shown() -> None:
    assert text("a\u202eb\x00") == "a\\u202eb\\x00"
