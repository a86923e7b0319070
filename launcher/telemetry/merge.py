"""Merge the instances' metrics pages into one: names kept (`vllm:` and all), labels added, counters that never fall.

Text in, text out, in Prometheus' exposition format 0.0.4. A `Merger` remembers the series of each source, so that a
page costs one dictionary look-up per line from the second time on, and a value that was never carried over a restart
is passed on as it was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?[ \t]+([-+]?(?:[0-9.]\S*|Inf|NaN))(?:[ \t]+-?[0-9]+)?[ \t\r]*"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created", "_info", "_gsum", "_gcount")
MAX_SERIES: Final = 50_000
"""Of one source; what comes beyond is left out, so that a page that invents labels can't eat the memory."""


class Page(Struct, frozen=True):
    """One source's metrics, and the labels that tell it from the others."""

    text: str
    labels: Mapping[str, str] = field(default_factory=dict)
    source: object = None
    """What the series belong to across restarts: a slot. None: the page's place among the pages."""
    generation: object = None  # the instance that wrote the page: the counters of another one start at 0


class _Family(Struct):
    help: str | None = None
    type: str | None = None
    kind: str = "untyped"
    lines: list[str] = field(default_factory=list)  # of the page that is being made


class _Series(Struct):
    family: _Family
    head: str  # name and labels as they go out, and a space
    grows: bool
    value: str = "0"  # as the source wrote it last
    line: str = ""  # as it goes out
    base: float = 0.0  # counted by earlier generations
    seen: int = 0  # the round that it was last in a page

    def take(self, value: str) -> bool:
        """A new value; a growing one that has fallen has restarted. False: not a number."""
        try:
            now = float(value)
        except ValueError:
            return False
        if self.grows and now < (before := float(self.value)):
            self.base += before
        self.value = value
        self.line = f"{self.head}{self.base + now!r}" if self.base else self.head + value
        return True

    def restart(self) -> None:
        """The next generation counts from 0; until then the sum stays."""
        last = float(self.value)
        if not math.isnan(last):
            self.base += last
        self.value, self.line = "0", f"{self.head}{self.base!r}"


class _Source(Struct):
    labels: Mapping[str, str]
    generation: object
    series: dict[str, _Series] = field(default_factory=dict)  # by name and labels as the source writes them


class Merger:
    """One page of many, again and again: each family once, its HELP and TYPE from the first page that had them.

    A source that was in an earlier page and is not in this one keeps its counters and histograms, so that sums over all
    never fall while an instance restarts; its gauges go. A sample that has one of the added labels already keeps its own
    as `exported_<label>`, as Prometheus does. Timestamps, and lines that are no samples, are left out.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._comments: dict[str, str] = {}  # HELP or TYPE line -> its family's name
        self._sources: dict[object, _Source] = {}
        self._round = 0
        self._place = 0

    def begin(self) -> None:
        """Begin a page: then `add` each source, and `end`."""
        self._round += 1
        self._place = 0
        for family in self._families.values():
            family.lines = []

    def add(self, page: Page) -> None:
        """One more source. Costs the most where its series are new: some 4 ms for a vLLM's page."""
        self._take(page, self._place if page.source is None else page.source)
        self._place += 1

    def end(self) -> str:
        for source in self._sources.values():
            for series in source.series.values():
                if series.seen != self._round and series.grows:
                    series.family.lines.append(series.line)
        return "".join(_format(name, family) for name, family in self._families.items())

    def _take(self, page: Page, key: object) -> None:
        # Under other labels it is another source, and the old one stands.
        place = (key, *sorted(page.labels.items()))
        source = self._sources.get(place)
        if source is None:
            source = self._sources[place] = _Source(dict(page.labels), page.generation)
        if source.generation != page.generation:
            self._restart(source, page.generation)
        current = ""
        known = source.series.get
        comment = self._comments.get
        turn = self._round
        for line in page.text.split("\n"):
            name, _, value = line.rpartition(" ")
            series = known(name)
            if series is None:
                if line[:1] == "#":
                    current = comment(line) or self._comment(line) or current
                    continue
                found = self._sample(line, source, current)
                if found is None:
                    continue
                series, value = found
            if series.seen == turn:
                continue  # a series comes once in a page
            if (series.value != value or not series.line) and not series.take(value):
                continue
            series.seen = turn
            series.family.lines.append(series.line)

    def _restart(self, source: _Source, generation: object) -> None:
        """Another generation: growing series continue from their sums, others are forgotten."""
        source.generation = generation
        source.series = {name: series for name, series in source.series.items() if series.grows}
        for series in source.series.values():
            series.restart()

    def _sample(self, line: str, source: _Source, current: str) -> tuple[_Series, str] | None:
        """Series and value of a line that is not known by its text: a new one, or oddly spaced."""
        found = _SAMPLE.fullmatch(line)
        if found is None:
            return None
        name, labels, value = found[1], found[2] or "", found[3]
        if labels == "{}":
            labels = ""
        series = source.series.get(name + labels)
        if series is None and len(source.series) < MAX_SERIES:
            family = self._families.setdefault(current if _belongs(name, current) else name, _Family())
            head = f"{name}{_with_labels(labels, source.labels)} "
            series = source.series[name + labels] = _Series(family, head, _grows(name, family.kind))
        return None if series is None else (series, value)

    def _comment(self, line: str) -> str | None:
        """Take a HELP or TYPE line; the family it begins."""
        words = line.split(None, 3)
        if len(words) < 3 or words[0] != "#" or words[1] not in {"HELP", "TYPE"}:
            return None
        family = self._families.setdefault(words[2], _Family())
        if words[1] == "HELP":
            family.help = family.help or line.rstrip("\r")
        elif family.type is None and len(words) == 4:
            family.type, family.kind = line.rstrip("\r"), words[3].strip()
        if len(self._comments) < MAX_SERIES:
            self._comments[line] = words[2]
        return words[2]


def _grows(name: str, kind: str) -> bool:
    """Whether a sample only rises within one generation."""
    match kind:
        case "counter":
            return not name.endswith("_created")
        case "histogram":
            return name.endswith(("_bucket", "_count", "_sum"))
        case "summary":
            return name.endswith(("_count", "_sum"))  # its quantiles go up and down
        case _:
            return kind == "untyped" and name.endswith("_total")


def _belongs(name: str, family: str) -> bool:
    return name == family or (name.startswith(family) and name[len(family) :] in _SUFFIXES and family != "")


def _with_labels(labels: str, added: Mapping[str, str]) -> str:
    if not added:
        return labels
    ours = ",".join(f'{name}="{_escape(value)}"' for name, value in added.items())
    inner = labels[1:-1].strip().rstrip(",")
    if not inner:
        return f"{{{ours}}}"
    if any(f"{name}=" in inner for name in added):
        own = _LABEL.findall(inner)
        inner = ",".join(f'{"exported_" + name if name in added else name}="{value}"' for name, value in own)
    return f"{{{ours},{inner}}}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _format(name: str, family: _Family) -> str:
    if not family.lines:
        return ""
    head = [line for line in (family.help, family.type or f"# TYPE {name} untyped") if line]
    return "\n".join([*head, *family.lines]) + "\n"
