"""The needs of models: by their files, and by vLLM itself, which is asked once for each model. Answers are kept.

    question_of --> Answers.get (by digest) --> with_answer --> profile of the plan
                       ^-- ask: a child process of vLLM's own Python (needs_program.py)

The digest is of the description's files, the headers of the weights, the versions of the engine, its arguments and the
processor's instructions: whatever changes one of these is another question. vLLM imports what it is told to, and code that
comes with a model: where this process is root's, the child runs as the instances' user (`become`), or without that code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from launcher.base.errors import LauncherError, reason
from launcher.base.files import read_own, replace_file, state_folder
from launcher.base.text import quoted
from launcher.config.schema import Config, Model, Runtime
from launcher.engines.base import Asking
from launcher.engines.software import Stack
from launcher.engines.vllm import needs_program
from launcher.engines.vllm.arguments import flag_of, has_flag, json_of, merge, value_of
from launcher.engines.vllm.launch import MODULE_FORM
from launcher.engines.vllm.settings import KV_SPACE, dtype_of
from launcher.models.answer import Answer, with_answer
from launcher.models.profile import UNKNOWN, ModelProfile
from launcher.models.reader import find_model, read_profile
from launcher.models.weight_files import Read, header_bytes, read_model_json

log = logging.getLogger("launcher.engines")

FORMAT: Final = 1
"""Part of the digest: an answer in another form is another answer."""
_FOLDER: Final = "engine-answers"
_MAX_ANSWER_BYTES: Final = 1 << 20
_MOST_KEPT: Final = 256
# Instructions by which vLLM chooses types and blocks of the KV cache (vllm/platforms/cpu.py, 0.32).
_INSTRUCTIONS: Final = frozenset({"avx512_bf16", "amx_tile"})
_NO_DESCRIPTION: Final = frozenset(
    {"tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"}
)
# Arguments of the question that decide neither layers nor weights of the model.
_LEFT_OUT: Final = frozenset({
    "--max-model-len", "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size",
    "--kv-cache-memory-bytes", "--shutdown-timeout", "--enforce-eager", "--load-format", "--tokenizer",
    "--enable-prompt-tokens-details", "--lora-modules", "--enable-lora", "--generation-config", "--chat-template",
    "--override-generation-config", "--speculative-config", "--seed",
})  # fmt: skip
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "TRANSFORMERS_VERBOSITY": "error",
    "GLOO_SOCKET_IFNAME": "lo", KV_SPACE: "1",
}  # fmt: skip
# Names in a console script of vLLM's; another script may start something else, with another Python.
_CONSOLE: Final = b"vllm.entrypoints"


class Question(Struct, frozen=True):
    """One model, as it would be started."""

    folder: str
    python: str
    engine: str
    """vLLM with its version, for messages."""
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    instructions: tuple[str, ...] = ()
    digest: str = ""
    runs_code: bool = False
    """The model's own code is run (--trust-remote-code)."""


def question_of(model: Model, config: Config, stack: Stack, flags: frozenset[str]) -> Question | None:
    """The question about one model on a processor with these flags; None where vLLM cannot be asked: it is not
    installed, runs in a container, or is started by somebody's script, or the model's files are not here."""
    if stack.python is None or stack.vllm is None or not can_be_asked(config, stack):
        return None
    folder = find_model(model.path)
    if folder is None:
        return None
    arguments = tuple(_kept(_arguments(model, config)))
    environment = {**ENVIRONMENT, **config.engine.env, "HF_HUB_OFFLINE": "1"}
    instructions = tuple(sorted(flags & _INSTRUCTIONS))
    digest = hashlib.sha256()
    told = (FORMAT, stack.fingerprint, arguments, sorted(config.engine.env.items()), instructions)
    digest.update(json.dumps(told).encode())
    described = value_of(arguments, "--hf-config-path")
    for place in (folder, *((Path(described),) if described and Path(described).is_dir() else ())):
        for part in _description(place):
            digest.update(part)
    return Question(
        folder=str(folder.absolute()), python=stack.python, engine=f"vLLM {stack.vllm}",
        arguments=arguments, environment=environment, instructions=instructions, digest=digest.hexdigest(),
        runs_code=has_flag(arguments, "--trust-remote-code"),
    )  # fmt: skip


