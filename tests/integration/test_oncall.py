"""An operator's tasks: hold, quarantine, drain with a deadline, why, events, reload; and what is refused."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration.load import Load
from support.cloud import make_certificate
from support.daemon_process import SOON_S, DaemonProcess, eventually
from support.ports import free_port

pytestmark = pytest.mark.timeout(900)

Start = Callable[..., DaemonProcess]
# A probe waits long: an instance that a busy machine holds up is not unhealthy.
BRISK = "[supervision]\nprobe_interval_s = 0.2\nprobe_timeout_s = 30\nbackoff_initial_s = 0.1\nstop_timeout_s = 3\n"
# But for the one that hangs.
HANGS = BRISK.replace("probe_timeout_s = 30", "probe_timeout_s = 0.5") + "stall_timeout_s = 6\n"


@pytest.fixture(scope="module")
def of_module(start_shared: Start) -> DaemonProcess:
    return start_shared("--token-s", "0.03", more=BRISK)


@pytest.fixture
def shared(of_module: DaemonProcess) -> Iterator[DaemonProcess]:
    """A daemon that serves several tests. After each, also one that failed, its configuration is as it was and both slots
    may run."""
    text = of_module.config.read_text()
    yield of_module
    of_module.config.write_text(text)
    for slot in of_module.status()["slots"]:
        if slot["intent"] != "run":
            verb = {"stop": "start", "drain": "resume"}.get(slot["intent"], "release")
            assert of_module.cli(verb, str(slot["slot"])).returncode == 0


def test_hold_survives_everything_but_release(shared: DaemonProcess) -> None:
    daemon = shared
    daemon.wait_ready(2)
    with Load(daemon.url, "fake", workers=4, max_tokens=8) as load:
        done = daemon.cli("hold", "0")
        assert (done.returncode, done.stdout.strip()) == (0, "slot 0 is held"), done.stderr
        assert daemon.cli("hold", "0").returncode == 0, "asking twice changes nothing"
        for verb in ("start", "restart", "resume"):
            refused = daemon.cli(verb, "0")
            assert refused.returncode == 2
            assert refused.stderr.splitlines()[0] == f"cannot {verb} slot '0': it is held"
        assert daemon.slot(0)["pid"] is None
        released = daemon.cli("release", "0")
        assert (released.returncode, released.stdout.strip()) == (0, "slot 0 is ready"), released.stderr
        eventually(lambda: load.tally.completed, what="an answer")
    assert load.tally.failures == []


def test_drain_resume_stop_start(shared: DaemonProcess) -> None:
    daemon = shared
    before = [slot["generation"] for slot in daemon.wait_ready(2)["slots"]]
    for verb, state in [("drain", "draining"), ("drain", "draining"), ("resume", "ready"), ("resume", "ready"),
                        ("stop", "stopped"), ("stop", "stopped"), ("start", "ready"), ("start", "ready")]:  # fmt: skip
        done = daemon.cli(verb, "1", "--json")
        assert done.returncode == 0, (verb, done.stderr)
        assert json.loads(done.stdout)["state"] == state, verb
    assert [slot["generation"] for slot in daemon.status()["slots"]] == [before[0], before[1] + 1]


def test_an_instance_that_ignores_sigterm_is_killed(shared: DaemonProcess) -> None:
    daemon = shared
    before = daemon.wait_ready(2)["slots"][0]["generation"]
    daemon.post(0, "/fault", {"kind": "ignore-term"})
    assert daemon.cli("restart", "0").returncode == 0
    assert daemon.slot(0)["generation"] == before + 1


def test_a_second_disruption_is_refused_and_forced(shared: DaemonProcess) -> None:
    daemon = shared
    daemon.wait_ready(2)
    assert daemon.cli("drain", "0").returncode == 0
    for verb in ("restart", "drain", "stop", "hold", "quarantine"):
        refused = daemon.cli(verb, "1")
        assert refused.returncode == 2
        said, remedy = refused.stderr.splitlines()
        assert said.startswith(f"cannot {verb} slot '1': 0 instances of 'fake' would be left ready")
        assert "--force" in remedy
    assert daemon.slot(1)["state"] == "ready"
    assert daemon.cli("restart", "1", "--force").returncode == 0
    assert daemon.cli("resume", "0").returncode == 0


def test_quarantine_keeps_an_unhealthy_instance_for_inspection(shared: DaemonProcess) -> None:
    daemon = shared
    pid = daemon.wait_ready(2)["slots"][0]["pid"]
    assert daemon.cli("quarantine", "0").returncode == 0
    daemon.post(0, "/fault", {"kind": "unhealthy"})
    eventually(
        lambda: (daemon.slot(0)["last_cause"] or {}).get("name") == "unhealthy", what="the probes' verdict"
    )
    time.sleep(0.5)  # for what should not happen to happen
    slot = daemon.slot(0)
    assert (slot["pid"], slot["intent"], slot["state"]) == (pid, "quarantine", "draining")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: daemon.slot(0)["state"] == "held", what="held once it has died")
    assert daemon.cli("release", "0").returncode == 0


def test_a_drain_deadline_ends_remaining_requests(shared: DaemonProcess) -> None:
    daemon = shared
    daemon.wait_ready(2)
    before = ended_otherwise(daemon)
    with Load(daemon.url, "fake", workers=4, max_tokens=400) as load:
        eventually(lambda: daemon.slot(0)["in_flight"] > 0, what="work on slot 0")
        done = daemon.cli("drain", "0", "--deadline", "0.5")
        assert done.returncode == 0, done.stderr
        slot = daemon.slot(0)
        assert (slot["state"], slot["in_flight"], slot["deadline"]) == ("draining", 0, None)
        assert slot["pid"] is not None
    assert ended_otherwise(daemon) > before, "waited for: they take 12 s"
    assert len(load.tally.failures) == load.tally.honest
    assert daemon.cli("resume", "0").returncode == 0


def ended_otherwise(daemon: DaemonProcess) -> int:
    """Count of requests that the instance they began on did not complete."""
    sums = daemon.status()["requests"]
    return int(sums["retried"] + sums["continued"] + sums["failed"])


def test_why_after_a_crash_that_a_restart_cannot_cure(start: Start) -> None:
    daemon = start("--fail", "vllm: error: unrecognized arguments: --blok-size 32", instances=1, more=BRISK)
    slot = eventually(
        lambda: daemon.status() and (s := daemon.slot(0))["state"] == "failed" and s, what="failed"
    )
    assert slot["restarts"] == 0
    assert slot["last_cause"]["name"] == "bad-argument"
    done = daemon.cli("why", "0")
    assert done.returncode == 0
    assert "bad-argument: the engine does not know one of its arguments (exit code 1)" in done.stdout
    assert "remedy:  correct engine.args" in done.stdout
    assert "policy:  restart never until changed" in done.stdout
    found = json.loads(daemon.cli("why", "0", "--json").stdout)
    assert found["cause"]["evidence"] == ["vllm: error: unrecognized arguments: --blok-size 32"]
    assert found["lines"][-1]["text"].endswith("--blok-size 32")
    done = daemon.cli("start", "0", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["state"] == "failed"


def test_an_instance_killed_from_outside_restarts_at_once(shared: DaemonProcess) -> None:
    daemon = shared
    before = daemon.wait_ready(2)["slots"][0]
    os.kill(before["pid"], signal.SIGKILL)
    eventually(
        lambda: (s := daemon.slot(0))["state"] == "ready" and s["generation"] == before["generation"] + 1,
        what="back",
    )
    cause = daemon.slot(0)["last_cause"]
    assert (cause["name"], cause["retry"]) == ("killed-by-operator", "now")


def test_a_hung_instance_is_replaced(start: Start) -> None:
    daemon = start("--token-s", "0.05", more=HANGS)
    pid = daemon.wait_ready(2)["slots"][0]["pid"]
    with Load(daemon.url, "fake", workers=4, max_tokens=40) as load:
        eventually(lambda: daemon.slot(0)["in_flight"] > 0, what="work on slot 0")
        os.kill(pid, signal.SIGSTOP)
        eventually(
            lambda: (s := daemon.slot(0))["state"] == "ready" and s["generation"] == 2, 2 * SOON_S, "back"
        )
    assert daemon.slot(0)["last_cause"]["name"] == "hung"
    evidence = daemon.slot(0)["last_cause"]["evidence"]
    assert "requests in flight and no progress for" in evidence[0]
    assert "cpu pressure" in evidence[-1]
    assert len(load.tally.failures) == load.tally.honest


def test_every_operation_is_audited(shared: DaemonProcess) -> None:
    daemon = shared
    daemon.wait_ready(2)
    newest = daemon.get("/events?tail=1")["events"][-1]["number"]
    drained = daemon.cli("events", "--slot", "0", "-n", "1000").stdout.count("slot 0: ready -> draining")
    daemon.cli("drain", "0")
    daemon.cli("stop", "1")
    daemon.cli("resume", "0")
    listed = [json.loads(line) for line in daemon.cli("events", "--audit", "--json").stdout.splitlines()]
    events = [event for event in listed if event["number"] > newest]
    asked = [(e["fields"]["verb"], e["fields"]["slot"], e["fields"]["audit"]) for e in events]
    assert asked == [("drain", 0, "done"), ("stop", 1, "refused"), ("resume", 0, "done")]
    assert {e["fields"]["user"] for e in events} == {events[0]["fields"]["peer_user"]}
    assert {(e["fields"]["peer_uid"], e["fields"]["peer_user"]) for e in events} == {
        (os.getuid(), events[0]["fields"]["peer_user"])
    }
    of_slot = daemon.cli("events", "--slot", "0", "-n", "1000").stdout
    assert "slot 0: starting -> ready" in of_slot
    assert of_slot.count("slot 0: ready -> draining") == drained + 1


# --- reload -----------------------------------------------------------------------------------------


def edit(daemon: DaemonProcess, old: str, new: str) -> None:
    text = daemon.config.read_text()
    assert old in text
    daemon.config.write_text(text.replace(old, new))


def test_reload_restarts_changed_slots_one_at_a_time(start: Start) -> None:
    daemon = start("--token-s", "0.03", more=BRISK)
    before = [slot["pid"] for slot in daemon.wait_ready(2)["slots"]]
    assert daemon.cli("reload", "--show").stdout.strip() == "no reload since the daemon started"
    unchanged = daemon.cli("reload", "--dry-run")
    assert (unchanged.returncode, unchanged.stdout.split("\n")[:2]) == (
        0,
        ["slot 0: unchanged", "slot 1: unchanged"],
    )
    edit(daemon, '"--token-s", "0.03"', '"--token-s", "0.04"')
    edit(daemon, "probe_interval_s = 0.2", "probe_interval_s = 0.3")
    dry = daemon.cli("reload", "--dry-run")
    assert dry.returncode == 1
    assert "slot 0: restart\n  arguments: 0.03 becomes 0.04\n" in dry.stdout
    assert "applied at once: supervision.probe_interval_s" in dry.stdout
    assert [slot["pid"] for slot in daemon.status()["slots"]] == before
    with Load(daemon.url, "fake", workers=4, max_tokens=8) as load:
        done = daemon.cli("reload")
        assert done.returncode == 0, done.stderr + done.stdout
        assert "running: restart slot 0" in done.stderr
    assert load.tally.failures == []
    slots = daemon.status()["slots"]
    assert [slot["generation"] for slot in slots] == [2, 2]
    assert daemon.cli("reload", "--dry-run").returncode == 0


def test_an_invalid_configuration_changes_nothing(shared: DaemonProcess) -> None:
    daemon = shared
    before = [slot["pid"] for slot in daemon.wait_ready(2)["slots"]]
    edit(daemon, "instances_per_socket = 2", "instances_per_socket = 0")
    done = daemon.cli("reload")
    assert done.returncode == 2
    assert "instances_per_socket" in done.stderr
    edit(daemon, "instances_per_socket = 0", "instances_per_socket = 2")
    edit(daemon, "127.0.0.1:", "127.0.0.2:")
    refused = daemon.cli("reload")
    assert refused.returncode == 2
    assert refused.stderr.startswith("cannot reload: only a restart of the daemon applies proxy.listen")
    assert [slot["pid"] for slot in daemon.status()["slots"]] == before


def test_a_configuration_that_fails_to_start_is_rolled_back(shared: DaemonProcess) -> None:
    daemon = shared
    before = daemon.wait_ready(2)["slots"]
    edit(daemon, '"--token-s", "0.03"', '"--fail", "vllm: error: unrecognized arguments: --token-s"')
    with Load(daemon.url, "fake", workers=4, max_tokens=8) as load:
        done = daemon.cli("reload")
        assert done.returncode == 1
        assert "rolled back" in done.stdout
        assert "slot 0 did not become ready: bad-argument" in done.stdout
    assert load.tally.failures == []
    slots = daemon.status()["slots"]
    assert [slot["state"] for slot in slots] == ["ready", "ready"]
    assert slots[1]["generation"] == before[1]["generation"], "the other one was never touched"


def test_a_configuration_with_slow_instances_is_rolled_back(shared: DaemonProcess) -> None:
    daemon = shared
    daemon.wait_ready(2)
    edit(daemon, '"--token-s", "0.03"', '"--token-s", "2.5"')
    done = daemon.cli("reload")
    assert done.returncode == 1
    assert "for one token, its sibling" in done.stdout
    assert [slot["state"] for slot in daemon.status()["slots"]] == ["ready", "ready"]


def command_line(pid: int) -> bytes:
    """Empty for a process that has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_file_that_changes_during_a_reload_is_applied_after_it(start: Start) -> None:
    daemon = start("--token-s", "0.011", more=BRISK)
    daemon.wait_ready(2)
    edit(daemon, "0.011", "0.012")
    os.kill(daemon.process.pid, signal.SIGHUP)
    eventually(lambda: daemon.slot(0)["generation"] == 2, what="the first slot of the first reload")
    edit(daemon, "0.012", "0.013")
    for _ in range(3):
        os.kill(daemon.process.pid, signal.SIGHUP)

    def commands() -> list[bool]:
        return [b"0.013" in command_line(slot["pid"]) for slot in daemon.wait_ready(2)["slots"]]

    eventually(lambda: commands() == [True, True], what="the second configuration in both slots")
    eventually(lambda: daemon.get("/reload")["stage"] == "done", what="the end of the last reload")
    edit(daemon, "0.013", "0.014")
    told = eventually(lambda: daemon.status()["unapplied"], what="the file that is not applied")
    assert "engine.command differs" in told
    assert told in daemon.cli("status").stdout


