"""One screen of the state of things: in words, in columns, for a pager and for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.fake_operations import CAUSE, VERIFIED, Backstage, FakeOperations, slot_status
from support.verdicts import BEST, FINGERPRINT

from launcher.base.errors import LauncherError
from launcher.cli import main
from launcher.cli.status import CLEAR, COLUMNS, WIDTH, rows, to_text
from launcher.control.verdict import duration, seconds, summary
from launcher.daemon.status import Resident, SlotStatus, Zentorch
from launcher.instances.verify import Difference
from launcher.measure.tune.remembered import judge
from launcher.telemetry.engine_metrics import EngineMetrics
from launcher.telemetry.quantiles import Quantiles

NOW = 160.0
LOAD = EngineMetrics(
    running=12, waiting=7, generated=100, steps=50, kv_usage=0.436, prefix_queries=50, prefix_hits=46
)


@pytest.fixture
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
def daemon(
    tmp_path: Path, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backstage]:
    with Backstage(str(tmp_path / "c.sock"), operations) as daemon:
        monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", daemon.path)
        yield daemon


def busy(slot: int, **more: Any) -> SlotStatus:
    """A slot of a large server at work."""
    facts: dict[str, Any] = {
        "in_flight": 12, "load": LOAD, "tokens_per_s": 412.4, "cpus": ",".join(str(cpu) for cpu in range(slot, 126, 2)),
        "first_token": Quantiles(p50_s=0.312, p99_s=1.26, count=200), "verified": VERIFIED, "since": -14_700.0,
        "resident": Resident(total_bytes=104 << 30, on_node_bytes=103 << 30, share=103 / 104),
        "zentorch": Zentorch(found="5.2", active=True), "restarts": 2, "last_cause": CAUSE, "node": slot % 2,
    }  # fmt: skip
    return slot_status(slot, **(facts | more))


def as_json(operations: FakeOperations) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(operations.status())
    return found


def shown(operations: FakeOperations, width: int | None = WIDTH) -> str:
    return to_text(as_json(operations), NOW, width)


def cells(operations: FakeOperations, width: int | None = WIDTH) -> dict[str, dict[str, str]]:
    """slot -> head -> cell."""
    lines = shown(operations, width).splitlines()
    top = next(line for line in lines if line.startswith("SLOT"))
    heads = [column.head for column in COLUMNS if f"{column.head} " in f"{top} "]
    starts = [f"{top} ".index(f"{head} ") for head in heads]
    found = {}
    for line in lines[lines.index(top) + 1 :]:
        if not line[:1].isdigit():
            break
        parts = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        found[parts[0]] = dict(zip(heads, parts, strict=True))
    return found


@pytest.mark.parametrize(
    ("span", "text"),
    [(-5, "0s"), (0, "0s"), (59.9, "59s"), (60, "1m00s"), (192, "3m12s"), (3600, "1h00m"), (14_700, "4h05m"),
     (183_600, "2d03h")],
)  # fmt: skip
def test_duration(span: float, text: str) -> None:
    assert duration(span) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.041, "0.04"), (0.99, "0.99"), (1.26, "1.3"), (31.2, "31"), (301, "301")]
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


def test_the_measured_layout_has_a_line(operations: FakeOperations) -> None:
    assert "layout" not in shown(operations)
    found = judge(BEST, FINGERPRINT, ("0-1",), ())
    status = as_json(operations) | {"measured_layout": msgspec.to_builtins(found)}
    assert to_text(status, NOW).splitlines()[3:5] == [found.text, ""]
    assert to_text({key: value for key, value in status.items() if key != "measured_layout"}, NOW)


# --- the table ------------------------------------------------------------------------------------


def test_every_figure_has_its_column(operations: FakeOperations) -> None:
    operations.slots = {0: busy(0)}
    assert cells(operations)["0"] == {
        "SLOT": "0", "STATE": "ready", "SINCE": "4h07m", "CPUS": "63@0", "ZEN": "on", "REQ/Q": "12/7", "TOK/S": "412",
        "TTFT 50/99": "0.31/1.3", "KV": "44%", "HIT": "92%", "RSS ON NODE": "103G 99%", "RST": "2", "LAST CAUSE": "oom",
    }  # fmt: skip
    wide = cells(operations, None)["0"]
    assert (wide["PLACEMENT"], wide["PID"]) == ("verified", "4242")
    assert wide["CPU LIST"].startswith("0,2,4,")


def test_what_is_not_known_is_a_dash(operations: FakeOperations) -> None:
    operations.slots = {0: slot_status(0, node=None, pid=None, cpus="0-3,8")}
    row = cells(operations, None)["0"]
    assert (row["CPUS"], row["REQ/Q"], row["PID"]) == ("5", "0/-", "-")
    assert {
        row[head]
        for head in ("ZEN", "TOK/S", "TTFT 50/99", "KV", "HIT", "RSS ON NODE", "LAST CAUSE", "PLACEMENT")
    } == {"-"}


@pytest.mark.parametrize(("active", "word"), [(True, "on"), (False, "OFF"), (None, "?")])
def test_zentorch(operations: FakeOperations, active: bool | None, word: str) -> None:
    operations.slots = {0: slot_status(0, zentorch=Zentorch(found="5.2", active=active))}
    assert cells(operations)["0"]["ZEN"] == word


def test_memory_that_is_not_bound_has_no_share(operations: FakeOperations) -> None:
    operations.slots = {0: busy(0, resident=Resident(total_bytes=3 << 29, on_node_bytes=0, share=None))}
    assert cells(operations)["0"]["RSS ON NODE"] == "1.5G"
    operations.slots = {
        0: busy(0, resident=Resident(total_bytes=22 << 20, on_node_bytes=21 << 20, share=21 / 22))
    }
    assert cells(operations)["0"]["RSS ON NODE"] == "21M 95%"


def test_a_large_server_fits_one_screen_of_100_columns(operations: FakeOperations) -> None:
    """Sixteen slots, none of them idle, with the longest words that there are."""
    causes = [replace(CAUSE, name=name) for name in ("killed-by-operator", "missing-instruction-set")]
    operations.slots = {
        n: busy(n, last_cause=causes[n % 2], state="draining" if n % 3 else "ready") for n in range(16)
    }
    lines = shown(operations).splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= WIDTH for line in lines[4:21]), max(lines, key=len)
    for head in (
        "STATE",
        "SINCE",
        "CPUS",
        "ZEN",
        "REQ/Q",
        "TOK/S",
        "TTFT 50/99",
        "KV",
        "RSS ON NODE",
        "RST",
    ):
        assert head in lines[4]
    assert cells(operations)["15"]["LAST CAUSE"]
    assert "PLACEMENT" not in lines[4]
    assert "PLACEMENT" in shown(operations, 400)


def test_what_is_wanted_least_goes_first_on_a_narrow_terminal(operations: FakeOperations) -> None:
    operations.slots = {0: busy(0, last_cause=replace(CAUSE, name="missing-instruction-set"))}
    row = cells(operations, 80)["0"]
    assert set(row) == {
        "SLOT",
        "STATE",
        "SINCE",
        "CPUS",
        "ZEN",
        "REQ/Q",
        "TOK/S",
        "TTFT 50/99",
        "KV",
        "RST",
        "LAST CAUSE",
    }
    assert row["LAST CAUSE"].startswith("missing-in")
    assert set(cells(operations, 40)["0"]) == {"SLOT", "STATE", "SINCE", "REQ/Q", "LAST CAUSE"}
    for width in range(20, 300):
        assert all(len(line) <= width for line in rows(as_json(operations), NOW, width))


def test_the_model_has_a_column_where_there_are_several(operations: FakeOperations) -> None:
    operations.slots = {0: slot_status(0), 1: slot_status(1)}
    assert "model m" in shown(operations).splitlines()[1]
    operations.slots[1] = slot_status(1, model="other")
    assert [row["MODEL"] for row in cells(operations).values()] == ["m", "other"]


# --- words ----------------------------------------------------------------------------------------


def test_what_needs_words(operations: FakeOperations) -> None:
    wrong = replace(
        VERIFIED,
        differences=(Difference("vllm (pid 7)", "here", "stray"),),
        foreign=("sh (pid 7) is pinned to cpus 0, of which 0 are this slot's", "b"),
    )
    operations.slots = {
        0: slot_status(0, verified=wrong, stalled_s=12.0),
        1: slot_status(1, state="backoff", pid=None, last_cause=CAUSE, next_start=163.0),
        2: slot_status(2, state="starting", phase="loading weights", eta=190.0),
        3: slot_status(3, intent="quarantine", state="draining", eta=165.0),
    }
    text = shown(operations)
    assert (
        "slot 0: has requests and has made no progress for 12 s\n"
        "  numa-launcher logs 0; the daemon restarts an instance that hangs\n"
        "slot 0: not as planned: vllm (pid 7): stray" in text
    )
    assert (
        "slot 0: other processes on its cpus: sh (pid 7) is pinned to cpus 0, and 1 more\n  numa-launcher verify 0"
        in text
    )
    assert "slot 1: starts again in 3 s\nslot 1: oom: it died\n  buy memory\n  | last words" in text
    assert "slot 2: loading weights, estimated 30s left" in text
    assert "slot 3: draining, estimated 5s left\n  numa-launcher release 3" in text
    assert cells(operations)["3"]["STATE"] == "quarantine"
    assert text.endswith("\n\nwarning: mind the gap")


def test_the_head(operations: FakeOperations) -> None:
    lines = shown(operations).splitlines()
    assert lines[0] == "OK 2/2 ready; 1 in flight, 0 waiting"
    assert (
        lines[1]
        == "model m · http://127.0.0.1:8000 · memory membind · vllm 0.32.0 · torch 2.13.0 · python build · up 2m40s"
    )
    assert lines[2] == "requests: accepted 3 · completed 2"


@pytest.mark.parametrize(
    ("slots", "text", "code"),
    [
        ([busy(0), busy(1)], "OK 2/2 ready; 1 in flight, 0 waiting; 825 tok/s; TTFT p99 1.3s", 0),
        (
            [busy(0), slot_status(1, state="failed", last_cause=CAUSE)],
            "DEGRADED 1/2 ready; slot 1 failed 1m00s (oom); 1 in flight, 0 waiting; 412 tok/s; TTFT p99 1.3s", 1,
        ),
        ([slot_status(0, state="held")], "DOWN 0/1 ready; slot 0 held 1m00s; 1 in flight, 0 waiting", 2),
        (
            [busy(0, stalled_s=9.0)],
            "OK 1/1 ready, 1 warning; slot 0 makes no progress; 1 in flight, 0 waiting; 412 tok/s; TTFT p99 1.3s", 0,
        ),
        ([], "DOWN 0/0 ready; 1 in flight, 0 waiting", 2),
    ],
)  # fmt: skip
def test_one_line_for_a_pager(
    daemon: Backstage, operations: FakeOperations, slots: list[SlotStatus], text: str, code: int
) -> None:
    operations.slots = {slot.slot: slot for slot in slots}
    line = summary(as_json(operations), NOW)
    assert line == text
    assert line.isascii()
    assert main(["status", "--short"]) == code


# --- the verb -------------------------------------------------------------------------------------


def test_status(daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("OK 2/2 ready")
    operations.slots = {0: slot_status(state="failed")}
    assert main(["status", "--json"]) == 1, "no slot is ready"
    assert json.loads(capsys.readouterr().out)["slots"][0]["state"] == "failed"


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--short", "--socket", str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("DOWN cannot reach numa-launcher on ")
    assert (len(out.splitlines()), err) == (1, "")
    assert main(["status", "--watch", "--socket", str(tmp_path / "none")]) == 2
    assert "no such socket" in capsys.readouterr().err


def test_the_width_of_the_terminal(
    daemon: Backstage,
    operations: FakeOperations,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operations.slots = {0: busy(0)}

    def width(columns: str, *words: str) -> int:
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["status", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        return max(map(len, lines[3:6]))

    assert 60 < width("80") <= 80
    assert width("100") <= 100
    assert width("80", "--wide") > 200


def test_watch_goes_on_over_a_restart_of_the_daemon(
    daemon: Backstage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.control.client import ControlClient  # noqa: PLC0415

    answers = ControlClient.get
    looks = iter(["here", "here", "gone", "here", "end"])

    def get(client: ControlClient, path: str, _timeout_s: float) -> dict[str, Any]:
        match next(looks):
            case "gone":
                raise LauncherError("cannot reach numa-launcher", "wait")
            case "end":
                raise KeyboardInterrupt
        return answers(client, path)

    monkeypatch.setattr(ControlClient, "get", get)
    monkeypatch.setattr("launcher.cli.status.time.sleep", lambda _: None)
    assert main(["status", "--watch", "1"]) == 130
    out = capsys.readouterr().out
    assert out.count("OK 2/2 ready") == 3
    assert "cannot reach numa-launcher\nOK 2/2 ready" in out
    assert CLEAR not in out, "this is no terminal"


# --- for machines ---------------------------------------------------------------------------------

RECORDED = Path(__file__).parent / "status-v1.json"


def types_of(kind: Any) -> dict[str, str]:
    """Every field of `status --json`, as a path, and its JSON types."""
    (schema,), parts = msgspec.json.schema_components([kind])
    found: dict[str, str] = {}

    def walk(path: str, node: dict[str, Any]) -> None:
        if "$ref" in node:
            node = parts[node["$ref"].rpartition("/")[2]]
        options = node.get("anyOf", [node])
        kinds = sorted({str(one.get("type", "object" if "$ref" in one else "any")) for one in options})
        found[path] = " or ".join(kinds)
        for one in options:
            inner = parts[one["$ref"].rpartition("/")[2]] if "$ref" in one else one
            if "enum" in inner:
                found[path] = found[path].replace("any", "string")
            for name, child in inner.get("properties", {}).items():
                walk(f"{path}.{name}", child)
            if isinstance(inner.get("items"), dict):
                walk(f"{path}[]", inner["items"])

    walk("status", schema)
    return found


def test_the_json_keeps_every_field_that_it_ever_had() -> None:
    """Fields may come; none goes, and none changes its type: status-v1.json has those that are promised."""
    from launcher.daemon.status import Status  # noqa: PLC0415

    promised: dict[str, str] = json.loads(RECORDED.read_text())
    found = types_of(Status)
    assert {path: found.get(path) for path in promised} == promised
    assert found.keys() == promised.keys(), f"add what is new to {RECORDED.name}"


def test_the_json_has_these_fields(
    daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]
) -> None:
    operations.slots = {0: busy(0)}
    main(["status", "--json"])
    status = json.loads(capsys.readouterr().out)
    promised = json.loads(RECORDED.read_text())
    for path in promised:
        if path.startswith("status.slots[].") and path.count(".") == 2 and "[]" not in path[13:]:
            assert path.rpartition(".")[2] in status["slots"][0]
        elif path.count(".") == 1:
            assert path.partition(".")[2].removesuffix("[]") in status
