"""Virtual hosts: boot one with a chosen layout of sockets, NUMA nodes and L3 domains, run a script in it as root.

    PYTHONPATH=tests python -m vm.vm LAYOUT SCRIPT [FILE...]

SCRIPT and the FILEs are put into one folder, which the guest has as its working directory; what the
script writes there comes back. Emulated (TCG), so it needs neither KVM nor rights, and is the same
everywhere: about 20 to 60 s to boot, and everything inside takes 10 to 30 times as long as outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vm.image import HostToolError, Image, image

# A guest that has not reached user space by then is restarted once: its script has not begun.
BOOT_TIMEOUT_S: Final = 240.0
TRIES: Final = 2

# Flags added to the guest's /proc/cpuinfo for programs that read it; the emulation cannot run these instructions.
AVX512: Final = "avx512f avx512dq avx512cd avx512bw avx512vl avx512_bf16 avx512_vnni"

# An EPYC of family 19h, one L3 per die. Linux takes AMD's L3 domains from the topoext leaves, which qemu's
# emulation filters out unless forced; what it can't emulate and software would use is switched off by name.
CPU: Final = (
    "EPYC-Milan,+topoext,family=25,model=17,stepping=1,model-id=AMD EPYC 9354 32-Core Processor (virtual),"
    "x-force-features=on,-pcid,-invpcid,-rdseed,-sha-ni,-rdpid,-xsavec,-xsaves,-osvw,-perfctr-core,-fxsr-opt,"
    "-amd-ssbd,-amd-stibp,-clzero,-ibpb,-ibrs,-wbnoinvd,-xsaveerptr,-nrip-save,-misalignsse,-fsrm"
)


@dataclass(frozen=True)
class Layout:
    """A machine. One die is one L3 domain; cpus are dealt to the nodes that have some, evenly and in order."""

    sockets: int
    dies: int
    """Per socket."""
    cores: int
    """Per die."""
    nodes: tuple[bool, ...]
    """Per NUMA node: whether it has cpus."""
    distances: tuple[tuple[int, ...], ...]
    node_mib: int = 384

    @property
    def cpus(self) -> int:
        """Of the whole machine."""
        return self.sockets * self.dies * self.cores

    def node_cpus(self) -> tuple[tuple[int, ...], ...]:
        """Of each node."""
        share = self.cpus // sum(self.nodes)
        dealt: list[tuple[int, ...]] = []
        start = 0
        for has_cpus in self.nodes:
            dealt.append(tuple(range(start, start + share)) if has_cpus else ())
            start += share if has_cpus else 0
        return tuple(dealt)


def _rows(count: int, near: int, far: int, per_socket: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(10 if a == b else near if a // per_socket == b // per_socket else far for b in range(count))
        for a in range(count)
    )


LAYOUTS: Final = {
    "2s8": Layout(2, 2, 2, (True,) * 2, _rows(2, 10, 32, 1)),
    # Two sockets of two nodes.
    "nps2": Layout(2, 2, 2, (True,) * 4, _rows(4, 12, 32, 2), node_mib=512),
    # Two EPYC at NPS4, with two cores in each L3 domain.
    "nps4": Layout(2, 4, 2, (True,) * 8, _rows(8, 12, 32, 4), node_mib=320),
    # Node 2 is memory on a CXL device: no cpus.
    "cxl": Layout(2, 2, 2, (True, True, False), ((10, 32, 50), (32, 10, 60), (50, 60, 10)), node_mib=512),
}


@dataclass(frozen=True)
class Run:
    """The result of a guest's run."""

    status: int
    """The script's exit code."""
    output: str
    folder: Path
    """Its working folder."""
    boot_s: float
    """Seconds until user space ran, by this machine's clock."""
    total_s: float


def run(layout: Layout, script: Path, folder: Path, *, timeout_s: float, files: Iterable[Path] = ()) -> Run:
    """Boot, run `script` with `folder` as its working directory, power off. Raises HostToolError."""
    disk = image()
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, folder)
    shutil.copy(script, folder / "script")
    (folder / "script").chmod(0o755)
    (folder / "cpu-flags").write_text(AVX512)
    began = time.monotonic()
    for attempt in range(TRIES):
        boot_s = _boot(layout, disk, folder, began + timeout_s, last=attempt == TRIES - 1)
        if boot_s is not None:
            break
    if not (folder / "status").is_file():
        raise HostToolError(
            f"the guest ended without a result after {time.monotonic() - began:.0f} s:\n{_last_words(folder)}"
        )
    return Run(
        status=int((folder / "status").read_text()),
        output=(folder / "output").read_text(errors="replace"),
        folder=folder,
        boot_s=boot_s or 0.0,
        total_s=time.monotonic() - began,
    )


