"""What `tune` prints: candidates and plan before, a line per visit, and the answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import msgspec
from msgspec import Struct

from launcher.base.text import counted, table
from launcher.measure.tune import remembered
from launcher.measure.tune.answers import compared
from launcher.measure.tune.model import (
    Candidate,
    Candidates,
    Layout,
    Measurement,
    Settings,
    Stack,
    Standing,
    Verdict,
    VisitResult,
)
from launcher.measure.tune.search import replay

# --- How long a search takes: before its first visit, and corrected by every one. ---


class Forecast(Struct, frozen=True):
    """The visits that may follow, at most: losers that leave early make the search shorter."""

    visits: int
    visit_s: float
    """One visit: a start and its measurements."""

    @property
    def seconds(self) -> float:
        return self.visits * self.visit_s


def forecast(history: Sequence[VisitResult], candidates: Sequence[Candidate], settings: Settings) -> Forecast:
    """From the last measured starts and measurements; before the first visit from the settings' assumptions."""
    search, step = replay(history, candidates, settings)
    allowance = search.allowance
    return Forecast(0 if isinstance(step, Verdict) else allowance.to_come, allowance.visit_s)


CoresOf = Callable[[dict[str, Any]], int]
"""Physical cores of a plan's instances."""
_ABSENT: Final = "-"
# Per cent. A wider interval says that too little was measured, and nothing of the layouts.
_WORTH_A_CLAIM: Final = 10


def opening(found: Candidates, forecast: Forecast, settings: Settings) -> list[str]:
    """Before the first visit."""
    race = [candidate for candidate in found.entered if candidate.refines is None]
    lines = [f"{counted(len(race), 'candidate')}:"]
    lines += [f"  {each.label}{' (default)' if each.is_default else ''}" for each in race]
    for title, left in (("refused", found.refused), ("not measured", found.left_out)):
        if left:
            lines += [f"{title}:", *(f"  {each.label}: {each.cause}" for each in left)]
    plan = f"plan: at most {counted(forecast.visits, 'visit')}, about {span(forecast.seconds)}"
    if not forecast.visits:
        return [*lines, "plan: nothing left to measure"]
    budget = "no budget" if settings.budget_s is None else f"budget {span(settings.budget_s)}"
    return [*lines, f"{plan}; {budget}"]


def visit_line(result: VisitResult, candidate: Candidate, left: Forecast) -> str:
    """One visit that has ended, and what is left."""
    text = f"visit {result.visit.number} ({result.visit.purpose}): {candidate.label}: "
    if result.measurements:
        rate = fmean(each.output_tokens_per_s for each in result.measurements)
        text += f"{rate:,.1f} output tokens/s ({counted(len(result.measurements), 'repeat')}"
        text += f", started in {span(result.start_s)})" if result.start_s >= 1 else ")"
    else:
        text += result.cause or "no figures"
    if not left.visits:
        return text
    return f"{text}; at most {counted(left.visits, 'visit')}, about {span(left.seconds)} left"


