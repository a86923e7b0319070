"""What a load generator has to offer: a command line, a result file that can be read, and its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launcher.bench.load import Load
from launcher.bench.result import Totals
from launcher.bench.slo import RequestTimes
from launcher.bench.target import Target
from launcher.bench.workloads import Workload
from launcher.errors import LauncherError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One point to be measured."""

    target: Target
    workload: Workload
    load: Load
    requests: int
    seed: int
    folder: Path
    name: str
    """Of the files in `folder`."""

    @property
    def result_file(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"


@dataclass(frozen=True, slots=True)
class Command:
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the environment. An empty value removes the variable."""


class Figures(Totals, frozen=True, kw_only=True):
    """What a load generator's result file says, in seconds."""

    requests: list[RequestTimes]
    """Completed requests; empty where the file has no single ones."""
    error: str | None = None
    """The most frequent error of the failed requests."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Read from the load generator's output."""

    measuring: bool
    """The first request has been sent."""
    ended: bool
    """The last response has arrived."""
    done: int | None
    """Completed requests; None: it does not say."""


class Driver(Protocol):
    """A load generator."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def prepare(self, job: Job) -> Command:
        """The command line of a job; writes the data set that it needs into the job's folder. Raises LauncherError."""
        ...

    def progress(self, output: str) -> Phase:
        """From all output so far."""
        ...

    def read(self, job: Job) -> Figures:
        """Raises DriverError for a file that is missing or torn."""
        ...

    def explain(self, output: str) -> tuple[str, str]:
        """Why it ended without a result, and the remedy, from its output."""
        ...


class DriverError(LauncherError):
    """The load generator gave no usable result."""
