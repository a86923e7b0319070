"""The values of a tuning run. The search is a function of them: history in, next visit or verdict out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from launcher.config.schema import Strategy

Stack = Literal["vllm", "zentorch"]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate changes in the configuration. None: as configured."""

    strategy: Strategy
    instances_per_socket: int
    reserve_cores: int
    span_nodes: bool = False
    """An instance may span the NUMA nodes of its socket; needed for one instance per socket where NPS > 1."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    stack: Stack | None = None


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with the plan that it makes on this machine."""

    layout: Layout
    label: str
    """As people read it: "interleaved x 4, 2 cores reserved"."""
    is_default: bool = False
    plan: dict[str, Any]
    """As `plan --json`. Two layouts whose plans place the same cpus and memory are one candidate."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat of the workload. The keys of what `--measure COMMAND` prints."""

    output_tokens_per_s: float
    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None
    total_tokens_per_s: float | None = None
    goodput_per_s: float | None = None
    failed: int = 0


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one candidate, measured `repeats` times."""

    number: int
    candidate: int
    purpose: Literal["race", "refine", "confirm"]
    """refine: max_num_seqs and max_num_batched_tokens of the best layout. confirm: fresh runs of winner and default
    that had no part in the choice; the published ratio is theirs alone."""
    repeats: int


class VisitResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a visit gave. Without `measurements` the layout did not start (or every repeat failed): `cause` says why."""

    visit: Visit
    started_at: str
    start_s: float
    measure_s: float
    measurements: list[Measurement]
    cause: str | None = None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's row in the ranked table."""

    candidate: int
    score: float | None
    """Mean of its measurements: goodput with an SLO where it is measured, else output tokens a second."""
    interval: tuple[float, float] | None
    meets_slo: bool | None
    visits: int
    measurements: int
    left: str | None
    """Why it left the race: "slower than interleaved x 4", "did not start: ..."; None: it stayed."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `different` only when the interval of the fresh runs excludes 1 and the gain is worth naming."""

    winner: int
    different: bool
    ratio_to_default: float
    interval: tuple[float, float]
    standings: list[Standing]
    complete: bool
    """False: the budget or the operator ended the search before its own end."""