class Report:
    """The answer of a run."""

    def __init__(
        self,
        verdict: Verdict,
        candidates: Sequence[Candidate],
        history: Sequence[VisitResult],
        settings: Settings,
        cores_of: CoresOf,
        *,
        answers: Mapping[Stack, Sequence[str]],
    ) -> None:
        """`answers`: greedy ones by stack, where several were measured."""
        self._verdict = verdict
        self._candidates = candidates
        self._history = history
        self._settings = settings
        self._cores_of = cores_of
        # Those of the stack that the configuration runs come first.
        stacks = dict.fromkeys(candidate.layout.stack for candidate in candidates)
        self._answers: dict[str, Sequence[str]] = {
            stack: answers[stack] for stack in stacks if stack is not None and stack in answers
        }

    def lines(self, fragment: Callable[[Layout], str]) -> list[str]:
        """Table, tables of single and several instances, answers, TOML, sentence."""
        if not self._verdict.standings:
            return [self.sentence()]
        found = ["", *self._table()]
        single = self._single_and_several()
        found += ["", *table(single)] if len(single) > 1 else []
        differences = compared(self._answers)
        found += ["", *differences] if differences else []
        if self._verdict.different and self._verdict.winner is not None:
            found += ["", fragment(self._candidates[self._verdict.winner].layout).rstrip()]
        return [*found, "", self.sentence()]

    def sentence(self) -> str:
        """Claims what the interval of the fresh visits supports, and nothing else."""
        text = self._claim()
        broken = self._settings.slo and not any(each.meets_slo for each in self._verdict.standings)
        text += "; no layout meets the SLO" if broken else ""
        return text if self._verdict.complete else f"{text}; the search was cut short"

    def _claim(self) -> str:
        verdict, compared = self._verdict, self._verdict.comparison
        if verdict.winner is None:
            return "no layout gave a figure"
        if compared is None:
            return self._claim_without_comparison(self._candidates[verdict.winner])
        label = self._candidates[compared.candidate].label
        ratio = remembered.ratio(compared.ratio, compared.interval)
        if verdict.different:
            return f"{label} gives {ratio} times the default's {self._figure()}"
        most = math.ceil(round((compared.interval[1] - 1) * 100, 6))
        if most > _WORTH_A_CLAIM:
            return f"no difference seen: {label} gives {ratio} times the default's {self._figure()}"
        by = f" by more than {most} %" if most > 0 else ""
        return (
            f"no layout is faster than the default{by}: the best other one, {label}, gives {ratio} times "
            f"its {self._figure()}"
        )

    def _claim_without_comparison(self, best: Candidate) -> str:
        if not best.is_default and self._default_failed():
            return f"{best.label} is the fastest that started; the default gave no figure"
        if best.is_default and self._verdict.complete:
            return f"no layout was faster in the race than the default, {best.label}"
        return f"{best.label} is ahead so far; nothing was compared in fresh visits"

    def to_json(self) -> dict[str, Any]:
        """The documented form of `tune --json`."""
        verdict = self._verdict
        winner = None
        if verdict.winner is not None:
            best = self._candidates[verdict.winner]
            winner = {
                "layout": layout_json(best.layout), "label": best.label,
                "ratio_to_default": verdict.ratio_to_default,
                "interval": None if verdict.interval is None else list(verdict.interval),
            }  # fmt: skip
        return {
            "winner": winner,
            "different": verdict.different,
            "complete": verdict.complete,
            "sentence": self.sentence(),
            "candidates": [self._candidate_json(standing) for standing in verdict.standings],
            "visits": [self._visit_json(result) for result in self._history],
            "answers": {stack: list(texts) for stack, texts in self._answers.items()},
        }

    def _candidate_json(self, standing: Standing) -> dict[str, Any]:
        its, candidate = self._measured(standing.candidate), self._candidates[standing.candidate]
        return {
            "layout": layout_json(candidate.layout), "label": candidate.label, "default": candidate.is_default,
            "score": standing.score, "interval": standing.interval, "meets_slo": standing.meets_slo,
            "output_tokens_per_s": _mean(its, "output_tokens_per_s"),
            "total_tokens_per_s": _mean(its, "total_tokens_per_s"),
            "goodput_per_s": _mean(its, "goodput_per_s"),
            "ttft_p99_s": _mean(its, "ttft_p99_s"), "itl_p99_s": _mean(its, "itl_p99_s"),
            "cores": self._cores_of(candidate.plan), "visits": standing.visits,
            "measurements": standing.measurements, "left": standing.left,
        }  # fmt: skip

    def _visit_json(self, result: VisitResult) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(result)
        return {"label": self._candidates[result.visit.candidate].label, **found.pop("visit"), **found}

    def _table(self) -> list[str]:
        goodput = self._figure() == "goodput"
        head = ["layout", "tokens/s", "per core", "95 %", "TTFT p99", "ITL p99", "measured", ""]
        if goodput:
            head[1:4] = ["goodput/s", "95 %", "tokens/s", "per core"]
        return table([head, *(self._row(standing, goodput=goodput) for standing in self._verdict.standings)])

    def _row(self, standing: Standing, *, goodput: bool) -> list[str]:
        its, candidate = self._measured(standing.candidate), self._candidates[standing.candidate]
        rate = _mean(its, "output_tokens_per_s") if goodput else standing.score
        cores = self._cores_of(candidate.plan)
        score = [
            _shown(standing.score, "{:,.4g}"),
            _ABSENT if standing.interval is None else "–".join(f"{edge:,.4g}" for edge in standing.interval),
        ]
        rates = [
            _shown(rate, "{:,.1f}"),
            _shown(None if rate is None or not cores else rate / cores, "{:.2f}"),
        ]
        return [
            candidate.label + (" (default)" if candidate.is_default else ""),
            *([*score, *rates] if goodput else [*rates, score[1]]),
            _shown(_mean(its, "ttft_p99_s"), "{:.3f} s"),
            _shown(_mean(its, "itl_p99_s"), "{:.4f} s"),
            f"{standing.measurements} in {counted(standing.visits, 'visit')}",
            standing.left or ("breaks the SLO" if standing.meets_slo is False else ""),
        ]

    def _single_and_several(self) -> list[list[str]]:
        """The best of the layouts with one instance per socket, and of those with several; per stack. Race figures."""
        found = [["stack", "one instance per socket", "several", "several / one"]]
        for stack in dict.fromkeys(candidate.layout.stack for candidate in self._candidates):
            best: dict[bool, float] = {}
            for standing in self._verdict.standings:
                candidate = self._candidates[standing.candidate]
                rate = _mean(self._measured(standing.candidate), "output_tokens_per_s")
                if candidate.layout.stack == stack and rate is not None:
                    single = _is_single(candidate.plan)
                    best[single] = max(rate, best.get(single, 0.0))
            if len(best) == 2:
                shown = [f"{best[single]:,.1f} tokens/s" for single in (True, False)]
                found.append([stack or "as configured", *shown, f"{best[False] / best[True]:.2f}"])
        return found

    def _measured(self, candidate: int) -> list[Measurement]:
        return [
            each for its in self._history if its.visit.candidate == candidate for each in its.measurements
        ]

    def _figure(self) -> str:
        goodput = self._settings.slo and any(
            each.goodput_per_s is not None for result in self._history for each in result.measurements
        )
        return "goodput" if goodput else "throughput"

    def _default_failed(self) -> bool:
        own = [its for its in self._history if self._candidates[its.visit.candidate].is_default]
        return bool(own) and not any(its.measurements for its in own)


def layout_json(layout: Layout) -> dict[str, Any]:
    """Without the keys that stay as configured."""
    found: dict[str, Any] = msgspec.to_builtins(layout)
    return {key: value for key, value in found.items() if value is not None}


def span(seconds: float) -> str:
    """A time as people say it: 40 s, 12 min, 1 h 05 min."""
    whole = max(0, round(seconds))
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _is_single(plan: dict[str, Any]) -> bool:
    sockets = [slot["socket"] for slot in plan["slots"]]
    return len(sockets) == len(set(sockets))


def _mean(measured: Sequence[Measurement], field: str) -> float | None:
    values = [value for each in measured if (value := getattr(each, field)) is not None]
    return fmean(values) if values else None


def _shown(value: float | None, form: str) -> str:
    return _ABSENT if value is None else form.format(value)