def versions(folder: Path) -> Path:
    """Two versions of a model, and a link to the first."""
    for name in ("v1", "v2"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"version": name}))
    (folder / "current").symlink_to("v1")
    return folder / "current"


def move(link: Path, to: str) -> None:
    new = link.with_name("new")
    new.symlink_to(to)
    new.replace(link)


def test_a_link_that_moves_is_another_model(start: Start, tmp_path: Path) -> None:
    current = versions(tmp_path)
    daemon = start(more=BRISK, environ={"NUMA_LAUNCHER_MODELS__0__PATH": str(current)})
    daemon.wait_ready(2)
    assert [slot["outdated"] for slot in daemon.status()["slots"]] == [None, None]
    move(current, "v2")
    os.kill(daemon.slot(0)["pid"], signal.SIGKILL)
    eventually(lambda: daemon.slot(0)["generation"] == 2, what="slot 0 again, from v2")
    daemon.wait_ready(2)
    told = eventually(lambda: daemon.slot(1)["outdated"], what="slot 1 runs v1")
    assert str(tmp_path / "v2") in told
    assert daemon.slot(0)["outdated"] is None
    assert f"slot 1: {told}" in daemon.cli("status").stdout
    done = daemon.cli("reload")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"model files {tmp_path / 'v1'} become {tmp_path / 'v2'}" in done.stdout
    assert [slot["generation"] for slot in daemon.status()["slots"]] == [2, 2], "slot 0 runs v2 already"
    eventually(lambda: daemon.slot(1)["outdated"] is None, what="all run v2")


