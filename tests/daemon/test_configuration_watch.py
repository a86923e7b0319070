"""The configuration file against what is in force."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from support.deployments import CHANGED, made

from launcher.base.errors import LauncherError
from launcher.config.schema import Config
from launcher.daemon.configuration_watch import ConfigurationWatch, difference
from launcher.daemon.deployment import Deployment


def config(**more: Any) -> Config:
    return made(**more).config


@dataclass
class File:
    """The file, as it is read."""

    says: Config | LauncherError
    in_force: Deployment

    def read(self) -> Config:
        if isinstance(self.says, LauncherError):
            raise self.says
        return self.says

    def watch(self) -> ConfigurationWatch:
        return ConfigurationWatch(self.read, lambda: self.in_force)


def test_the_keys_that_differ_and_those_that_only_a_restart_applies() -> None:
    assert difference(config(), config()) == ""
    assert (
        difference(config(), config(engine=CHANGED))
        == "the configuration file is not applied: engine.command differs"
    )
    text = difference(config(), config(engine=CHANGED, systemd={"memory_max": "4GiB"}))
    assert text.endswith(
        "engine.command, systemd.memory_max differ; only a restart of the daemon applies systemd.memory_max"
    )


def test_of_many_keys_some_are_named() -> None:
    supervision = {
        "probe_interval_s": 9.5, "drain_timeout_s": 7.0, "stop_timeout_s": 8.0, "stall_timeout_s": 99.0,
        "canary_interval_s": 66.0, "verify_interval_s": 77.0, "probe_timeout_s": 5.5, "crash_limit": 9,
        "crash_window_s": 601.0,
    }  # fmt: skip
    assert "and 1 more differ" in difference(config(), config(supervision=supervision))


async def test_a_difference_is_told_until_it_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    file = File(config(), made())
    watch = file.watch()
    await watch.check()
    assert watch.unapplied == ""
    file.says = config(engine=CHANGED)
    with caplog.at_level(logging.WARNING):
        await watch.check()
        await watch.check()
    assert "engine.command differs" in watch.unapplied
    assert len(caplog.records) == 1, "it is logged once"
    file.in_force = made(engine=CHANGED)
    assert watch.unapplied == "", "a reload: what was compared before says nothing"
    await watch.check()
    assert watch.unapplied == ""


async def test_a_file_that_cannot_be_used_is_told() -> None:
    file = File(
        LauncherError("cannot read configuration 'c': expected '='", "correct the TOML syntax"), made()
    )
    watch = file.watch()
    await watch.check()
    assert "cannot be used: cannot read configuration 'c': expected '='" in watch.unapplied
    file.says = config()
    await watch.check()
    assert watch.unapplied == ""


async def test_a_daemon_without_a_file_has_nothing_to_compare() -> None:
    watch = ConfigurationWatch(None, made)
    await watch.check()
    assert watch.unapplied == ""
