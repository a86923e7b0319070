"""Visits with the real engine: a private daemon per visit, measured by `bench`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.config.schema import Config
from launcher.measure.bench import endpoint, outcomes
from launcher.measure.bench import run as bench
from launcher.measure.bench.load_generator import Target, VllmDriver
from launcher.measure.bench.result import Point
from launcher.measure.bench.workloads import Workload
from launcher.measure.tune.answers import PROMPTS, TOKENS
from launcher.measure.tune.model import (
    Candidate,
    Layout,
    Measurement,
    MeasurementFailedError,
    NotStartedError,
    Visit,
)
from launcher.measure.tune.private_daemon import InstancesUser, PrivateDaemon, cause_of, running


class Setting(Struct, frozen=True, kw_only=True):
    """What all visits of a run share."""

    config: Config
    """As configured: its model has the tokenizer."""
    config_of: Callable[[Layout], Config]
    """The configuration of a layout's stack."""
    workload: Workload
    driver: VllmDriver
    slo: Mapping[str, float]
    folder: Path
    """Of the run: logs, and the load generator's files."""
    cache: Path
    cores_of: Callable[[dict[str, Any]], int]
    """Physical cores of a plan's instances."""
    user: InstancesUser | None = None
    """Runs daemons and engines; None: the caller."""


class EngineVisits:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    @contextlib.contextmanager
    def start(self, candidate: Candidate, visit: Visit) -> Iterator[EngineSession]:
        its = self._setting
        log = its.folder / f"visit-{visit.number:03}.log"
        # vllm/platforms/__init__.py (0.32) takes ZenCpuPlatform where `import zentorch` succeeds; no variable switches it
        # off.
        hidden = ("zentorch",) if candidate.layout.stack == "vllm" else ()
        with running(
            its.config_of(candidate.layout),
            candidate.layout,
            run=its.folder,
            cache=its.cache,
            hidden=hidden,
            log=log,
            user=its.user,
        ) as daemon:
            url = daemon.wait_ready()
            _check_stack(candidate, daemon.status())
            yield EngineSession(its, candidate, visit, daemon, url)


class EngineSession:
    def __init__(
        self, setting: Setting, candidate: Candidate, visit: Visit, daemon: PrivateDaemon, url: str
    ) -> None:
        self._setting = setting
        self._visit = visit
        self._daemon = daemon
        model, plan = setting.config.models[0], candidate.plan
        self._target = Target(
            url=url, model=model.name, tokenizer=model.path, cores=setting.cores_of(plan), plan=plan,
            client_cpus=CpuSet.parse(plan["reserved"]) or None,
        )  # fmt: skip
        self._warm = False
        self._generations = self._seen()

    def measure(self, repeat: int, seed: int) -> Measurement:
        its = self._setting
        folder = its.folder / f"visit-{self._visit.number:03}-{repeat}"
        try:
            result = bench.run(
                self._target, its.workload, driver=its.driver, folder=folder, seed=seed, slo=its.slo,
                warm_up=not self._warm,
            )  # fmt: skip
        except LauncherError as error:
            raise MeasurementFailedError(self._crash() or error.message) from None
        self._warm = True
        if crash := self._crash():
            raise MeasurementFailedError(crash)
        return measurement_of(result.points[-1])

    def answers(self) -> list[str]:
        try:
            return [endpoint.greedy(self._target, prompt, TOKENS) for prompt in PROMPTS]
        except endpoint.UNANSWERED as error:
            raise MeasurementFailedError(f"no answer: {error}") from None

    def _seen(self) -> dict[int, int]:
        return {slot["slot"]: slot["generation"] for slot in self._daemon.status()["slots"]}

    def _crash(self) -> str | None:
        """The cause of an instance's end since the start of the visit."""
        try:
            slots = self._daemon.status()["slots"]
        except LauncherError as error:
            return error.message
        ended = [s for s in slots if s["state"] != "ready" or s["generation"] != self._generations[s["slot"]]]
        return f"an instance ended while it was measured: {cause_of(ended[0])}" if ended else None


def measurement_of(point: Point) -> Measurement:
    """Raises MeasurementFailedError for a point that says nothing of the layout."""
    if point.client.limited:
        raise MeasurementFailedError(
            f"CLIENT-LIMITED: {point.client}; reserve more cores, or use another driver"
        )
    if point.fault:
        raise MeasurementFailedError(point.fault)
    if not point.completed:
        raise MeasurementFailedError(f"none of {point.failed} requests was completed")
    if why := outcomes.other_work([point]):
        raise MeasurementFailedError(f"not the workload: {why}")
    return Measurement(
        output_tokens_per_s=point.output_tokens_per_s, total_tokens_per_s=point.total_tokens_per_s,
        ttft_p99_s=None if point.ttft_s is None else point.ttft_s.p99,
        itl_p99_s=None if point.itl_s is None else point.itl_s.p99,
        goodput_per_s=point.goodput_per_s, failed=point.failed,
    )  # fmt: skip


def _check_stack(candidate: Candidate, status: Mapping[str, Any]) -> None:
    """Raises NotStartedError when the instances compute with another stack than the candidate's."""
    wanted = candidate.layout.stack
    if wanted not in ("zentorch", "vllm"):
        return
    active = [slot["zentorch"]["active"] for slot in status["slots"]]
    if wanted == "zentorch" and not all(active):
        raise NotStartedError("ZenTorch is not active: see `numa-launcher doctor`")
    if wanted == "vllm" and any(active):
        raise NotStartedError("ZenTorch is active, and could not be switched off")
