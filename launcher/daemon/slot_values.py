"""The supervisor's part of the metrics page: slots, their instances, their failures, the build."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

import launcher
from launcher.build import build
from launcher.engines.software_versions import Stack
from launcher.instances.causes import CAUSES
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import State
from launcher.instances.verify import Verification
from launcher.telemetry import machine_metrics as names
from launcher.telemetry.spec import Values

_Labels = tuple[str, ...]
_STATES: Final = tuple(state.value for state in State)


def daemon_values(stack: Stack, since: float) -> Values:
    """`since`: start of the daemon, seconds since the epoch."""
    versions = (stack.vllm or "", stack.torch or "", stack.zentorch or "")
    return {
        names.BUILD_INFO: {(launcher.__version__, build(), *versions): 1.0},
        names.START_TIME: {(): since},
    }


def failure_values(failures: Mapping[str, int]) -> Values:
    """`failures`: of all slots, by cause. Each known cause has a sample from the start, so that its first failure is an
    increase."""
    return {names.FAILURES: {(cause,): failures.get(cause, 0) for cause in (*CAUSES, *failures)}}


def slot_values(controllers: Iterable[SlotController]) -> Values:
    slots = {(str(each.slot.id), each.slot.model.name): each for each in controllers}
    offset = time.time() - time.monotonic()
    states = {labels: each.slot_state for labels, each in slots.items()}
    return {
        names.SLOT_STATE: {
            (*labels, name): float(state.state.value == name)
            for labels, state in states.items()
            for name in _STATES
        },
        names.SLOT_RESTARTS: {labels: state.restarts for labels, state in states.items()},
        names.SLOT_FAILURES: {labels: each.failures.total() for labels, each in slots.items()},
        names.SLOT_LAST_FAILURE: {
            (*labels, state.last_cause.name): state.cause_at + offset
            for labels, state in states.items()
            if state.last_cause is not None
        },
        **_of_instances(
            {labels: each for labels, each in slots.items() if each.instance.process is not None}
        ),
    }


def _of_instances(running: Mapping[_Labels, SlotController]) -> Values:
    instances = {labels: each.instance for labels, each in running.items()}
    return {
        names.SLOT_WATCHED: {labels: float(each.unwatched is None) for labels, each in running.items()},
        names.SLOT_RESPONSIVE: {
            labels: float(each.responsive)
            for labels, each in instances.items()
            if each.responsive is not None
        },
        names.SLOT_STALLED: {
            labels: max(0.0, each.progress.last.at - each.progress.moved_at)
            for labels, each in instances.items()
            if each.progress.last is not None
        },
        names.SLOT_ZENTORCH: {
            labels: float(each.zentorch) for labels, each in instances.items() if each.zentorch is not None
        },
        **_placement(
            {labels: each.verification for labels, each in instances.items() if each.verification is not None}
        ),
    }


def _placement(found: Mapping[_Labels, Verification]) -> Values:
    return {
        names.SLOT_PLACED: {labels: float(each.ok) for labels, each in found.items()},
        names.SLOT_MISPLACED: {labels: each.misplaced_threads for labels, each in found.items()},
        names.SLOT_MEMORY: {
            (*labels, str(node)): size
            for labels, each in found.items()
            for node, size in each.node_bytes.items()
        },
        names.SLOT_MEMORY_ON_NODE: {
            labels: each.bound_share for labels, each in found.items() if each.bound_share is not None
        },
    }
