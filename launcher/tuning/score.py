"""What one visit says about its layout: a score, its noise, and the limits it broke. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from launcher.tuning.model import Measurement, Settings, VisitResult

_LOWEST: Final = 1e-9
_HIGHEST: Final = 1e12
LIMITS: Final = ("ttft_p99", "itl_p99")


def log_figures(measurements: Sequence[Measurement], *, goodput: bool) -> npt.NDArray[np.float64]:
    """Natural logarithms of a visit's figures; without those that no machine reaches, 0 and NaN among them."""
    figures = ((each.goodput_per_s if goodput else each.output_tokens_per_s) for each in measurements)
    return np.log([each for each in figures if each is not None and _LOWEST < each < _HIGHEST])


def location(values: npt.NDArray[np.float64]) -> float:
    """Hodges-Lehmann: the median of the means of all pairs. Nearly as exact as the mean where noise is normal; outliers
    (another job on the machine) do not decide it while they are fewer than 29 %."""
    rows, columns = np.triu_indices(len(values))
    return float(np.median((values[rows] + values[columns]) / 2))


def spread(values: npt.NDArray[np.float64]) -> float:
    """Standard deviation, from the median distance to the median; of 3 values or more."""
    distance = float(np.median(np.abs(values - np.median(values))))
    return 1.4826 * distance * len(values) / (len(values) - 0.8)


def broken_limits(measurements: Sequence[Measurement], settings: Settings) -> list[str]:
    """Limits that the median of the measurements breaks, with the figure. A failed request counts as one."""
    broken = []
    for name in LIMITS:
        limit = settings.slo.get(name)
        figures = [figure for each in measurements if (figure := getattr(each, f"{name}_s")) is not None]
        # What is no number keeps no limit.
        median = (
            statistics.median(each if math.isfinite(each) else math.inf for each in figures) if figures else 0
        )
        if limit is not None and median > limit:
            broken.append(f"{name} {median:.3g} s over {limit:g} s")
    failed = statistics.median(each.failed for each in measurements) if measurements else 0
    return [*broken, f"{failed:g} requests failed"] if failed else broken


def failure(result: VisitResult) -> str:
    """Why a visit has no score."""
    if result.cause is not None:
        return result.cause
    return "no measurement gave a figure above 0" if result.measurements else "nothing was measured"
