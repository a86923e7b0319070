"""What must be the same when a run is resumed, as flat names and values, and how two of them differ. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from launcher.errors import RefusedError

# Values that may be secrets: only whether they differ is kept.
_SECRET: Final = ("configuration.engine.env.",)
_MOST_SHOWN: Final = 3


def identity_of(parts: Mapping[str, Any]) -> dict[str, str]:
    """Flat: {"configuration.layout.strategy": '"interleaved"', ...} from plain values."""
    return {name: _digest(value) if name.startswith(_SECRET) else value for name, value in _flat("", parts)}


def refuse_changes(run: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises RefusedError that names what has changed."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return
    shown = [
        f"{name}: {before.get(name, 'not set')}, now {now.get(name, 'not set')}"
        for name in names[:_MOST_SHOWN]
    ]
    more = [f"{len(names) - _MOST_SHOWN} more"] * (len(names) > _MOST_SHOWN)
    raise RefusedError(
        f"cannot resume '{run}': it was begun with other values: {'; '.join([*shown, *more])}",
        "undo the changes, or begin a new run without --resume",
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner)
    elif value is not None:
        yield name, json.dumps(value)


def _digest(value: str) -> str:
    return f"sha256 {hashlib.sha256(value.encode()).hexdigest()[:12]}"
