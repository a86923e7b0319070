"""The memory ledger against vLLM's own figures, for three small models: tied weights, *.bin files of
an older architecture, and sliding layers beside full ones."""

from __future__ import annotations

import http.client
import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.plans import make_plan

from launcher.base.text import GIB, MIB
from launcher.config.schema import Config, Engine, Layout, Memory, Model
from launcher.engines import tiny_model
from launcher.engines.vllm.demand import pool_for
from launcher.engines.vllm.settings import effective_config
from launcher.machine.sysfs import read
from launcher.models.reader import read_profile

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

KV_BYTES = 128 * MIB
LENGTH = 2048
SEQS = 8
# One start on two busy cores.
START_S = 600.0
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_CHECKPOINT = re.compile(r"Checkpoint size: ([\d.]+) GiB")


def shapes() -> dict[str, Any]:
    """A small model whose vocabulary and layers are large enough to be measured."""
    transformers: Any = importlib.import_module("transformers")
    common = {"vocab_size": 32000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "qwen2": transformers.Qwen2Config(
            hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=True, **common,
        ),
        "opt": transformers.OPTConfig(
            hidden_size=512, ffn_dim=1024, num_hidden_layers=3, num_attention_heads=8,
            max_position_embeddings=LENGTH, word_embed_proj_dim=512, **common,
        ),
        "gemma3": transformers.Gemma3TextConfig(
            hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=2, head_dim=64, sliding_window=256, max_position_embeddings=LENGTH,
            layer_types=["full_attention" if i == 5 else "sliding_attention" for i in range(8)], **common,
        ),
    }  # fmt: skip


def make(kind: str, folder: Path) -> Path:
    """The model as people publish it: bfloat16 safetensors, or for OPT a pytorch_model.bin in float16."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    tiny_model._save_tokenizer(tiny_model._train_tokenizer(), folder)
    made = transformers.AutoModelForCausalLM.from_config(shapes()[kind])
    if kind == "opt":
        made.config.dtype, made.config.architectures = "float16", ["OPTForCausalLM"]
        made.config.save_pretrained(folder)
        torch.save(made.to(torch.float16).state_dict(), folder / "pytorch_model.bin")
    else:
        made.to(torch.bfloat16).save_pretrained(folder)
    return folder


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(2)
        self.sock.connect(self.host)


def healthy(path: Path) -> bool:
    connection = UnixConnection(str(path))
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextmanager
def serving(vllm: str, model: Path, folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """A ready vLLM with its log; killed at the end."""
    log, path = folder / "vllm.log", folder / "s.sock"
    argv = [
        vllm, "serve", str(model), "--uds", str(path), "--dtype", "float32", "--enforce-eager",
        "--kv-cache-memory-bytes", str(KV_BYTES), "--max-num-seqs", str(SEQS),
    ]  # fmt: skip
    sockets = tempfile.mkdtemp(prefix="nl-")
    env = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_RPC_BASE_PATH": sockets,
    }  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(argv, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not healthy(path):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield psutil.Process(process.pid), log.read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(sockets)


def figure(pattern: re.Pattern[str], log: str) -> str:
    match = pattern.search(log)
    assert match is not None, log[-4000:]
    return match[1].replace(",", "")


@pytest.mark.parametrize(
    "kind", ["gemma3", *(pytest.param(kind, marks=pytest.mark.release) for kind in ("qwen2", "opt"))]
)
def test_tokens_and_memory_are_as_predicted(kind: str, vllm: str, tmp_path: Path) -> None:
    (tmp_path / kind).mkdir()
    folder = make(kind, tmp_path / kind)
    model = Model(name=kind, path=str(folder), dtype="float32", max_num_seqs=SEQS)
    config = Config(
        models=(model,),
        layout=Layout(instances_per_socket=1, reserve_cores=0),
        engine=Engine(args=("--enforce-eager",)),
        memory=Memory(kv_cache="128MiB"),
    )
    profile = read_profile(str(folder), "float32")
    topology = read(Path("/"))
    plan = make_plan(topology, config, {kind: profile})
    told = effective_config(model, config, profile, topology.cpu)
    pool = pool_for(profile, told, 1)
    assert told.max_model_len == LENGTH

    with serving(vllm, folder, tmp_path) as (root, log):
        assert int(figure(_TOKENS, log)) == pool.tokens(KV_BYTES, LENGTH)
        # The files hold 16-bit weights; the profile counts them as float32, tied ones once.
        on_disk = sum(f.stat().st_size for f in folder.iterdir() if f.suffix in {".bin", ".safetensors"})
        assert profile.weights_bytes is not None
        assert 0 <= on_disk - profile.weights_bytes / 2 < MIB, "headers are some kilobytes"
        if kind != "opt":  # vLLM logs it for safetensors only, to 0.01 GiB
            assert abs(float(figure(_CHECKPOINT, log)) - profile.weights_bytes / 2 / GIB) < 0.006
        tree = [root, *root.children(recursive=True)]
        resident = sum(process.memory_full_info().pss for process in tree)
        worker = max(process.memory_full_info().uss for process in tree)
    row = plan.ledger[0]
    assert resident <= row.planned_bytes, (resident, row)
    # Without the processes' share, most of the planned memory is used.
    assert worker >= row.weights_bytes + row.kv_bytes * 9 // 10, (worker, row)
