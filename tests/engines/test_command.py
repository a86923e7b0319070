"""Servers started from an argv template."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.base.address import TcpAddress, UnixAddress
from launcher.base.errors import LauncherError
from launcher.engines.command import CommandEngine
from launcher.engines.numactl import Binding, MemPolicy
from launcher.plan.plan import Slot

MakeSlot = Callable[..., Slot]


def engine(*template: str) -> CommandEngine:
    ports = iter(range(4000, 4100))
    return CommandEngine(
        template=template,
        binding=Binding(MemPolicy.MEMBIND, numactl="numactl"),
        socket_dir="/run/nl",
        free_port=lambda: next(ports),
    )


def test_every_placeholder_is_filled_in(make_slot: MakeSlot) -> None:
    launch = engine("srv", "-m", "{model}", "-a{name}", "{cpus}/{slot}", "--at={uds}").launch(
        make_slot(id=2), 7
    )
    assert launch.argv == (
        "numactl", "--physcpubind=0-3", "--membind=0",
        "srv", "-m", "/models/tiny", "-atiny", "0-3/2", "--at=/run/nl/slot2-7.sock",
    )  # fmt: skip
    assert launch.address == UnixAddress("/run/nl/slot2-7.sock")


def test_threads_are_counted_from_the_slots_cpus(make_slot: MakeSlot) -> None:
    template = engine("srv", "{uds}", "--threads", "{threads}")
    assert template.launch(make_slot(cpus="0,2,4-9"), 1).argv[-1] == "8"


def test_each_life_asks_for_a_port(make_slot: MakeSlot) -> None:
    server = engine("srv", "--port", "{port}")
    lives = [server.launch(make_slot(), generation) for generation in (1, 2)]
    assert [life.address for life in lives] == [TcpAddress("127.0.0.1", 4000), TcpAddress("127.0.0.1", 4001)]
    assert [life.argv[-1] for life in lives] == ["4000", "4001"]


def test_json_and_doubled_braces_stay(make_slot: MakeSlot) -> None:
    launch = engine("srv", "{uds}", '{"a": {"b": 1}}', "{{name}}").launch(make_slot(), 1)
    assert launch.argv[-2:] == ('{"a": {"b": 1}}', "{name}")


def test_unknown_placeholder_is_named() -> None:
    with pytest.raises(LauncherError, match=r"unknown placeholder '\{prot\}'") as refused:
        engine("srv", "{prot}")
    assert "{port}" in refused.value.remedy


def test_a_server_must_be_told_where_to_listen() -> None:
    with pytest.raises(LauncherError, match=r"neither \{uds\} nor \{port\}"):
        engine("srv", "{model}")
