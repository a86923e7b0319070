"""Slots for the engine room's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB
from launcher.config.schema import Config, Model
from launcher.engines.vllm.settings import effective_config
from launcher.plan.plan import Placement, Slot

MakeSlot = Callable[..., Slot]


@pytest.fixture
def make_slot() -> MakeSlot:
    """One slot; keywords replace the model's fields, `cpus`, `omp`, `nodes` and `kv` the placement's."""

    def make(
        id: int = 0,  # noqa: A002 - the field's own name
        cpus: str = "0-3",
        omp: tuple[str, ...] = ("0-2",),
        nodes: str = "0",
        kv: int | None = 4 * GIB,
        **model: object,
    ) -> Slot:
        membind = CpuSet.parse(nodes)
        placement = Placement(
            socket=0,
            node=membind.first if membind else None,
            cpus=CpuSet.parse(cpus),
            membind=membind,
            omp_cpus=tuple(CpuSet.parse(part) for part in omp),
        )
        fields = {"name": "tiny", "path": "/models/tiny"} | model
        its = Model(**fields)  # type: ignore[arg-type]
        effective = effective_config(its, Config(models=(its,)))
        return Slot(id=id, model=its, effective=effective, placement=placement, kv_cache_bytes=kv)

    return make
