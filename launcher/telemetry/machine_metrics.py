"""The metrics of slots, their instances and the machine: names and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

# --- One row of the tables of metrics, and what a scrape fills in. ---

Values = Mapping[str, Mapping[tuple[str, ...], float]]  # metric -> label values -> value


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"


class Spec(Struct, frozen=True):
    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


def counter(name: str, text: str, *labels: str) -> Spec:
    return Spec(name, MetricKind.COUNTER, text, labels)


def gauge(name: str, text: str, *labels: str) -> Spec:
    return Spec(name, MetricKind.GAUGE, text, labels)


BUILD_INFO: Final = "numa_launcher_build_info"
START_TIME: Final = "numa_launcher_start_time_seconds"
SLOT_WATCHED: Final = "numa_launcher_slot_watched"
SLOT_STATE: Final = "numa_launcher_slot_state"
SLOT_RESPONSIVE: Final = "numa_launcher_slot_responsive"
SLOT_STALLED: Final = "numa_launcher_slot_stalled_seconds"
SLOT_RESTARTS: Final = "numa_launcher_slot_restarts"
SLOT_FAILURES: Final = "numa_launcher_slot_failures"
SLOT_LAST_FAILURE: Final = "numa_launcher_slot_last_failure_timestamp_seconds"
FAILURES: Final = "numa_launcher_failures"
SLOT_PLACED: Final = "numa_launcher_slot_placement_ok"
SLOT_MISPLACED: Final = "numa_launcher_slot_misplaced_threads"
SLOT_MEMORY: Final = "numa_launcher_slot_memory_bytes"
SLOT_MEMORY_ON_NODE: Final = "numa_launcher_slot_memory_on_node_ratio"
SLOT_ZENTORCH: Final = "numa_launcher_slot_zentorch_active"
NODE_MEMORY: Final = "numa_launcher_node_memory_bytes"
NODE_MEMORY_FREE: Final = "numa_launcher_node_memory_free_bytes"
DIFFERENCES: Final = "numa_launcher_machine_differences"
DISK_SIZE: Final = "numa_launcher_disk_size_bytes"
DISK_FREE: Final = "numa_launcher_disk_free_bytes"

_SLOT: Final = ("slot", "model")

TABLE: Final[tuple[Spec, ...]] = (
    gauge(
        BUILD_INFO,
        "Always 1. version: of numa-launcher; build: python, compiled or stale; vllm, torch, zentorch: versions that "
        "instances run, empty where one is not installed.",
        "version",
        "build",
        "vllm",
        "torch",
        "zentorch",
    ),
    gauge(START_TIME, "Start of the daemon, seconds since the epoch."),
    gauge(
        SLOT_WATCHED,
        "1 while the supervisor watches the slot's instance, 0 when its probes fail or have stopped. No sample while no "
        "instance runs.",
        *_SLOT,
    ),
    gauge(
        SLOT_STATE,
        "1 for the slot's state, 0 for the others: starting, ready, draining, stopping, backoff, failed, stopped, held.",
        *_SLOT,
        "state",
    ),
    gauge(
        SLOT_RESPONSIVE,
        "1 if the last probe of the slot's instance was answered in time. No sample before the first.",
        *_SLOT,
    ),
    gauge(
        SLOT_STALLED,
        "Time for which the slot's instance has had requests and made no progress. No sample for an engine without "
        "metrics.",
        *_SLOT,
    ),
    counter(SLOT_RESTARTS, "Starts of the slot's instance after the first, requested or not.", *_SLOT),
    counter(SLOT_FAILURES, "Ends of the slot's instance that nobody requested.", *_SLOT),
    gauge(
        SLOT_LAST_FAILURE,
        "Time of the last end of the slot's instance that nobody requested, seconds since the epoch, with its cause.",
        *_SLOT,
        "cause",
    ),
    counter(FAILURES, "Ends of instances that nobody requested, by cause, of all slots.", "cause"),
    gauge(
        SLOT_PLACED,
        "1 while the threads, memory and libraries of the slot's instance are as planned. No sample before the first "
        "comparison.",
        *_SLOT,
    ),
    gauge(SLOT_MISPLACED, "Threads of the slot's instance that may run outside the slot's cpus.", *_SLOT),
    gauge(
        SLOT_MEMORY,
        "Anonymous memory of the slot's instance (weights, KV cache, heap) by NUMA node.",
        *_SLOT,
        "numa_node",
    ),
    gauge(
        SLOT_MEMORY_ON_NODE,
        "Share of this memory that is on the slot's own nodes. No sample where memory is not bound.",
        *_SLOT,
    ),
    gauge(
        SLOT_ZENTORCH,
        "1 if the slot's instance computes with ZenTorch, 0 if not. No sample while it is unknown.",
        *_SLOT,
    ),
    gauge(NODE_MEMORY, "Memory of a NUMA node; numa_node is empty for a machine without nodes.", "numa_node"),
    gauge(
        NODE_MEMORY_FREE,
        "Memory of a NUMA node that is free or that the kernel can free at once.",
        "numa_node",
    ),
    gauge(DIFFERENCES, "Differences between the planned machine and the present one: cpus, cpuset, memory."),
    gauge(
        DISK_SIZE,
        "Size of the file system of a folder into which the daemon writes. folder: usage (ledger and history), audit.",
        "folder",
    ),
    gauge(DISK_FREE, "Space in that file system that the daemon may still use.", "folder"),
)
