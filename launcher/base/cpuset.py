"""CpuSet: a set of cpu (or node) ids in the kernel's list format.

Rule source: Documentation/admin-guide/kernel-parameters.rst, "cpu lists" - ids and inclusive ranges joined by commas,
each range optionally followed by ``:used/group`` (of every `group` ids take the first `used`). `format` writes what
the kernel writes ("%*pbl"): ascending, runs of two or more as ``a-b``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, Self

# The largest accepted id. The kernel's own NR_CPUS tops out at 8,192 on x86 and arm64;
# a list such as "0-4294967295" is a mistake and would exhaust memory.
MAX_ID: Final = 65_535
_RANGE: Final = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+)(?::(?P<used>\d+)/(?P<group>\d+))?)?", re.ASCII)


class CpuSet:
    """An immutable, ordered set of cpu ids. Also used for sets of NUMA node ids.

    Supports ``| & - <= in len iter bool ==`` and hashing, as frozenset does."""

    __slots__ = ("_ids", "_members")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._members: frozenset[int] = frozenset(ids)
        self._ids: tuple[int, ...] = tuple(sorted(self._members))
        if self._ids and (self._ids[0] < 0 or self._ids[-1] > MAX_ID):
            bad = self._ids[0] if self._ids[0] < 0 else self._ids[-1]
            raise ValueError(f"cpu id {bad} is outside 0-{MAX_ID}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the kernel's list format, e.g. ``0-3,8,16-31:1/2``. Empty text is the empty set.

        Raises ValueError naming the part that cannot be read."""
        text = text.strip()
        ids: set[int] = set()
        for part in text.split(",") if text else ():
            match = _RANGE.fullmatch(part.strip())
            if match is None:
                raise ValueError(f"{part.strip()!r} is not a cpu id or range in {text!r}")
            low = int(match["low"])
            high = low if match["high"] is None else int(match["high"])
            if high < low:
                raise ValueError(f"range {part.strip()!r} runs backwards in {text!r}")
            if high > MAX_ID:
                raise ValueError(f"cpu id {high} is outside 0-{MAX_ID} in {text!r}")
            if match["group"] is None:
                ids.update(range(low, high + 1))
                continue
            used, group = int(match["used"]), int(match["group"])
            if not 0 < used <= group:
                raise ValueError(f"stride of {part.strip()!r} must be used/group with 0 < used <= group")
            ids.update(i for i in range(low, high + 1) if (i - low) % group < used)
        return cls(ids)

    def format(self) -> str:
        """Write the kernel's list format; the inverse of `parse`."""
        parts: list[str] = []
        start = previous = -1
        for i in self._ids:
            if start >= 0 and i == previous + 1:
                previous = i
                continue
            if start >= 0:
                parts.append(f"{start}-{previous}" if previous > start else f"{start}")
            start = previous = i
        if start >= 0:
            parts.append(f"{start}-{previous}" if previous > start else f"{start}")
        return ",".join(parts)

    __str__ = format

    def __repr__(self) -> str:
        return f"CpuSet({self.format()!r})"

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, cpu: object) -> bool:
        return cpu in self._members

    def __eq__(self, other: object) -> bool:
        return self._members == other._members if isinstance(other, CpuSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._members)

    def __or__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._members | other._members)

    def __and__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._members & other._members)

    def __sub__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._members - other._members)

    def __le__(self, other: CpuSet) -> bool:
        return self._members <= other._members

    def isdisjoint(self, other: CpuSet) -> bool:
        return self._members.isdisjoint(other._members)

    @property
    def first(self) -> int:
        """The lowest id. Raises IndexError on the empty set."""
        return self._ids[0]
