"""Real ZenTorch under real vLLM: what a plan allows gives the greedy tokens that vLLM gives without it.

vLLM takes its Zen platform where /proc/cpuinfo says AuthenticAMD and avx512; the runs here see an edited one, in a mount
namespace of their own, so that they take it on any CPU with AVX-512.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.engines import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

VARIABLE = "NUMA_LAUNCHER_TEST_ZENTORCH"
"""A folder with zentorch and what it imports, as pip install --target makes it."""
# For vLLM 0.32 with torch 2.13.0 (launcher/engines/vllm/compatibility.toml).
PACKAGES = ("zentorch==2.13.0.1", "deprecated", "wrapt")
TOKENS = 24

Tokens = list[list[int]]
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=8,
              kv_cache_memory_bytes=64 << 20)
    sampling = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]), ignore_eos=True)
    outputs = llm.generate(["Hello, my name is", "import os\\n", "The quick brown fox"], sampling)
    print("TOKENS", json.dumps([list(out.outputs[0].token_ids) for out in outputs]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, vllm: str) -> Path:
    """A folder with zentorch; a skip that is counted where there is none, or where it could not run."""
    del vllm
    cpuinfo = Path("/proc/cpuinfo").read_text()
    if "avx512f" not in cpuinfo or "amx_tile" in cpuinfo:
        pytest.skip(
            "this machine's CPU lacks AVX-512, or has AMX, where vLLM's eager bfloat16 dies of SIGILL"
        )
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    folder = tmp_path_factory.mktemp("zentorch")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(
            f"pip can't get {PACKAGES[0]} ({done.stderr.strip()[-200:]}): set {VARIABLE} to a folder with it"
        )
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The tiny model with tied embeddings (True) and without (False)."""
    folder = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        tiny_model.make(folder / str(tied), tied=tied)
    return {tied: folder / str(tied) for tied in (False, True)}


def run(model: Path, folder: Path, site: Path | None, **env: str) -> tuple[Tokens, str]:
    """Greedy tokens, and how the linears ran: "True" or "False" for prepacked by ZenTorch, "" for not by ZenTorch."""
    script, cpuinfo = folder / "tokens.py", folder / "cpuinfo"
    script.write_text(SCRIPT)
    cpuinfo.write_text(
        re.sub(r"(?m)^(vendor_id\s*: ).*", r"\1AuthenticAMD", Path("/proc/cpuinfo").read_text())
    )
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    env |= {} if site is None else {"PYTHONPATH": str(site)}
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    done = subprocess.run(
        ["unshare", *own, "--mount", "sh", "-c", 'mount --bind "$0" /proc/cpuinfo && exec "$@"', str(cpuinfo),
         sys.executable, str(script), str(model), str(TOKENS)],
        capture_output=True, text=True, check=False, timeout=900, env=os.environ | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"using zentorch_linear_unary \(prepacked=(\w+)\)", done.stdout + done.stderr)
    line = next(s for s in done.stdout.splitlines() if s.startswith("TOKENS"))
    return json.loads(line[7:]), found[1] if found else ""


@pytest.fixture(scope="module")
def plain(models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Tokens]:
    """What vLLM says without ZenTorch; one run for each model that is asked for."""

    @functools.cache
    def of(tied: bool) -> Tokens:
        tokens, how = run(models[tied], tmp_path_factory.mktemp("plain"), None)
        assert how == ""
        return tokens

    return of


@pytest.mark.parametrize(
    "tied",
    [
        pytest.param(True, id="tied, prepacked"),
        pytest.param(False, id="not tied, not prepacked", marks=pytest.mark.release),
    ],
)
def test_what_the_plan_allows_gives_the_same_tokens(
    tied: bool, models: dict[bool, Path], plain: Callable[[bool], Tokens], site: Path, tmp_path: Path
) -> None:
    tokens, how = run(models[tied], tmp_path, site, VLLM_ZENTORCH_WEIGHT_PREPACK="1" if tied else "0")
    assert how == str(tied)
    assert tokens == plain(tied)


@pytest.mark.release
def test_what_the_plan_refuses_gives_others(
    models: dict[bool, Path], plain: Callable[[bool], Tokens], site: Path, tmp_path: Path
) -> None:
    """Where ZenDNN repacks in place. Fails when ZenTorch no longer does: then `tied-without-prepack` can go."""
    in_place = {"VLLM_ZENTORCH_WEIGHT_PREPACK": "0", "ZENDNNL_MATMUL_WEIGHT_CACHE": "2"}
    tokens, how = run(models[True], tmp_path, site, **in_place)
    assert how == "False"
    assert tokens != plain(True)
