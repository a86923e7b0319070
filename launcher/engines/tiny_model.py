"""Makes a tiny model with random weights to try the launcher.

    python -m launcher.engines.tiny_model OUT_DIR

A two-layer Llama of 1.8 million parameters with a byte-level BPE tokenizer trained here on this
Python's own sources; nothing is downloaded. Its responses are random words. torch and transformers are
imported only when a model has to be made.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

# Increased when the model changes; a model of another recipe is replaced.
RECIPE: Final = "numa-launcher tiny model, recipe 2"
RECIPE_FILE: Final = "tiny-model.json"
# Files that vLLM reads; a folder without one of them is incomplete.
FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", RECIPE_FILE)
VOCABULARY: Final = 1024
CONTEXT: Final = 4096
HIDDEN: Final = 256
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
        (building / RECIPE_FILE).write_text(json.dumps({"recipe": RECIPE}) + "\n", encoding="utf-8")
        building.chmod(
            0o755
        )  # mkdtemp and safetensors create files for the owner only; the service runs as another user
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
    transformers: Any = importlib.import_module("transformers")
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL[3:]), model_max_length=CONTEXT,
    )  # fmt: skip
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


def _save_weights(tokenizer: Tokenizer, folder: Path, *, tied: bool) -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    size = tokenizer.get_vocab_size()
    shape = transformers.LlamaConfig(
        vocab_size=size, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(shape)
    # Unprintable tokens get a zero row, which scores 0, where the others score far on both sides of it: they never
    # win greedily and hardly ever by chance. Wide scores also keep the greedy choice the same whatever the rounding.
    dull = [i for i in range(size) if not _printable(tokenizer, i)]
    with torch.no_grad():
        model.lm_head.weight *= HEAD_SCALE
        model.lm_head.weight[dull] = 0
        if tied:
            # The last token is its own best successor, unless the layers drown it.
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight *= LAYER_SCALE
                layer.mlp.down_proj.weight *= LAYER_SCALE
    model.to(torch.bfloat16).save_pretrained(folder)


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
    os.environ["HF_HUB_OFFLINE"] = "1"
    make(folder)
    print(f"{folder}: a tiny model with random weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
