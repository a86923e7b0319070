"""The values of a tuning run. The search is a function of them: history in, next visit or verdict out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import msgspec

from launcher.config.schema import Strategy

Stack = Literal["vllm", "zentorch", "llama.cpp"]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate changes in the configuration; the values are those of its keys. None: as configured."""

    strategy: Strategy
    instances_per_socket: int | Literal["auto"]
    reserve_cores: int | Literal["auto"]
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
    refines: int | None = None
    """Index of the layout that it refines; it is measured only if that layout is the best. None: a layout of the race."""
    plan: dict[str, Any]
    """As `plan --json`. Two layouts whose plans place the same cpus and memory are one candidate."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that is not measured: the planner refuses it, or other layouts come first."""

    layout: Layout | None
    """None: the configuration has no keys for it."""
    label: str
    cause: str


class Candidates(msgspec.Struct, frozen=True, kw_only=True):
    """What a search chooses from."""

    entered: list[Candidate]
    """The layouts of the race, the default first, then the refinements of each."""
    refused: list[LeftOut]
    left_out: list[LeftOut]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a search is to do. With the candidates and the history it decides every visit."""

    seed: int = 0
    budget_s: float | None = None
    """Time for all visits together; None: no limit."""
    slo: dict[str, float] = {}
    """Limits in seconds by name: "ttft_p99", "itl_p99"."""
    least_gain: float = 0.02
    """A gain below this is not called a difference. 2 %: starts of one layout are assumed to differ by about 1 %."""
    repeats: int | None = None
    """Measurements of each visit; None: chosen from the noise that was seen."""
    refine: bool = True
    start_s: float = 120.0
    """A start's time as long as none was measured."""
    measure_s: float = 30.0
    """One measurement's time as long as none was measured."""


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
    """Time of the start and the stop."""
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


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The best layout of the race against the default, in fresh visits that had no part in the choice."""

    candidate: int
    pairs: int
    """Visits of each of the two."""
    ratio: float
    interval: tuple[float, float]
    """95 %, Student's t over the pairs' log ratios."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `different` only when the interval of the fresh runs excludes 1 and the gain is worth naming."""

    winner: int | None
    """The faster of the two that were compared; the default where its own figures were best. None: no layout gave a
    figure."""
    different: bool
    ratio_to_default: float | None
    """1 where the winner is the default; None where the default gave no figure, or nothing was compared."""
    interval: tuple[float, float] | None
    comparison: Comparison | None
    standings: list[Standing]
    """The winner, then the others by score; those that break a limit behind those that break none."""
    complete: bool
    """False: the budget or the operator ended the search before its own end."""


# --- What the runner needs of a way to measure: a candidate that starts, and its measurements. ---


class NotStartedError(Exception):
    """The candidate did not become ready. The text is the cause."""


class MeasurementFailedError(Exception):
    """A repeat gave no figures. The text is the cause."""


class Session(Protocol):
    """A candidate that has started."""

    def measure(self, repeat: int, seed: int) -> Measurement:
        """Raises MeasurementFailedError."""

    def answers(self) -> list[str]:
        """Greedy answers to the same prompts (answers.py); empty where it cannot be asked. Raises
        MeasurementFailedError."""


class Visits(Protocol):
    def start(self, candidate: Candidate, visit: Visit) -> AbstractContextManager[Session]:
        """The candidate runs within the context; raises NotStartedError."""
