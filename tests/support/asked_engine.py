"""An environment with vLLM's metadata and command, whose Python gives one answer to each question about a model."""

from __future__ import annotations

import sys
from pathlib import Path

ANSWER = (
    '{"max_model_len": 4096, "heads": 32, "kv_heads": 4, "request_bytes": 123456789, "step_tokens": 2048,'
    ' "element_bytes": 2, "weights_bytes": 4294967296, "layers": '
    '[{"kind": "full", "count": 10, "heads": 4, "head_bytes": 512, "head_size": 128}]}'
)


def answering_vllm(folder: Path, answer: str) -> str:
    """A command of vLLM's in an environment whose Python gives this answer, and notes each question."""
    env = folder / "env"
    package = env / "lib" / "vllm-0.32.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    python = env / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"if '-I' not in sys.argv:\n    print(json.dumps(['3.12.1', [{str(env / 'lib')!r}]]))\n    sys.exit()\n"
        f"open({str(folder / 'asked')!r}, 'a').write('.')\nsys.stdin.read()\nprint({answer!r})\n"
    )
    command = env / "vllm"
    command.write_text(f"#!{python}\nfrom vllm.entrypoints.cli.main import main\n")
    for file in (python, command):
        file.chmod(0o755)
    return str(command)
