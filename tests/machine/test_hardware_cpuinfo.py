"""Records of /proc/cpuinfo from several architectures."""

from __future__ import annotations

from launcher.machine.hardware import parse_cpuinfo
from launcher.machine.topology import CpuInfo


def test_x86_takes_the_first_record() -> None:
    text = (
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC 9755\n"
        "flags\t\t: fpu avx512f\n\nprocessor\t: 1\nvendor_id\t: Other\nbugs\t: x\n"
    )
    info = parse_cpuinfo(text)
    assert info == CpuInfo("AuthenticAMD", "AMD EPYC 9755", 26, frozenset({"fpu", "avx512f"}))
    assert info.is_zen


def test_arm64_has_codes_for_names() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x48\nCPU architecture: 8\nCPU part\t: 0xd01\n"
    assert parse_cpuinfo(text) == CpuInfo("HiSilicon", "Kunpeng-920", 8, frozenset({"fp", "asimd"}))


def test_arm64_with_an_unknown_implementer() -> None:
    assert parse_cpuinfo("CPU implementer : 0xee").vendor == "implementer 0xee"
    assert parse_cpuinfo("CPU implementer : 0x41\nCPU part : 0xfff").model == "ARM part 0xfff"


def test_power_and_nothing() -> None:
    power = parse_cpuinfo("processor : 0\ncpu : POWER9, altivec supported\n\n")
    assert (power.vendor, power.model) == ("IBM", "POWER9, altivec supported")
    assert parse_cpuinfo("") == CpuInfo("", "", None, frozenset())