def _boot(layout: Layout, disk: Image, folder: Path, deadline: float, *, last: bool) -> float | None:
    """Runs a guest once. Returns the seconds to user space; None if it did not get there."""
    began, booted = time.monotonic(), None
    with (folder / "qemu.log").open("wb") as log, _child(command(layout, disk, folder), log.fileno()) as qemu:
        while qemu.poll() is None:
            now = time.monotonic()
            if booted is None and (folder / "booted").is_file():
                booted = now - began
            if now > deadline:
                raise HostToolError(
                    f"the guest was not ready in time; its last words:\n{_last_words(folder)}"
                )
            if booted is None and not last and now - began > BOOT_TIMEOUT_S:
                return None
            time.sleep(0.1)
    return booted


@contextlib.contextmanager
def _child(argv: list[str], log: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)  # the disk is a snapshot: nothing to save


def command(layout: Layout, disk: Image, folder: Path) -> list[str]:
    """qemu's."""
    words = [
        "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none",
        "-accel", "tcg,thread=multi,tb-size=512", "-machine", "q35,smbus=off,usb=off,vmport=off", "-cpu", CPU,
        "-smp", f"{layout.cpus},sockets={layout.sockets},dies={layout.dies},cores={layout.cores},threads=1",
        "-m", f"{layout.node_mib * len(layout.nodes)}M",
    ]  # fmt: skip
    for node, cpus in enumerate(layout.node_cpus()):
        words += ["-object", f"memory-backend-ram,id=m{node},size={layout.node_mib}M"]
        dealt = f",cpus={cpus[0]}-{cpus[-1]}" if cpus else ""
        words += ["-numa", f"node,nodeid={node},memdev=m{node}{dealt}"]
    for a, row in enumerate(layout.distances):
        for b, distance in enumerate(row):
            words += ["-numa", f"dist,src={a},dst={b},val={distance}"]
    # Without lpj= every emulated cpu calibrates its delay loop, 0.7 s each. norandmaps: what was translated for one
    # process is used for the next one of the same program, which halves the start of a Python. nosmap, nosmep: a
    # system call costs half.
    kernel = (
        "console=ttyS0 loglevel=4 panic=-1 mitigations=off nokaslr norandmaps nosmap nosmep no_timer_check tsc=reliable "
        "lpj=10000000 nowatchdog rcupdate.rcu_cpu_stall_suppress=1 random.trust_cpu=on 8250.nr_uarts=1 systemd.show_status=0"
    )
    return [
        *words, "-kernel", str(disk.kernel), "-initrd", str(disk.initrd), "-append", kernel,
        "-drive", f"file={disk.disk},if=none,id=disk,format=raw,snapshot=on,cache=unsafe",
        "-device", "virtio-blk-pci,drive=disk", "-device", "virtio-rng-pci",
        "-virtfs", f"local,path={folder},mount_tag=host,security_model=none,multidevs=remap",
        "-serial", f"file:{folder / 'console.log'}",
    ]  # fmt: skip


def _last_words(folder: Path) -> str:
    lines: list[str] = []
    for name in ("qemu.log", "console.log", "output"):
        with contextlib.suppress(OSError):
            text = (folder / name).read_text(errors="replace").replace("\0", "")
            lines += [f"{name}: {line}" for line in text.splitlines() if "TCG doesn't support" not in line][
                -15:
            ]
    return "\n".join(lines)


def main() -> int:
    """Prints the script's output and exits with its code."""
    if len(sys.argv) < 3 or sys.argv[1] not in LAYOUTS:
        print(f"usage: python -m vm.vm {'|'.join(LAYOUTS)} SCRIPT [FILE...]", file=sys.stderr)
        return 2
    name, script, *files = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = run(LAYOUTS[name], Path(script), Path(folder), timeout_s=float(os.environ.get("VM_TIMEOUT_S", "900")),
                       files=map(Path, files))  # fmt: skip
        except HostToolError as error:
            print(error, file=sys.stderr)
            return 125
        print(done.output, end="")
        print(
            f"booted in {done.boot_s:.1f} s, {done.total_s:.1f} s in all, exit {done.status}", file=sys.stderr
        )
        return done.status


if __name__ == "__main__":
    sys.exit(main())
