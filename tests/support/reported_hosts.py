"""Hosts, models and last log lines of public reports about other software, written as the reporters had them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from support.synthetic import mask, put

from launcher.base.cpuset import CpuSet

CPU: Final = "sys/devices/system/cpu"
NODE: Final = "sys/devices/system/node"
GROUP: Final = "sys/fs/cgroup"
CGROUP2: Final = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
EPYC: Final = (
    "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel name\t: AMD EPYC 9755 128-Core Processor\n"
    "flags\t\t: fpu avx avx2 fma avx512f avx512_bf16 avx512_vnni"
)
GIB_KIB: Final = 1 << 20

Tensors = Iterable[tuple[str, tuple[int, ...]]]
ReportedCore = tuple[int, int, int, list[int]]
"""Socket, core id, node, cpus."""


@dataclass(frozen=True)
class ReportedNode:
    kib: int
    distances: Sequence[int]
    cpus: Sequence[int] | None = None
    """None: those of its cores."""


@dataclass(frozen=True)
class ReportedHost:
    """The files of /sys and /proc that decide a plan."""

    cores: Sequence[ReportedCore]
    nodes: Mapping[int, ReportedNode]
    l3: Sequence[Sequence[int]] = ()
    online: Sequence[int] | None = None
    cpuinfo: str = EPYC
    files: Mapping[str, object] = field(default_factory=dict)
    allowed: str | None = None
    """Cpus and memory nodes of /proc/self/status, divided by a blank; None: without the file."""

    def write(self, root: Path) -> Path:
        cpus = CpuSet(cpu for *_, its in self.cores for cpu in its)
        online = cpus if self.online is None else CpuSet(self.online)
        for name, which in (("present", cpus), ("possible", cpus), ("online", online), ("offline", CpuSet())):
            put(root / CPU / name, which.format())
        for socket, core, node, its in self.cores:
            package = CpuSet(cpu for of, _, _, some in self.cores if of == socket for cpu in some)
            for cpu in its:
                self._write_cpu(root / CPU / f"cpu{cpu}", (socket, core, node), CpuSet(its), package)
        for name in ("online", "possible"):
            put(root / NODE / name, CpuSet(self.nodes).format())
        for node, about in self.nodes.items():
            self._write_node(root / NODE / f"node{node}", node, about)
        put(root / "proc/cpuinfo", f"processor\t: 0\n{self.cpuinfo}")
        for path, text in self.files.items():
            put(root / path, f"{text}")
        if self.allowed is not None:
            allowed, mems = self.allowed.split()
            put(root / "proc/self/status", f"Cpus_allowed_list:\t{allowed}\nMems_allowed_list:\t{mems}")
        return root

    def _write_cpu(self, folder: Path, place: tuple[int, int, int], core: CpuSet, package: CpuSet) -> None:
        socket, core_id, node = place
        for name, value in (("physical_package_id", socket), ("core_id", core_id), ("die_id", 0)):
            put(folder / "topology" / name, f"{value}")
        for name, group in (("core_cpus", core), ("package_cpus", package)):
            put(folder / "topology" / name, mask(group))
            put(folder / "topology" / f"{name}_list", group.format())
        cpu = int(folder.name.removeprefix("cpu"))
        if cpu:
            put(folder / "online", "1")
        for group in (CpuSet(its) for its in self.l3 if cpu in its):
            cache = {"level": "3", "type": "Unified", "size": "32768K", "shared_cpu_map": mask(group)}
            for name, text in {**cache, "shared_cpu_list": group.format()}.items():
                put(folder / "cache/index3" / name, text)
        (folder / f"node{node}").symlink_to(f"../../node/node{node}")

    def _write_node(self, folder: Path, node: int, about: ReportedNode) -> None:
        its = CpuSet(
            (cpu for _, _, of, some in self.cores if of == node for cpu in some)
            if about.cpus is None
            else about.cpus
        )
        put(folder / "cpumap", mask(its))
        put(folder / "cpulist", its.format())
        free = about.kib * 97 // 100
        sizes = {"MemTotal": about.kib, "MemFree": free, "MemUsed": about.kib - free}
        put(folder / "meminfo", "\n".join(f"Node {node} {name}: {kib} kB" for name, kib in sizes.items()))
        put(folder / "distance", " ".join(map(str, about.distances)))


def _cores(count: int) -> list[ReportedCore]:
    return [(0, cpu, 0, [cpu]) for cpu in range(count)]


def _one_node(gib: int) -> dict[int, ReportedNode]:
    return {0: ReportedNode(gib * GIB_KIB, [10])}


def cpu_time(quota: str = "800000 100000") -> ReportedHost:
    """32 cores in a container with the time of 8 cpus and 64 GiB (ollama/ollama#17916)."""
    return ReportedHost(
        _cores(32), _one_node(128), l3=[range(32)], allowed="0-31 0",
        files={
            "proc/self/mountinfo": CGROUP2, "proc/self/cgroup": "0::/",
            f"{GROUP}/cgroup.controllers": "cpuset cpu memory", f"{GROUP}/cpuset.cpus.effective": "0-31",
            f"{GROUP}/cpuset.mems.effective": "0", f"{GROUP}/memory.max": 64 << 30, f"{GROUP}/cpu.max": quota,
        },
    )  # fmt: skip


def renumbered(cpuset: str, online: Sequence[int]) -> ReportedHost:
    """A system container on a host of 2 x 16 cores, whose lxcfs renumbers cpu/online (lxc/lxcfs#731)."""
    return ReportedHost(
        [(cpu // 16, cpu % 16, cpu // 16, [cpu]) for cpu in range(32)],
        {0: ReportedNode(64 * GIB_KIB, [10, 20]), 1: ReportedNode(64 * GIB_KIB, [20, 10])},
        online=online, l3=[range(16), range(16, 32)], allowed=f"{cpuset} 0-1",
        files={
            "proc/self/mountinfo": CGROUP2, "proc/self/cgroup": "0::/", f"{GROUP}/cpuset.cpus.effective": cpuset,
            f"{GROUP}/cpuset.mems.effective": "0-1", f"{GROUP}/memory.max": "max",
        },
    )  # fmt: skip


THREADRIPPER: Final = ReportedHost(
    [(0, core, core // 6, [core, core + 24]) for core in range(24)],
    {
        node: ReportedNode(
            64 * GIB_KIB if node in {1, 2} else 0, [10 if node == other else 12 for other in range(4)]
        )
        for node in range(4)
    },
    l3=[[cpu for cpu in range(48) if cpu % 24 // 3 == group] for group in range(8)],
    cpuinfo="vendor_id\t: AuthenticAMD\ncpu family\t: 23\nmodel name\t: AMD Ryzen Threadripper 3960X 24-Core Processor\n"
    "flags\t\t: fpu avx avx2 fma",
)
"""24 cores in 4 nodes, memory at nodes 1 and 2, all equally far (numactl/numactl#165)."""

HALF_POPULATED: Final = ReportedHost(
    [(core // 24, core % 24, core // 12, [core]) for core in range(48)],
    {
        node: ReportedNode(
            0 if node % 2 else 256 * GIB_KIB,
            [10 if node == other else 12 if node // 2 == other // 2 else 32 for other in range(4)],
        )
        for node in range(4)
    },
    allowed="0-47 0,2",
)
"""2 sockets x 2 nodes, memory at the first node of each (numactl/numactl#67)."""

RASPBERRY: Final = ReportedHost(
    _cores(4),
    {node: ReportedNode(2 * GIB_KIB, [10] * 8, range(4)) for node in range(8)},
    l3=[range(4)],
    cpuinfo="CPU implementer\t: 0x41\nCPU architecture: 8\nFeatures\t: fp asimd aes asimddp",
    files={"proc/cmdline": "console=tty1 numa_policy=interleave numa=fake=8"},
)
"""4 ARM cores, 16 GiB as 8 emulated nodes that all list cpus 0-3 (vllm-project/vllm#40374)."""

PROXMOX: Final = ReportedHost(
    _cores(32), _one_node(256), online=range(16), l3=[range(32)], allowed="0-15 0",
    files={
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 none rw,nsdelegate",
        "proc/self/cgroup": "0::/init.scope", f"{GROUP}/cpuset.cpus.effective": "0-15",
        f"{GROUP}/cpuset.mems.effective": "0", f"{GROUP}/memory.max": "max", f"{GROUP}/memory.high": "max",
        f"{GROUP}/init.scope/memory.max": "max",
        "proc/meminfo": f"MemTotal: {64 * GIB_KIB} kB\nMemFree: {62 * GIB_KIB} kB\nMemAvailable: {63 * GIB_KIB} kB",
    },
)  # fmt: skip
"""16 of 32 cores and 64 of 256 GiB, limited above the cgroup that the container sees (NethermindEth/nethermind#9383)."""


def _intel_files() -> dict[str, object]:
    files: dict[str, object] = {
        "sys/devices/cpu_core/cpus": "0-11",
        "sys/devices/cpu_atom/cpus": "12-19",
    }
    for cpu in range(20):
        files[f"{CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq"] = 5400000 if cpu < 12 else 4100000
        files[f"{CPU}/cpu{cpu}/cpu_capacity"] = 1024 if cpu < 12 else 623
    return files


INTEL: Final = ReportedHost(
    [
        *((0, 4 * core, 0, [2 * core, 2 * core + 1]) for core in range(6)),
        *((0, 24 + core, 0, [12 + core]) for core in range(8)),
    ],
    _one_node(64),
    l3=[range(20)],
    files=_intel_files(),
    cpuinfo="vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel name\t: 13th Gen Intel(R) Core(TM) i9-13900H\n"
    "flags\t\t: fpu avx avx2 fma avx_vnni",
)
"""6 fast cores of two threads (cpus 0-11) and 8 slow ones (joryirving/home-ops#9050)."""

SLOW_ARM: Final = (*range(5), *range(10, 15))
ARM: Final = ReportedHost(
    [(36, cpu, 0, [cpu]) for cpu in range(20)], _one_node(119), l3=[range(10), range(10, 20)],
    files={f"{CPU}/cpu{cpu}/cpu_capacity": 718 if cpu in SLOW_ARM else 1024 for cpu in range(20)},
    cpuinfo="CPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd87\nFeatures\t: fp asimd bf16 i8mm sve2",
)  # fmt: skip
"""10 slow and 10 fast cores (open-mpi/hwloc#767)."""

SMALL_NODES: Final = "socket:2 node:12(memory=64GiB,near=11) l3:1(size=32MiB) core:8 smt:2"
"""2 x EPYC 9654 with a node for each L3 (kvcache-ai/ktransformers#1284)."""


# --- Models: a description, and weight headers whose data is a hole. ---


def write_model(
    folder: Path, described: Mapping[str, Any], tensors: Tensors, *, description: str = "config.json",
    weights: str = "model.safetensors",
) -> str:  # fmt: skip
    """Elements of two bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / description).write_text(json.dumps(described))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors:
        begin = end
        size = 2
        for length in shape:
            size *= length
        end = begin + size
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    (folder / weights).write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(folder / weights, 8 + len(raw) + end)
    return str(folder)


def _llama_tensors(
    layers: int, hidden: int, inner: int, vocabulary: int, *, q: int, kv: int, prefix: str = "model.",
    without: Iterable[int] = (),
) -> Iterator[tuple[str, tuple[int, ...]]]:  # fmt: skip
    """`q`, `kv`: rows of the projections. `without`: layers that have no attention."""
    skipped = set(without)
    yield f"{prefix}embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        at = f"{prefix}layers.{layer}"
        if layer not in skipped:
            yield f"{at}.self_attn.q_proj.weight", (q, hidden)
            yield f"{at}.self_attn.k_proj.weight", (kv, hidden)
            yield f"{at}.self_attn.v_proj.weight", (kv, hidden)
            yield f"{at}.self_attn.o_proj.weight", (hidden, q)
        for name in ("gate", "up", "down"):
            yield f"{at}.mlp.{name}_proj.weight", (hidden, inner) if name == "down" else (inner, hidden)


def llama(folder: Path, *, large: bool = False) -> str:
    """A Llama of 12.6 GiB, or of 131 GiB with 64 heads."""
    sizes = (80, 8192, 28672, 64, 8, 128256, 8192) if large else (32, 4096, 11008, 32, 32, 32000, 4096)
    layers, hidden, inner, heads, kv_heads, vocabulary, length = sizes
    described = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary, "max_position_embeddings": length, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    its = _llama_tensors(layers, hidden, inner, vocabulary, q=hidden, kv=kv_heads * (hidden // heads))
    return write_model(folder, described, [("lm_head.weight", (vocabulary, hidden)), *its])


def small_qwen(folder: Path) -> str:
    described = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "vocab_size": 151936, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return write_model(folder, described, _llama_tensors(28, 1024, 3072, 151936, q=2048, kv=1024))


_GEMMA_VOCABULARY: Final = 262208
_GEMMA_WHOLE: Final = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "vocab_size": _GEMMA_VOCABULARY,
}  # fmt: skip
# Layers, hidden, inner, rows of q and of k, and further keys.
_GEMMAS: Final[Mapping[str, tuple[int, int, int, int, int, dict[str, int]]]] = {
    "4b": (34, 2560, 10240, 2048, 1024, {}),
    "12b": (48, 3840, 15360, 4096, 2048, {"num_attention_heads": 16, "num_key_value_heads": 8}),
    "27b": (62, 5376, 21504, 4096, 2048, {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}),
    "4b-full": (34, 2560, 10240, 2048, 1024, _GEMMA_WHOLE),
}  # fmt: skip


def gemma3(folder: Path, size: str) -> str:
    """Text configurations that leave out what Gemma3TextConfig fills in; 4b-full is saved with all keys
    (ddalcu/mlx-serve#46)."""
    layers, hidden, inner, q, kv, keys = _GEMMAS[size]
    text = {
        "model_type": "gemma3_text", "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, **keys,
    }  # fmt: skip
    described = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    prefix = "language_model.model."
    tensors = _llama_tensors(layers, hidden, inner, _GEMMA_VOCABULARY, q=q, kv=kv, prefix=prefix)
    return write_model(folder, described, tensors)


def pruned_llama(folder: Path) -> str:
    """49 of 80 layers have attention, 8 KV heads each (turboderp-org/exllamav2#726)."""
    skip = range(40, 71)
    described = {
        "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "hidden_size": 8192,
        "intermediate_size": None, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": None,
        "max_position_embeddings": 131072, "vocab_size": 128256, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "rope_scaling": {"factor": 8.0, "rope_type": "llama3", "original_max_position_embeddings": 8192},
        "block_configs": [
            {
                "attention": {
                    "n_heads_in_group": None if layer in skip else 8, "no_op": layer in skip, "replace_with_linear": False,
                },
                "ffn": {"ffn_mult": 2.625, "no_op": False, "replace_with_linear": False},
            }
            for layer in range(80)
        ],
    }  # fmt: skip
    its = _llama_tensors(80, 8192, 14336, 128256, q=8192, kv=1024, without=skip)
    return write_model(folder, described, [("lm_head.weight", (128256, 8192)), *its])


def kimi_linear(folder: Path) -> str:
    """Latent attention in 7 of 27 layers, numbered from 1, a linear kind in the others (vllm-project/vllm#28228)."""
    full = (4, 8, 12, 16, 20, 24, 27)
    described = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "model_max_length": 1048576, "vocab_size": 163840,
        "linear_attn_config": {
            "full_attn_layers": full, "kda_layers": [layer for layer in range(1, 28) if layer not in full],
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    return write_model(folder, described, [("model.embed_tokens.weight", (163840, 2304))])


def minimax(folder: Path) -> str:
    """Full attention in 10 of 80 layers."""
    described = {
        "architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01", "hidden_size": 6144,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 1048576, "vocab_size": 200064,
        "attn_type_list": [1 if layer % 8 == 7 else 0 for layer in range(80)],
    }  # fmt: skip
    return write_model(folder, described, [("model.embed_tokens.weight", (200064, 6144))])


def mistral(folder: Path) -> str:
    """Mistral's own layout, without a config.json (sgl-project/sglang#28020)."""
    params = {
        "dim": 4096, "n_layers": 36, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
        "norm_eps": 1e-5, "vocab_size": 131072, "max_position_embeddings": 262144, "rope_theta": 1e6,
        "tied_embeddings": False,
    }  # fmt: skip
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("tok_embeddings.weight", (131072, 4096)),
        ("output.weight", (131072, 4096)),
    ]
    for layer in range(36):
        at = f"layers.{layer}"
        tensors += [
            (f"{at}.attention.w{name}.weight", (1024 if name in "kv" else 4096, 4096)) for name in "qkvo"
        ]
        tensors += [
            (f"{at}.feed_forward.w{number}.weight", (4096, 14336) if number == 2 else (14336, 4096))
            for number in (1, 2, 3)
        ]
    return write_model(folder, params, tensors, description="params.json", weights="consolidated.safetensors")


def omni(folder: Path) -> str:
    """The language model is described in thinker_config.text_config (vllm-project/vllm#16645)."""
    text = {
        "model_type": "qwen2_5_omni_text", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768, "vocab_size": 152064,
    }  # fmt: skip
    described = {
        "architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "talker_config": {}, "token2wav_config": {},
        "thinker_config": {
            "model_type": "qwen2_5_omni_thinker", "text_config": text, "audio_config": {}, "vision_config": {},
        },
    }  # fmt: skip
    its = _llama_tensors(28, 3584, 18944, 152064, q=3584, kv=512, prefix="thinker.model.")
    return write_model(folder, described, [("thinker.lm_head.weight", (152064, 3584)), *its])


# --- Last lines of engines that cannot start. ---

_USAGE: Final = (
    "usage: numactl [options] command args ...",
    *(f"       option {number} of numactl and what it takes" for number in range(30)),
    "the last but one line of the usage text",
    "the last line of the usage text",
)
# The first number of an item "is out of range", the end of a range "out of range" (numactl 2.0).
NUMACTL_SAYS: Final = {
    "single": ("cpu argument 5 is out of range", "5"),
    "range-end": ("cpu argument 5 out of range", "0-5"),
    "mixed": ("cpu argument 3-5 is out of range", "0,3-5"),
    "node": ("node argument 3 out of range", "0-3"),
    "rest-of-the-list": ("cpu argument 3,8-11 out of range", "0-3,8-11"),
}


def numactl_log(name: str) -> list[str]:
    said, asked = NUMACTL_SAYS[name]
    return [f"libnuma: Warning: {said}", "", *_USAGE, f"<{asked}> is invalid"]


_SITE: Final = "/opt/venv/lib/python3.12/site-packages"
START_LOGS: Final = {
    "device": f"""INFO [__init__.py:239] No platform detected, vLLM is running on UnspecifiedPlatform
Traceback (most recent call last):
  File "{_SITE}/vllm/config/device.py", line 56, in __post_init__
    raise RuntimeError(
RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG` to turn on
""",
    "cuda": f"""Traceback (most recent call last):
  File "{_SITE}/vllm/platforms/cuda.py", line 18, in <module>
    import vllm._C  # noqa
ImportError: libcudart.so.12: cannot open shared object file: No such file or directory
""",
    "glibcxx": f"""  File "{_SITE}/vllm/_custom_ops.py", line 12, in <module>
ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by {_SITE}/vllm/_C.abi3.so)
""",
    "no-space": f"""  File "{_SITE}/vllm/v1/worker/cpu/shm.py", line 40, in <module>
OSError: [Errno 28] No space left on device: '/psm_3fa9c2'
""",
    "preload": """ERROR: ld.so: object '/usr/lib/libtcmalloc_minimal.so.4' from LD_PRELOAD cannot be preloaded: ignored.
RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: Error code 12
""",
}