def can_be_asked(config: Config, stack: Stack) -> bool:
    """Whether the command is vLLM's own: a script of somebody's may start another one."""
    if config.engine.runtime is not Runtime.HOST:
        return False
    if MODULE_FORM in stack.command:
        return True
    with contextlib.suppress(OSError), Path(stack.command[0]).open("rb") as script:
        return _CONSOLE in script.read(4096)
    return False


def _arguments(model: Model, config: Config) -> tuple[str, ...]:
    """Those of VllmEngine that decide layers and weights, merged with the operator's in the same way."""
    options: list[tuple[str, ...]] = [("--dtype", model.dtype), ("--max-num-seqs", str(model.max_num_seqs))]
    for flag, value in (
        ("--max-num-batched-tokens", model.max_num_batched_tokens),
        ("--block-size", model.block_size),
        ("--quantization", model.quantization),
    ):
        if value is not None:
            options.append((flag, str(value)))
    if model.trust_remote_code:
        options.append(("--trust-remote-code",))
    return merge(options, config.engine.args)


def _kept(arguments: Sequence[str]) -> Iterator[str]:
    kept = True
    for word in arguments:
        if (flag := flag_of(word)) is not None:
            kept = flag not in _LEFT_OUT
        if kept:
            yield word


def _description(folder: Path) -> Iterator[bytes]:
    """Names and contents of the description's files and a model's code, and the headers of its weights.

    Raises LauncherError for one that cannot be read."""
    try:
        for file in sorted(folder.iterdir()):
            if file.suffix in {".json", ".py"} and file.name not in _NO_DESCRIPTION:
                if not file.name.endswith(".index.json"):
                    yield file.name.encode() + b"\0" + read_model_json(file)
            elif file.suffix == ".safetensors":
                yield file.name.encode() + b"\0" + header_bytes(file)
            elif file.suffix in {".bin", ".pt", ".gguf"}:
                yield f"{file.name}\0{file.stat().st_size}".encode()
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else f"{error}"
        raise LauncherError(f"cannot read model '{folder}': {why}", "download the model again") from None


