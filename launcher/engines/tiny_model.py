"""Makes a tiny model with random weights to try the launcher.

    python -m launcher.engines.tiny_model OUT_DIR

A two-layer Llama of 1.7 million parameters with a byte-level BPE tokenizer trained here on this Python's own sources;
nothing is downloaded. Its responses are random words. It is written with numpy: torch and transformers take ten seconds
to import.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

# Increased when the model changes; a model of another recipe is replaced.
RECIPE: Final = "numa-launcher tiny model, recipe 3"
RECIPE_FILE: Final = "tiny-model.json"
# Files that vLLM reads; a folder without one of them is incomplete.
FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", RECIPE_FILE)
VOCABULARY: Final = 1024
CONTEXT: Final = 4096
LAYERS: Final = 2
HIDDEN: Final = 256
INNER: Final = 2 * HIDDEN
HEADS: Final = 4  # 256 / 4 = 64 per head: vLLM's CPU attention takes 32, 64, 80, 96, 112, 128 ...
HEAD_SCALE: Final = 10  # scores of 3.2 rms: 0.02 (initial weights) x 16 (root of 256) x 10
LAYER_SCALE: Final = 64
SPECIAL: Final = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# tokenizers.Tokenizer, which is imported only when a model is made.
Tokenizer = Any
Weights = np.ndarray[Any, np.dtype[np.float32]]


def is_complete(folder: Path) -> bool:
    """Whether `folder` contains a complete model of this recipe."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        return bool(json.loads((folder / RECIPE_FILE).read_text(encoding="utf-8"))["recipe"] == RECIPE)
    except (ValueError, KeyError, TypeError):
        return False


def is_foreign(folder: Path) -> bool:
    """Whether `folder` contains files of another origin, which must not be replaced."""
    return (
        folder.exists()
        and not (folder / RECIPE_FILE).is_file()
        and (not folder.is_dir() or any(folder.iterdir()))
    )


def make(folder: Path, *, tied: bool = False) -> None:
    """Writes the model to `folder` atomically: it is built in another folder and renamed.

    `tied`: the output projection is the embedding, as in most small models."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer = _train_tokenizer()
        _save_tokenizer(tokenizer, building)
        _save_weights(tokenizer, building, tied=tied)
        _write_json(building / RECIPE_FILE, {"recipe": RECIPE})
        building.chmod(0o755)  # mkdtemp creates it for the owner only; the service runs as another user
        for file in building.iterdir():
            file.chmod(0o644)
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _train_tokenizer() -> Tokenizer:
    library: Any = importlib.import_module("tokenizers")
    models, decoders = library.models, library.decoders
    pre_tokenizers, trainers = library.pre_tokenizers, library.trainers
    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so that every text has tokens
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    return tokenizer


def _sources() -> list[str]:
    """Training text: the standard library's modules, the same on every machine with this Python version."""
    library = Path(os.__file__).parent
    return [
        (library / name).read_text(encoding="utf-8")
        for name in ("argparse.py", "os.py", "textwrap.py", "this.py")
    ]


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": SPECIAL[0], "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2], "model_max_length": CONTEXT, "chat_template": TEMPLATE,
    })  # fmt: skip


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _save_weights(tokenizer: Tokenizer, folder: Path, *, tied: bool) -> None:
    size = tokenizer.get_vocab_size()
    _write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": size,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2, "head_dim": HIDDEN // HEADS, "max_position_embeddings": CONTEXT,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": tied, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    })  # fmt: skip
    # Unprintable tokens get a zero row, which scores 0, where the others score far on both sides of it: they never
    # win greedily and hardly ever by chance. Wide scores also keep the greedy choice the same whatever the rounding.
    dull = [i for i in range(size) if not _printable(tokenizer, i)]
    weights = random_weights(size, dull, tied=tied)
    shapes = {name: values.shape for name, values in weights.items()}
    write_safetensors(folder / "model.safetensors", shapes, weights.values())


def random_weights(size: int, dull: Iterable[int], *, tied: bool = False) -> dict[str, Weights]:
    """By transformers' names; the same on every machine with this version of numpy. `size`: of the vocabulary. `dull`:
    tokens that score 0. Deviations are those that Llama is trained from."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Weights:
        return random.normal(0.0, 0.02, (rows, columns)).astype(np.float32) * np.float32(scale)

    head = matrix(size, HIDDEN, HEAD_SCALE)
    head[list(dull)] = 0
    ones = np.ones(HIDDEN, np.float32)
    tensors = {"model.embed_tokens.weight": head if tied else matrix(size, HIDDEN), "model.norm.weight": ones}
    if not tied:
        tensors["lm_head.weight"] = head
    # The last token is its own best successor where the embedding is the output, unless the layers drown it.
    loud = LAYER_SCALE if tied else 1.0
    for layer in range(LAYERS):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": values
            for name, values in (
                ("input_layernorm", ones), ("self_attn.q_proj", matrix(HIDDEN, HIDDEN)),
                ("self_attn.k_proj", matrix(HIDDEN // 2, HIDDEN)), ("self_attn.v_proj", matrix(HIDDEN // 2, HIDDEN)),
                ("self_attn.o_proj", matrix(HIDDEN, HIDDEN, loud)), ("post_attention_layernorm", ones),
                ("mlp.gate_proj", matrix(INNER, HIDDEN)), ("mlp.up_proj", matrix(INNER, HIDDEN)),
                ("mlp.down_proj", matrix(HIDDEN, INNER, loud)),
            )
        }  # fmt: skip
    return tensors


def write_safetensors(file: Path, shapes: Mapping[str, tuple[int, ...]], values: Iterable[Weights]) -> None:
    """Tensors by name, in bfloat16; `values` in the same order. The format: https://huggingface.co/docs/safetensors,
    "Format"."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8, as those that the library writes
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for each in values:
            out.write(bfloat16(each).tobytes())


def bfloat16(values: Weights) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Rounded to the nearest, as 16 bits each."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _printable(tokenizer: Tokenizer, token: int) -> bool:
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    return text not in SPECIAL and text.isascii() and text.strip().isprintable()


def main(arguments: list[str] | None = None) -> int:
    """0: the folder contains the model. 2: the folder contains other files."""
    parser = argparse.ArgumentParser(description="Make a tiny random-weight model for trying things out.")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    folder = parser.parse_args(arguments).out_dir.absolute()
    if is_complete(folder):
        print(f"{folder}: the tiny model is there already")
        return 0
    if is_foreign(folder):
        print(f"cannot make the tiny model: {str(folder)!r} contains other files", file=sys.stderr)
        print("choose an empty folder, or one that does not exist", file=sys.stderr)
        return 2
    make(folder)
    print(f"{folder}: a tiny model with random weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