def test_a_model_that_comes_late_is_waited_for(start: Start, tmp_path: Path) -> None:
    """As below a network mount that is not there at boot, and away for a while later."""
    model, elsewhere = tmp_path / "mount", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    more = {
        "NUMA_LAUNCHER_MODELS__0__PATH": str(model),
        "NUMA_LAUNCHER_ENGINE__ARGS": '["--metrics", "{model}/config.json"]',
    }
    daemon = start(instances=1, more=BRISK, environ=more)
    eventually(lambda: "waiting for it" in daemon.log.read_text(), what="the model named as missing")
    elsewhere.rename(model)
    daemon.wait_ready(1)
    model.rename(elsewhere)
    os.kill(daemon.slot(0)["pid"], signal.SIGKILL)
    eventually(
        lambda: (daemon.slot(0)["last_cause"] or {}).get("name") == "cannot-start", what="a start without it"
    )
    time.sleep(1.0)
    assert daemon.slot(0)["state"] == "backoff"
    elsewhere.rename(model)
    daemon.wait_ready(1)


def test_files_of_the_listener_that_come_late_are_waited_for(start: Start, tmp_path: Path) -> None:
    """A certificate that is issued after the boot; `status` says what is lacking."""
    made, mount = make_certificate(tmp_path), tmp_path / "mount"
    names = {"TLS_CERTIFICATE": mount / made.path.name, "TLS_KEY": mount / made.key.name}
    environ = {f"NUMA_LAUNCHER_PROXY__{key}": str(path) for key, path in names.items()}
    daemon = start(instances=1, environ=environ)
    shown = eventually(
        lambda: (done := daemon.cli("status")).returncode == 3 and done,
        what="an answer of a daemon that waits",
    )
    why = f"cannot read proxy.tls_certificate '{mount}/{made.path.name}': no such file or directory"
    assert f"cannot answer yet, the daemon waits: {why}" in shown.stderr
    short = daemon.cli("status", "--short")
    assert (short.returncode, short.stdout) == (2, f"DOWN cannot answer yet, the daemon waits: {why}\n")
    mount.mkdir()
    made.key.rename(names["TLS_KEY"])
    made.path.rename(names["TLS_CERTIFICATE"])
    status = daemon.wait_ready(1)
    assert status["endpoints"] == [daemon.url.replace("http:", "https:")]
    assert [file["state"] for file in status["files"]] == ["in use"]