def ask(question: Question, *, limit_s: float, become: Sequence[str] = ()) -> Answer:
    """The engine's answer; `failed` where it gives none within `limit_s`. Blocking.

    `become` is a command that runs the command after it as the instances' user. Without one, root runs no model's code."""
    if question.runs_code and not become and os.geteuid() == 0:
        return Answer(failed="it runs code of the model, which root does not: there is no user for instances")
    order = {
        "folder": question.folder, "arguments": question.arguments, "instructions": question.instructions,
        "environment": dict(question.environment), "limit_s": int(limit_s) + 1,
    }  # fmt: skip
    text = Path(needs_program.__file__).read_text(encoding="utf-8")
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            [*become, question.python, "-I", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Answer(failed=f"{question.python} does not start: {reason(error)}")
    timer = threading.Timer(limit_s, _kill, (child,))
    timer.start()
    try:
        said = _said(child, json.dumps(order).encode())
    finally:
        timer.cancel()
        _kill(child)
        code = child.wait()
        timer.join()
    if not said:
        late = time.monotonic() - began >= limit_s
        why = f"no answer within {limit_s:.0f} s" if late else f"its process ended {_how(code)}"
        return Answer(failed=why)
    return _answer(said)


def _said(child: subprocess.Popen[bytes], order: bytes) -> bytes:
    with child, contextlib.suppress(OSError):
        assert child.stdin is not None  # noqa: S101  a pipe
        assert child.stdout is not None  # noqa: S101
        child.stdin.write(order)
        child.stdin.close()
        said = child.stdout.read(_MAX_ANSWER_BYTES)
        _kill(child)
        return said
    return b""


def _kill(child: subprocess.Popen[bytes]) -> None:
    """It and what it started. The process is not reaped before `wait`: the number is not another's."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


def _how(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _answer(said: bytes) -> Answer:
    """An answer may come from a model's code: whatever it is not, it is bounded and printable."""
    try:
        answer = msgspec.json.decode(said, type=Answer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return Answer(failed=quoted(f"its answer cannot be read: {error}", 300))
    told = {
        name: quoted(text, 300)
        for name in ("failed", "refused", "unbuilt")
        if (text := getattr(answer, name))
    }
    return msgspec.structs.replace(answer, **told)


# --- Answers, kept by digest. ---


def answers_folder(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """The state folder of a daemon, and of root; else the user's cache folder: answers can be asked again.

    Raises LauncherError for a user without a home folder."""
    user = os.geteuid() if uid is None else uid
    if user == 0 or environ.get("STATE_DIRECTORY"):
        return state_folder(None, environ, user) / _FOLDER
    cache = environ.get("XDG_CACHE_HOME", "")
    if cache.startswith("/"):
        return Path(cache) / "numa-launcher" / _FOLDER
    # $HOME/.local/state/numa-launcher, by its home.
    home = state_folder(None, {**environ, "XDG_STATE_HOME": ""}, user).parents[2]
    return home / ".cache" / "numa-launcher" / _FOLDER


class Answers(Struct, frozen=True):
    """Answers in a folder: a file for each digest. What cannot be read or written is asked again."""

    folder: Path

    def get(self, question: Question) -> Answer | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return msgspec.json.decode(read_own(self._file(question)), type=Answer)
        return None

    def keep(self, question: Question, answer: Answer) -> None:
        with contextlib.suppress(OSError):
            replace_file(self._file(question), msgspec.json.encode(answer))
            files = sorted(self.folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for old in files[:-_MOST_KEPT]:
                old.unlink(missing_ok=True)

    def _file(self, question: Question) -> Path:
        return self.folder / f"{question.digest}.json"


# --- Profiles of the models, by the files and by vLLM's answers. ---


def read_profiles(config: Config, read: Read = read_model_json) -> dict[str, ModelProfile]:
    """The profiles of the models, by name, as their files describe them. Raises LauncherError for a model whose files
    cannot be read, PassingError where they may come by themselves."""
    overrides = json_of(config.engine.args, "--hf-overrides")
    return {
        model.name: read_profile(model.path, dtype_of(model, config), overrides, read)
        for model in config.models
    }


def has_answers() -> bool:
    """Whether vLLM was asked before by this user."""
    try:
        return answers_folder().is_dir()
    except LauncherError:
        return False


def answered(
    config: Config,
    profiles: Mapping[str, ModelProfile],
    stack: Stack,
    flags: frozenset[str],
    asking: Asking,
) -> Mapping[str, ModelProfile]:
    """The profiles, by model name, with vLLM's own figures: answers that are kept, and new ones if `asking`. `flags`: of the
    processor.

    Blocking, but on the disk of the answers for DISK_S. Raises LauncherError for a model whose files cannot be read."""
    if not any(profile is not UNKNOWN for profile in profiles.values()) or stack.vllm is None:
        return profiles
    try:
        answers = Answers(answers_folder())
    except LauncherError:  # a user without a home folder
        return profiles
    from launcher.base.disk import DISK_S, within  # noqa: PLC0415  heavy

    each = [(model.name, question_of(model, config, stack, flags)) for model in config.models]
    questions = {name: question for name, question in each if question is not None}
    kept = within(
        DISK_S, f"read answers of engines in '{answers.folder}'",
        lambda: {question.digest: answers.get(question) for question in questions.values()},
    )  # fmt: skip
    # A start that waited for the disk does not wait for vLLM as well, which would be asked at each start.
    ends = time.monotonic() + (asking.limit_s if kept is not None or asking.again else 0.0)
    found, known, asked = dict(profiles), dict(kept or {}), set[str]()
    for name, question in questions.items():
        answer = known.get(question.digest)
        left_s = ends - time.monotonic()
        again = asking.again and answer is not None and answer.failed is not None
        # Models that differ in what decides nothing have one question.
        if left_s > 0 and (answer is None or again) and question.digest not in asked:
            asked.add(question.digest)
            log.info("asking %s what model %s needs", question.engine, name)
            answer = known[question.digest] = ask(question, limit_s=left_s, become=asking.become())
            if kept is not None:
                within(
                    DISK_S, f"keep answers of engines in '{answers.folder}'",
                    partial(answers.keep, question, answer),
                )  # fmt: skip
        if answer is not None:
            found[name] = with_answer(found[name], answer, question.engine)
    return found
