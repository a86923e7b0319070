"""Sums of budgets as a daemon finds and stores them, in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

Words = tuple[str, ...]


@dataclass
class StoredSums:
    """`found` is what was there when this daemon began, `now` what it stored."""

    found: dict[Words, tuple[int, int]] = field(default_factory=dict)
    now: dict[Words, tuple[int, int]] = field(default_factory=dict)

    def slot(self, *words: str) -> Slot:
        return Slot(self, words)

    def next(self) -> StoredSums:
        """As the next daemon finds them."""
        return StoredSums(found=dict(self.now), now=self.now)


@dataclass
class Slot:
    sums: StoredSums
    words: Words

    def amount(self, begin: int) -> int | None:
        found = self.sums.found.get(self.words)
        return found[1] if found is not None and found[0] == begin else None

    def store(self, begin: int, amount: int) -> None:
        self.sums.now[self.words] = begin, amount
