"""The model in GGUF that a path names."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from support.gguf_headers import entry, text, write_gguf

from launcher.base.errors import LauncherError, PassingError
from launcher.models.gguf_model import gguf_files, read_gguf_profile
from launcher.models.layers import LayerKind

PARTS = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


def test_a_files_header_is_its_profile(tmp_path: Path) -> None:
    """One matrix in Q8_0 (34 bytes for 32 elements), one in float16."""
    file = write_gguf(tmp_path / "m.gguf", ("token_embd.weight", (256, 2), 1), ("output.weight", (256, 2), 8))
    profile = read_gguf_profile(str(file))
    assert profile.weights_bytes == 2 * 512 + 512 // 32 * 34
    # K and V of 2 heads of 64 elements, 2 layers, 16 bits.
    assert profile.kv_bytes_per_token == 2 * 2 * 64 * 2 * 2
    assert (profile.max_model_len, profile.vocab_size, profile.known) == (4096, 2, True)
    assert profile.kv_source.startswith("header: ")


@pytest.mark.parametrize(
    ("kind", "rows", "more", "copied"),
    [
        (2, 8, (), True), (12, 8, (), True), (20, 8, (), True), (39, 8, (), True),
        (14, 8, (), False), (8, 8, (), False), (2, 12, (), False),
        (2, 8, ("output.weight",), False), (2, 8, ("blk.0.attn_output.weight",), True),
    ],
)  # fmt: skip
def test_an_embedding_that_is_repacked_as_the_output_is_loaded_twice(
    tmp_path: Path, kind: int, rows: int, more: tuple[str, ...], copied: bool
) -> None:
    """As the buffers of llama-server say it at its start (build 11549, AVX2)."""
    others = ((name, (256, rows), kind) for name in more)
    file = write_gguf(tmp_path / "m.gguf", ("token_embd.weight", (256, rows), kind), *others)
    profile = read_gguf_profile(str(file))
    assert profile.weights_bytes is not None
    assert profile.output_copy_bytes == (profile.weights_bytes // (1 + len(more)) if copied else 0)


@pytest.mark.parametrize(
    ("architecture", "pattern", "sliding"),
    [
        # Layers as llama-server's KV caches show them (build 11549). None: the header does not say it.
        ("gemma2", None, 6), ("gemma3", None, 10), ("gpt-oss", None, 6), ("llama", None, 0),
        ("gemma3", 4, 9), ("gpt-oss", 4, 9), ("gpt-oss", 0, 12), ("gemma3", [1] * 9 + [0] * 3, 9),
    ],
)  # fmt: skip
def test_layers_that_slide(
    tmp_path: Path, architecture: str, pattern: int | list[int] | None, sliding: int
) -> None:
    numbers = {
        "block_count": 12, "embedding_length": 256, "attention.head_count": 8, "attention.head_count_kv": 4,
        "attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 512,
    }  # fmt: skip
    entries = [entry("general.architecture", 8, text(architecture))]
    entries += [entry(f"{architecture}.{key}", 4, struct.pack("<I", its)) for key, its in numbers.items()]
    key = f"{architecture}.attention.sliding_window_pattern"
    if isinstance(pattern, list):
        entries.append(entry(key, 9, struct.pack(f"<IQ{len(pattern)}?", 7, len(pattern), *pattern)))
    elif pattern is not None:
        entries.append(entry(key, 4, struct.pack("<I", pattern)))
    profile = read_gguf_profile(str(write_gguf(tmp_path / "m.gguf", entries=entries)))
    assert profile.keeps_windows is bool(sliding)
    if sliding:
        kinds = {its.kind: (its.count, its.window) for its in profile.kv_layers}
        full = {LayerKind.FULL: (12 - sliding, None)} if sliding < 12 else {}
        assert kinds == {LayerKind.SLIDING: (sliding, 512)} | full


def test_an_encoder_has_no_output(tmp_path: Path) -> None:
    causal = entry("llama.attention.causal", 7, b"\0")
    file = write_gguf(tmp_path / "m.gguf", ("token_embd.weight", (256, 8), 2), extra=(causal,))
    assert read_gguf_profile(str(file)).output_copy_bytes == 0


@pytest.mark.parametrize(("kind", "stored"), [(40, 36), (41, 9)])
def test_four_bits_and_one_bit(kind: int, stored: int, tmp_path: Path) -> None:
    """NVFP4: 36 bytes for 64 elements; Q1_0: 18 for 128."""
    file = write_gguf(
        tmp_path / "m.gguf", ("token_embd.weight", (256, 2), kind), ("output_norm.weight", (256,), 0)
    )
    profile = read_gguf_profile(str(file))
    assert (profile.weights_bytes, profile.unknown_types) == (512 // 64 * stored + 1024, ())


def test_tensors_of_a_type_that_is_not_known_have_the_size_of_their_data(tmp_path: Path) -> None:
    """Here a byte for each element: up to the next tensor, which begins at a multiple of 32, and up to the end."""
    shapes = (("a", (100,), 99), ("b", (64,), 0), ("c", (50,), 77))
    profile = read_gguf_profile(str(write_gguf(tmp_path / "m.gguf", *shapes)))
    assert (profile.weights_bytes, profile.unknown_types) == (128 + 256 + 50, (77, 99))


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_is_cut_is_refused(tmp_path: Path, part: int) -> None:
    files = [write_gguf(tmp_path / name, (f"blk.{name}.w", (32, 2), 0)) for name in PARTS]
    whole = files[part].read_bytes()
    assert read_gguf_profile(str(files[0])).weights_bytes == 2 * 256
    files[part].write_bytes(whole[:-1])
    why = f"{PARTS[part]} has {len(whole) - 1} of {len(whole)} bytes: it is truncated"
    with pytest.raises(LauncherError, match=why) as refused:
        read_gguf_profile(str(files[0]))
    assert refused.value.remedy.startswith("download the model again")


def test_texts_that_nobody_reads_may_be_any_bytes(tmp_path: Path) -> None:
    """A token may be a part of a character."""
    tokens = struct.pack("<IQ", 8, 2) + struct.pack("<Q", 1) + b"\xff" + text("b")
    extra = (
        entry("general.name", 8, struct.pack("<Q", 1) + b"\xff"),
        entry("tokenizer.ggml.merges", 9, tokens),
    )
    file = write_gguf(tmp_path / "m.gguf", ("blk.0.w", (32, 2), 0), extra=extra)
    assert read_gguf_profile(str(file)).tokenizer_entries == 4


def test_a_list_without_values_is_damage(tmp_path: Path) -> None:
    entries = numbers(
        "llama", block_count=2, embedding_length=256, attention__head_count=4, attention__head_count_kv=[]
    )
    file = write_gguf(tmp_path / "m.gguf", ("blk.0.w", (32, 2), 0), entries=entries)
    with pytest.raises(LauncherError, match=r"llama\.attention\.head_count_kv is a list without values"):
        read_gguf_profile(str(file))


@pytest.mark.parametrize(
    ("more", "latent", "token"),
    [
        ({"attention__key_length": 576, "attention__key_length_mla": 192, "attention__value_length_mla": 128,
          "attention__head_count_kv": 1}, True, 2 * 576 * 2),
        # Converted before llama.cpp kept latents: keys and values of all heads.
        ({"attention__key_length": 192, "attention__value_length": 128, "attention__head_count_kv": 16}, False,
         2 * 16 * 2 * 192 * 2),
    ],
)  # fmt: skip
def test_a_latent_is_kept_where_the_file_has_its_projections(
    more: dict[str, int | list[int]], latent: bool, token: int, tmp_path: Path
) -> None:
    entries = numbers(
        "deepseek2", block_count=2, embedding_length=2048, context_length=4096, attention__head_count=16,
        attention__kv_lora_rank=512, rope__dimension_count=64, **more,
    )  # fmt: skip
    tensors = [(f"blk.{layer}.attn_kv_a_mqa.weight", (2048, 576), 1) for layer in range(2)]
    profile = read_gguf_profile(str(write_gguf(tmp_path / "m.gguf", *tensors, entries=entries)))
    assert (profile.mla, profile.kv_bytes_per_token) == (latent, token)


def test_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    write_gguf(tmp_path / PARTS[0], ("blk.0.w", (32, 2), 0))
    write_gguf(
        tmp_path / PARTS[1], ("blk.1.w", (32, 2), 0), entries=[entry("split.no", 2, struct.pack("<H", 1))]
    )
    write_gguf(tmp_path / "mmproj-m.gguf", ("v.w", (32, 2), 0))
    for path in (tmp_path, tmp_path / PARTS[0]):
        assert [file.name for file in gguf_files(str(path))] == list(PARTS)
        assert read_gguf_profile(str(path)).weights_bytes == 2 * 64 * 4


def test_a_later_part_is_no_model(tmp_path: Path) -> None:
    for name in PARTS:
        write_gguf(tmp_path / name)
    with pytest.raises(LauncherError, match="it is part 2 of 2") as refused:
        gguf_files(str(tmp_path / PARTS[1]))
    assert PARTS[0] in refused.value.remedy


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_missing_may_come(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / name)
    missing = next(other for other in PARTS if other != name)
    with pytest.raises(PassingError, match=missing):
        gguf_files(str(tmp_path))


def test_a_directory_has_exactly_one_model(tmp_path: Path) -> None:
    with pytest.raises(PassingError, match="the directory is empty"):
        gguf_files(str(tmp_path))
    (tmp_path / "README.md").write_text("")
    with pytest.raises(LauncherError, match=r"no \*\.gguf file"):
        gguf_files(str(tmp_path))
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(LauncherError, match=r"2 models: a-Q4_0\.gguf, a-Q8_0\.gguf") as refused:
        gguf_files(str(tmp_path))
    assert "one of these files" in refused.value.remedy


@pytest.mark.parametrize(
    ("path", "passing"), [("m.gguf", True), ("/no/such/folder", True), ("org/model", False)]
)
def test_a_path_that_is_not_there(
    path: str, passing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository id never becomes a file."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LauncherError, match=f"cannot read model '{path}': no such file") as refused:
        read_gguf_profile(path)
    assert isinstance(refused.value, PassingError) is passing


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("not one")
    with pytest.raises(LauncherError, match=r"m\.gguf is not a GGUF file") as refused:
        read_gguf_profile(str(tmp_path / "m.gguf"))
    assert "GGUF" in refused.value.remedy
    encoder = write_gguf(tmp_path / "e.gguf", entries=[entry("general.architecture", 8, text("clip"))])
    with pytest.raises(LauncherError, match=r"e\.gguf describes no language model .*'clip'"):
        read_gguf_profile(str(encoder))


def test_layers_without_attention_have_no_kv_cache(tmp_path: Path) -> None:
    """Of an architecture that no table knows, by the tensors."""
    entries = [
        entry("general.architecture", 8, text("qwen3next")),
        entry("qwen3next.block_count", 4, struct.pack("<I", 4)),
        entry("qwen3next.embedding_length", 4, struct.pack("<I", 256)),
        entry("qwen3next.attention.head_count", 4, struct.pack("<I", 4)),
        entry("qwen3next.attention.head_count_kv", 4, struct.pack("<I", 2)),
        entry("qwen3next.context_length", 4, struct.pack("<I", 4096)),
    ]
    attention = [(f"blk.3.attn_{which}.weight", (256, 128), 1) for which in ("k", "v")]
    others = [(f"blk.{layer}.ssm_out.weight", (256, 256), 1) for layer in range(3)]
    file = write_gguf(tmp_path / "m.gguf", *others, *attention, entries=entries)
    assert read_gguf_profile(str(file)).kv_bytes_per_token == 2 * 2 * 64 * 2


def test_a_remedy_names_what_it_reads(tmp_path: Path) -> None:
    with pytest.raises(PassingError, match="the directory is empty") as refused:
        gguf_files(str(tmp_path))
    assert refused.value.remedy.startswith("give models.path a model in GGUF")


# --- Recurrent layers, and other keys of the header. ---


def numbers(architecture: str, **values: int | list[int]) -> list[bytes]:
    """The entries of a header, with keys of the architecture; "__" is a dot."""
    found = [entry("general.architecture", 8, text(architecture))]
    for key, value in values.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, list):
            found.append(entry(name, 9, struct.pack(f"<IQ{len(value)}I", 4, len(value), *value)))
        else:
            found.append(entry(name, 4, struct.pack("<I", value)))
    return found


SSM: dict[str, int | list[int]] = {
    "ssm__conv_kernel": 4, "ssm__inner_size": 1536, "ssm__state_size": 128, "ssm__group_count": 1,
}  # fmt: skip


def test_a_model_of_recurrent_layers_keeps_one_state_of_a_request(tmp_path: Path) -> None:
    """llama-server (build 11549) reports 36.98 MiB for four requests of this shape, and 9.246 MiB for a checkpoint."""
    entries = numbers("mamba2", block_count=12, embedding_length=768, context_length=4096, **SSM)
    tensors = [(f"blk.{layer}.ssm_in.weight", (768, 3352), 1) for layer in range(12)]
    profile = read_gguf_profile(str(write_gguf(tmp_path / "m.gguf", *tensors, entries=entries)))
    (state,) = profile.kv_layers
    assert (profile.known, profile.kv_bytes_per_token, state.kind) == (True, 0, LayerKind.STATE)
    assert state.count * state.state_bytes / 2**20 == pytest.approx(9.246, abs=0.001)
    assert (profile.recurrent_widths, profile.max_model_len) == ((1536, 1792), 4096)


@pytest.mark.parametrize(
    ("architecture", "more", "tensors", "heads", "state"),
    [
        # Gated delta nets with fused projections; every fourth layer has attention.
        ("qwen3next", SSM, ["ssm_out", "attn_qkv"], 2, 4 * (3 * (1536 + 256) + 128 * 1536)),
        # Keys and values of their own, which are not kept: KV heads of the header are 0.
        ("kimi-linear", {"kda__head_dim": 64, "ssm__conv_kernel": 4}, ["ssm_g_a", "attn_k"], [0, 0, 0, 2],
         4 * 4 * 64 * (3 * 3 + 64)),
        ("lfm2", {"shortconv__l_cache": 3}, ["shortconv.conv"], [0, 0, 0, 2], 4 * 256 * 2),
        ("rwkv6", {"wkv__head_size": 64}, ["time_mix_key"], 2, 4 * 256 * (64 + 2)),
        ("unheard", {}, ["ssm_out"], 2, 0),
    ],
)  # fmt: skip
def test_states_and_keys_of_a_hybrid_model(  # noqa: PLR0917  a table
    architecture: str,
    more: dict[str, int | list[int]],
    tensors: list[str],
    heads: int | list[int],
    state: int,
    tmp_path: Path,
) -> None:
    entries = numbers(
        architecture, block_count=4, embedding_length=256, context_length=4096, attention__head_count=4,
        attention__head_count_kv=heads, **more,
    )  # fmt: skip
    recurrent = [(f"blk.{layer}.{name}.weight", (256, 256), 1) for layer in range(3) for name in tensors]
    attention = [(f"blk.3.attn_{which}.weight", (256, 128), 1) for which in ("k", "v")]
    file = write_gguf(tmp_path / "m.gguf", *recurrent, *attention, entries=entries)
    profile = read_gguf_profile(str(file))
    assert profile.kv_bytes_per_token == 2 * 2 * 64 * 2
    states = [its for its in profile.kv_layers if its.kind is LayerKind.STATE]
    assert [(its.count, its.state_bytes) for its in states] == [(3, state)]
    assert "3 recurrent layers x" in profile.kv_source


def test_layers_with_attention_and_a_state_have_both(tmp_path: Path) -> None:
    entries = numbers(
        "falcon-h1", block_count=2, embedding_length=256, context_length=4096, attention__head_count=4,
        attention__head_count_kv=2, **SSM,
    )  # fmt: skip
    names = [f"blk.{layer}.{name}.weight" for layer in range(2) for name in ("attn_k", "attn_v", "ssm_in")]
    file = write_gguf(tmp_path / "m.gguf", *((name, (256, 128), 1) for name in names), entries=entries)
    kinds = {(its.kind, its.count) for its in read_gguf_profile(str(file)).kv_layers}
    assert kinds == {(LayerKind.FULL, 2), (LayerKind.STATE, 2)}


def test_experts_tokenizer_and_pooling_of_the_header(tmp_path: Path) -> None:
    entries = numbers(
        "qwen3moe", block_count=2, embedding_length=256, attention__head_count=4, context_length=4096,
        expert_used_count=8, expert_feed_forward_length=64, feed_forward_length=512, pooling_type=3,
    )  # fmt: skip
    entries += [
        entry(f"tokenizer.ggml.{name}", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))
        for name in ("tokens", "merges")
    ]
    file = write_gguf(tmp_path / "m.gguf", ("blk.0.w", (32, 2), 0), entries=entries)
    profile = read_gguf_profile(str(file))
    assert (profile.expert_size, profile.experts_used, profile.intermediate_size) == (64, 8, 512)
    assert (profile.tokenizer_entries, profile.splits_inputs, profile.recurrent_widths) == (4, True, (0, 0))
    assert (profile.computed_whole, profile.architecture) == (False, "qwen3moe")


def test_an_encoder_is_computed_whole(tmp_path: Path) -> None:
    entries = numbers(
        "nomic-bert", block_count=2, embedding_length=256, attention__head_count=4, context_length=2048
    )
    assert read_gguf_profile(
        str(write_gguf(tmp_path / "m.gguf", ("blk.0.w", (32, 2), 0), entries=entries))
    ).computed_whole


def test_a_header_that_cannot_be_read_keeps_its_length(tmp_path: Path) -> None:
    entries = numbers("novel", block_count=2, context_length=8192)
    file = write_gguf(tmp_path / "m.gguf", ("blk.0.w", (32, 2), 0), entries=entries)
    profile = read_gguf_profile(str(file))
    assert not profile.known
    assert profile.max_model_len == 8192
    assert "the file's header" in (profile.unread or "")
