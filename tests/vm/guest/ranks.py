#!/opt/venv/bin/python
"""In the guest, as root: a model that is larger than a memory node, with a rank on each of several.

Judges nothing: facts.json goes back to the host, whose tests do.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from notes import COMMAND_S, SOCKET, ask, note, request, sh, status, until
from units import BIN, SITE, UNIT, install_package, install_units

READY_S = 900.0
MODEL = Path("/srv/model")
# Weights and overhead of an instance, MiB: larger than a node of 384 MiB, or than two of 512 MiB.
SIZES = {2: (100, 170), 4: (200, 400)}
ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "vocab_size": 1000,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def nodes() -> list[int]:
    found = Path("/sys/devices/system/node").glob("node[0-9]*")
    return sorted(int(path.name.removeprefix("node")) for path in found)


def make_model(weights_mib: int) -> None:
    """Headers are read; the data is a hole."""
    MODEL.mkdir()
    (MODEL / "config.json").write_text(json.dumps(ARCHITECTURE))
    size = weights_mib << 20
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [size // 512, 256], "data_offsets": [0, size]}}
    ).encode()
    file = MODEL / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + size)


def install() -> None:
    install_package()
    vllm = BIN / "vllm"
    shutil.copy("ranked_vllm.py", vllm)
    vllm.chmod(0o755)
    metadata = SITE / "vllm-0.32.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    weights, overhead = SIZES[len(nodes())]
    make_model(weights)
    Path("/etc/numa-launcher").mkdir()
    Path("/etc/numa-launcher/config.toml").write_text(
        f"""
[[models]]
name = "large"
path = "{MODEL}"
[layout]
reserve_cores = 0
[memory]
kv_cache = "8MiB"
reserve = "0"
instance_overhead = "{overhead}MiB"
[engine]
command = ["{vllm}"]
[supervision]
probe_interval_s = 2
probe_timeout_s = 60
stop_timeout_s = 60
"""
    )
    install_units(UNIT)


def processes() -> list[int]:
    """Of the instance, whatever it is called."""
    return sorted(map(int, sh("pgrep", "--full", f"{BIN}/vllm")["out"].split()))


def ready(generation: int) -> dict[str, Any] | None:
    now = status()
    slots = now["slots"] if now else []
    good = (
        slots
        and slots[0]["state"] == "ready"
        and slots[0]["generation"] >= generation
        and slots[0]["verified"]
    )
    return slots[0] if good else None


def serve() -> None:
    note("nodes", nodes())
    note("topology", ask("numa-launcher", "topology", "--json"))
    note("plan", ask("numa-launcher", "plan", "--json"))
    note("plan-text", sh("numa-launcher", "plan"))
    note("start", sh("systemctl", "start", UNIT, timeout=READY_S))
    note("ready", until(lambda: ready(1), READY_S))
    note("verify", ask("numa-launcher", "verify", "--json"))
    note("verify-text", sh("numa-launcher", "verify"))
    pids = [
        rank["pid"]
        for rank in note("found", request(SOCKET, "GET", "/v1/status"))["slots"][0]["verified"]["ranks"]
    ]
    note("maps", [Path(f"/proc/{pid}/numa_maps").read_text() for pid in pids])


def misplace() -> None:
    """The pages of the last rank, to the first one's node: the instance as a whole keeps its nodes."""
    last = note("misplaced", ask("numa-launcher", "verify", "--json"))["slots"][0]["verified"]["ranks"][-1]
    sh("migratepages", str(last["pid"]), str(last["node"]), "0")
    note("migratepages", ask("numa-launcher", "verify", "--json"))
    sh("migratepages", str(last["pid"]), "0", str(last["node"]))


def kill_rank() -> None:
    before = processes()
    last = ask("numa-launcher", "verify", "--json")["slots"][0]["verified"]["ranks"][-1]
    os.kill(last["pid"], signal.SIGKILL)
    after = until(lambda: ready(2), READY_S)
    note("killed", {
        "before": before, "left": [pid for pid in before if Path(f"/proc/{pid}").exists()], "slot": after,
        "why": sh("numa-launcher", "why", "0")["out"],
    })  # fmt: skip
    note("killed-verify", ask("numa-launcher", "verify", "--json"))


def drain() -> None:
    """A stream that flows ends whole."""
    before = processes()
    stream = subprocess.Popen(
        [sys.executable, "-c", STREAM], stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT
    )
    until(lambda: status()["slots"][0]["in_flight"], COMMAND_S)
    drained = sh("numa-launcher", "drain", "0", "--force", timeout=READY_S)
    out, _ = stream.communicate(timeout=COMMAND_S)
    note("drain", {"done": drained, "stream": out[-200:], "state": status()["slots"][0]["state"]})
    restarted = sh("numa-launcher", "restart", "0", "--force", timeout=READY_S)
    after = until(lambda: ready(3), READY_S)
    note("restart", {
        "done": restarted, "slot": after, "left": [pid for pid in before if Path(f"/proc/{pid}").exists()],
    })  # fmt: skip
    note("restart-verify", ask("numa-launcher", "verify", "--json"))


STREAM = """
import json, urllib.request
body = {"model": "large", "prompt": "x", "max_tokens": 40, "stream": True}
url, kind = "http://127.0.0.1:8000/v1/completions", {"Content-Type": "application/json"}
call = urllib.request.Request(url, json.dumps(body).encode(), kind)
print(urllib.request.urlopen(call, timeout=600).read().decode())
"""


def stop() -> None:
    note("stop", sh("systemctl", "stop", UNIT))
    until(lambda: not processes(), COMMAND_S)
    note("left", processes())
    note("journal", sh("journalctl", "--unit", f"{UNIT}*", "--output", "cat")["out"])


if __name__ == "__main__":
    for step in (install, serve, misplace, kill_rank, drain, stop):
        step()
