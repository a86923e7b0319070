"""A program in vLLM's Python: writes descriptions from the defaults of transformers' classes, and asks vLLM about folders.

    python asked_many.py describe FOLDER KIND...     FOLDER/KIND-FORM/config.json, in three forms
    python asked_many.py ask PROGRAM < QUESTIONS     a line of JSON for each question, by needs_program.py

All questions in one process: importing vLLM takes most of the time of one. Forms: `full` has every key, as transformers 5
writes it; `diff` leaves out of each part what its class fills in, as transformers 4.4x did; `old` has no layer_types and
no rope_parameters, as before 4.53.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def describe(folder: Path, kinds: list[str]) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    transformers: Any = import_module("transformers")
    auto: Any = import_module("transformers.models.auto.modeling_auto")
    for kind in kinds:
        config = transformers.CONFIG_MAPPING[kind]()
        names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) or auto.MODEL_MAPPING_NAMES[kind]
        config.architectures = [names] if isinstance(names, str) else list(names)[:1]
        whole = json.loads(config.to_json_string(use_diff=False))
        forms = {"full": whole, "diff": json.loads(config.to_json_string(use_diff=True)), "old": old(whole)}
        forms["diff"] |= {"model_type": kind, "architectures": config.architectures}
        for form, said in forms.items():
            place = folder / f"{kind}-{form}"
            place.mkdir(parents=True)
            (place / "config.json").write_text(json.dumps(said))


def old(said: Json) -> Json:
    left_out = {"layer_types", "rope_parameters", "dtype"}
    cut = {
        key: old(value) if isinstance(value, dict) and key.endswith("_config") else value
        for key, value in said.items()
        if key not in left_out
    }
    rope = said.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        scaled = rope.get("rope_type", "default") != "default"
        rest = {key: value for key, value in rope.items() if key != "rope_theta"}
        cut |= {"rope_theta": rope.get("rope_theta"), "rope_scaling": rest if scaled else None}
    return cut


def ask(program: str) -> None:
    answer_to = runpy.run_path(program, run_name="asked")["answer_to"]
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for line in sys.stdin:
        question = json.loads(line)
        os.environ.update(question["environment"])
        os.write(out, (json.dumps(answer_to(question)) + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "describe":
        describe(Path(sys.argv[2]), sys.argv[3:])
    else:
        ask(sys.argv[2])
