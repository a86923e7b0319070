"""One configuration against another, on a machine that is not this one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.deployments import made
from support.synthetic import Machine

from launcher.config.loading import parse_config
from launcher.config.reference_page import to_markdown
from launcher.daemon import rollout
from launcher.daemon.deployment import Deployment, build_deployment
from launcher.daemon.rollout import Changes, SlotChange, Step, compare
from launcher.models.identity import ModelFiles


def steps(changes: Changes) -> list[tuple[int, Step]]:
    return [(change.slot, change.step) for change in changes.slots]


def test_nothing_differs() -> None:
    changes = compare(made(), made())
    assert steps(changes) == [(0, Step.NOTHING), (1, Step.NOTHING)]
    assert (changes.steps, changes.live, changes.needs_restart) == ((), (), ())


def test_an_argument_restarts_every_slot() -> None:
    changes = compare(made(), made(engine={"command": ["serve", "{uds}", "--quick"]}))
    assert changes.steps == (
        SlotChange(0, Step.RESTART, ("arguments: (order) becomes --quick",)),
        SlotChange(1, Step.RESTART, ("arguments: (order) becomes --quick",)),
    )


def with_files(deployment: Deployment, *files: ModelFiles | None) -> Deployment:
    slots = tuple(replace(slot, files=each) for slot, each in zip(deployment.plan.slots, files, strict=True))
    return replace(deployment, plan=replace(deployment.plan, slots=slots))


def test_other_files_below_the_same_path_restart_a_slot() -> None:
    first, second = ModelFiles("/models/v1", "d1"), ModelFiles("/models/v2", "d2")
    changes = compare(with_files(made(), first, second), with_files(made(), second, second))
    assert changes.slots == (
        SlotChange(0, Step.RESTART, ("model files /models/v1 become /models/v2",)),
        SlotChange(1, Step.NOTHING),
    )
    assert compare(with_files(made(), None, None), with_files(made(), second, second)).steps == ()


def test_secrets_are_not_shown() -> None:
    changes = compare(
        made(engine={"env": {"TZ": "1", "HOOK": "x", "MY_TOKEN": "x"}}),
        made(engine={"env": {"TZ": "2", "HOOK": "y", "MY_TOKEN": "y"}}),
    )
    assert changes.slots[0].reasons == ("HOOK changes", "MY_TOKEN changes", "TZ: 1 becomes 2")


def test_fewer_instances_stop_some_first_and_give_the_others_their_cpus() -> None:
    changes = compare(made(), made(layout={"instances_per_socket": 1}))
    assert [(change.slot, change.step) for change in changes.steps] == [(1, Step.STOP), (0, Step.RESTART)]
    assert changes.slots[0].reasons[0].startswith("cpus ")
    back = compare(made(layout={"instances_per_socket": 1}), made())
    assert [(change.slot, change.step) for change in back.steps] == [(0, Step.RESTART), (1, Step.START)]


def test_supervision_is_taken_over_at_once() -> None:
    changes = compare(made(), made(supervision={"probe_interval_s": 1.0, "min_ready": 2}))
    assert changes.live == ("supervision.min_ready", "supervision.probe_interval_s")
    assert changes.steps == ()


VLLM = {"kind": "vllm", "command": ["vllm"], "args": []}


@pytest.mark.parametrize("engine", [VLLM, {"kind": "command", "command": ["serve", "{port}"]}])
def test_how_long_a_stop_and_a_start_may_take_restarts_nothing(engine: dict[str, Any]) -> None:
    """Nor does a loopback port, which each launch draws anew."""
    changes = compare(
        made(engine=engine),
        made(engine=engine, supervision={"stop_timeout_s": 77.0, "ready_timeout_s": 88.0}),
    )
    assert changes.live == ("supervision.ready_timeout_s", "supervision.stop_timeout_s")
    assert changes.steps == ()


def test_an_instance_is_compared_with_the_binding_that_it_was_started_with() -> None:
    """A reload may switch numactl off; what then starts binds no memory."""
    expected = [
        deployment.engine.launch(deployment.plan.slots[0], 1).expected.binds_memory
        for deployment in (made(), made(engine={"numactl": "off"}))
    ]
    assert expected == [True, False]


def test_a_price_of_the_machine_is_taken_over_at_once() -> None:
    changes = compare(made(), made(cost={"hourly": 0.79, "price_per_kwh": 0.3, "watts": 800}))
    assert changes.live == ("cost.hourly", "cost.price_per_kwh", "cost.watts")
    assert changes.steps == ()
    assert changes.needs_restart == ()


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({"cost": {"hourly": 1, "currency": "EUR"}}, ("cost.currency",)),
        ({"cost": {"price": {"input": 1, "output": 2}}}, ("cost.price",)),
        ({"proxy": {"listen": ["127.0.0.1:9"]}}, ("proxy.listen",)),
        ({"control": {"group": "root"}}, ("control.group",)),
        ({"logging": {"level": "debug"}}, ("logging.level",)),
        ({"engine": {"health_path": "/ping"}}, ("engine.health_path",)),
        ({"systemd": {"memory_max": "4GiB"}}, ("systemd.memory_max",)),
        ({"models": [{"name": "other", "path": "/m"}]}, ("the models' names",)),
        ({"models": [{"name": "m", "path": "/m", "aliases": ["other"]}]}, ("the models' aliases",)),
        ({"layout": {"reserve_cores": 1}}, ("the reserved cpus",)),
    ],
)
def test_what_only_a_restart_of_the_daemon_takes_over(more: dict[str, Any], keys: tuple[str, ...]) -> None:
    assert compare(made(), made(**more)).needs_restart == keys


def test_the_page_on_the_configuration_says_so() -> None:
    intro = to_markdown().partition("\n## ")[0]
    live, _, once = intro.partition("A restart of the daemon is needed for")
    for section in rollout._ONCE:
        assert f"`[{section}]`" in once
    for setting in rollout._BUILT_IN:
        assert f"`{setting}`" in once
    for section in rollout._LIVE:
        assert f"`[{section}]` at once" in live
    assert all(words in once for words in ("names and aliases of models", "reserved cores"))


def test_how_many_requests_an_instance_runs_is_a_change_of_its_own() -> None:
    changes = compare(made(), made(models=[{"name": "m", "path": "/m", "max_num_seqs": 8}]))
    assert changes.steps[0] == SlotChange(0, Step.RESTART, ("max_num_seqs 64 becomes 8",))


def test_memory_nodes_are_named() -> None:
    two = Machine(sockets=2, cores=4).topology()
    engine = {"kind": "command", "command": ["serve", "{uds}"]}

    def on(cpus: str) -> Deployment:
        layout = {"instances_per_socket": 1, "cpus": cpus}
        tree = {"models": [{"name": "m", "path": "/m"}], "engine": engine, "layout": layout}
        return build_deployment(parse_config(tree, origin="test"), machine=two, cpus_only=True)

    assert "memory nodes 0 become 1" in compare(on("0-3"), on("4-7")).slots[0].reasons
