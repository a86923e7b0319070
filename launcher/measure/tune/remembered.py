"""The layout measured best, as `plan` and `status` report it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from launcher.base.errors import LauncherError, reason
from launcher.base.files import make_folder, replace_file
from launcher.measure.tune.identity import Fingerprint, differences
from launcher.measure.tune.model import Layout


class BestLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of one tuning run."""

    layout: Layout
    """The winner's."""
    label: str
    """As people read it: "interleaved × 4, 2 cores reserved"."""
    different: bool
    """False: no layout differed from the default."""
    ratio_to_default: float | None
    interval: tuple[float, float] | None
    """Of the ratio, at 95 %."""
    measured_at: str
    """ISO 8601 with the zone."""
    workload: str
    slo: dict[str, float]
    run: str
    """ID of the tuning run: its folder beside this file."""
    cpus: tuple[str, ...]
    """Cpu list of each slot: two layouts that place the same cpus are the same on this machine."""
    fingerprint: Fingerprint
    """The engine and the model that it was measured with."""
    configured: Fingerprint | None = None
    """The configuration that was tuned, where the winner runs another stack."""


class MeasuredLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The remembered verdict beside the deployment in force."""

    text: str
    """One line for people."""
    layout: dict[str, Any]
    """What was measured best: `strategy`, `instances_per_socket`, `reserve_cores`, `span_nodes`, and where they were
    tuned `max_num_seqs` and `max_num_batched_tokens`."""
    measured_at: str
    """ISO 8601 with the zone."""
    workload: str
    """Name of the workload."""
    different: bool
    """Whether it differs from the default layout by more than chance."""
    ratio_to_default: float | None
    """Its score over the default layout's; null where that was not measured."""
    interval: tuple[float, float] | None
    """95 % confidence interval of the ratio."""
    in_use: bool
    """Whether the layout in force is the measured one."""
    stale: tuple[str, ...]
    """What has changed since, in words; empty while the measurement holds."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one served model."""

    max_num_seqs: int
    max_num_batched_tokens: int | None


def cpus_of(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """`BestLayout.cpus` of a plan in the form of `plan --json`."""
    return tuple(slot["cpus"] for slot in plan["slots"])


def choose(remembered: Iterable[BestLayout], now: Fingerprint) -> BestLayout | None:
    """The verdict for the models served now, else the latest of others; None without any."""
    paths = _paths(now)
    latest = sorted(remembered, key=lambda best: best.measured_at, reverse=True)
    same = (best for best in latest if paths in (_paths(best.fingerprint), _paths(best.configured)))
    return next(same, latest[0] if latest else None)


def as_seen_by(now: Fingerprint, best: BestLayout) -> tuple[BestLayout, tuple[str, ...]]:
    """The verdict, and what has changed since. Once the stack that won is configured, it is the configured one."""
    if best.configured is None:
        return best, differences(best.fingerprint, now)
    if _stack_of(now) != _stack_of(best.fingerprint):
        return best, differences(best.configured, now)
    won = msgspec.structs.replace(best, layout=msgspec.structs.replace(best.layout, stack=None))
    return won, differences(best.fingerprint, now)


def _stack_of(fingerprint: Fingerprint) -> tuple[str, bool]:
    """The engine without its image, of which each build is another, and whether with ZenTorch."""
    engine, _, _ = fingerprint.software.engine.partition(" in image ")
    return engine, fingerprint.software.zentorch is not None


def judge(
    best: BestLayout, now: Fingerprint, cpus: Sequence[str], limits: Iterable[Limits]
) -> MeasuredLayout:
    """Compare a verdict with the machine and the layout of today: cpu list of each slot, limits of each model."""
    best, changed = as_seen_by(now, best)
    same_cpus = best.cpus == tuple(cpus)
    # `tune` names a stack only if it is another than the configured one.
    in_use = same_cpus and best.layout.stack is None and all(_has_limits(its, best.layout) for its in limits)
    layout = {key: value for key, value in msgspec.to_builtins(best.layout).items() if value is not None}
    return MeasuredLayout(
        text=_sentence(best, changed, in_use=in_use), layout=layout, measured_at=best.measured_at,
        workload=best.workload, different=best.different, ratio_to_default=best.ratio_to_default,
        interval=best.interval, in_use=in_use, stale=changed,
    )  # fmt: skip


def _has_limits(limits: Limits, layout: Layout) -> bool:
    return (
        layout.max_num_seqs in {None, limits.max_num_seqs}
        and layout.max_num_batched_tokens in {None, limits.max_num_batched_tokens}
    )  # fmt: skip


def _sentence(best: BestLayout, changed: Sequence[str], *, in_use: bool) -> str:
    date = best.measured_at[:10]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        what = f"{'; '.join(changed[:3])}{more}"
        return f"layout measured here on {date} ({best.label}) is stale: {what}; run numa-launcher tune again"
    if not best.different:
        return f"layouts measured here on {date}: none differs from the default"
    gain = f", {ratio(best.ratio_to_default, best.interval)} × the default" if best.ratio_to_default else ""
    use = "" if in_use else f": {best.label}; not the layout in use: numa-launcher tune --apply"
    return f"layout measured best here on {date}{gain}{use}"


def ratio(value: float, interval: tuple[float, float] | None) -> str:
    """A ratio with its interval: 1.31 (1.27–1.36)."""
    return f"{value:.2f}" if interval is None else f"{value:.2f} ({interval[0]:.2f}–{interval[1]:.2f})"


# --- tuning/best.json in the state folder: the layouts measured best, one for each set of models. ---

VERSION: Final = 1
# A verdict has 2 KiB; more than this is not our file.
MAX_BYTES: Final = 4 * 1024**2


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    layouts: tuple[BestLayout, ...]


def best_file(state: Path) -> Path:
    return state / "tuning" / "best.json"


def remember(state: Path, best: BestLayout) -> Path:
    """Add a verdict; it replaces the one for the same models. Raises LauncherError."""
    file = best_file(state)
    others = (it for it in recall(state) if _tuned(it) != _tuned(best))
    body = msgspec.json.format(msgspec.json.encode(_File(version=VERSION, layouts=(*others, best))), indent=1)
    make_folder(file.parent)
    try:
        replace_file(file, body + b"\n", mode=0o644, folder_mode=0o755)
    except OSError as error:
        raise LauncherError(
            f"cannot remember the measured layout in '{file}': {reason(error)}",
            "free disk space, or name another folder with --state-dir DIR; the verdict above holds",
        ) from None
    return file


def recall(state: Path) -> tuple[BestLayout, ...]:
    """The verdicts; none without a readable file of this version. A measurement that cannot be read is no error:
    nothing but a line of `plan` and `status` depends on it."""
    try:
        with best_file(state).open("rb") as stream:
            data = stream.read(MAX_BYTES)
        found = msgspec.json.decode(data, type=_File)
    except (OSError, msgspec.MsgspecError):
        return ()
    return found.layouts if found.version == VERSION else ()


def _tuned(best: BestLayout) -> list[str] | None:
    return _paths(best.configured or best.fingerprint)


def _paths(fingerprint: Fingerprint | None) -> list[str] | None:
    return None if fingerprint is None else [model.path for model in fingerprint.models]