def test_an_address_that_is_not_here_yet_is_told(start: Start) -> None:
    late = f"192.0.2.7:{free_port()}"  # RFC 5737
    daemon = start(instances=1, environ={"NUMA_LAUNCHER_PROXY__LISTEN": f'["{late}"]'})
    status = daemon.wait_ready(1)
    assert (status["endpoints"], status["absent_endpoints"]) == ([f"http://{late}"], [f"http://{late}"])
    done = daemon.cli("status", "--short")
    assert done.returncode == 2, done
    assert done.stdout.startswith(
        f"DOWN 1/1 ready; no interface of this host has the address of http://{late}; "
    )
    assert f"no interface of this host has the address of http://{late} yet" in daemon.log.read_text()


def test_sighup_reloads_and_scale_removes_and_adds_a_slot(start: Start) -> None:
    daemon = start(more=BRISK)
    daemon.wait_ready(2)
    done = daemon.cli("scale", "1", "--force")
    assert done.returncode == 0, done.stderr + done.stdout
    assert len(daemon.status()["slots"]) == 1
    os.kill(daemon.process.pid, signal.SIGHUP)  # the file still says two
    daemon.wait_ready(2)
    eventually(lambda: daemon.get("/reload")["stage"] == "done", what="the reload's end")
    assert "done" in daemon.cli("reload", "--show").stdout
    assert daemon.process.poll() is None
    edit(daemon, "[layout]", "[layuot]")
    os.kill(daemon.process.pid, signal.SIGHUP)
    eventually(
        lambda: any("layuot" in event["message"] for event in daemon.get("/events")["events"]),
        what="a refusal in the audit",
    )
    shown = daemon.cli("events", "--audit").stdout
    assert "layuot" in shown
    assert "got SIGHUP: reload" in shown
    assert daemon.status()["ready"] == 2
