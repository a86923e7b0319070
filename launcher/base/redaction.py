"""Recognises and masks secrets: by name, by form, and by known value. Pure.

Whatever shows configuration, environments, arguments, log lines or pages to others asks here: `plan`, the control
socket, `bundle`, `doctor`, the audit, errors, and what goes into a unit's properties, which every user may read.
It rather masks a word too many than one too few.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

MASK: Final = "<redacted>"
# Shorter values are not masked by value: masking every "1" would make text unreadable.
MIN_SECRET: Final = 4
_SECRET_NAME: Final = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTHORIZATION|COOKIE|BEARER"
    r"|SSHPASS|_PASS$|_PWD$|_KEY$|HEADERS$",
    re.IGNORECASE,
)
# Names that match but are not secrets; tls_key is a path.
_PLAIN: Final = frozenset({"TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "tls_key"})
# A secret's name in running text. "max_tokens", "tokenizer", "token_ids" and "hf_token_file" are not secrets.
_WORDS: Final = re.compile(
    r"secret(?!s_file)|passw(?:or)?d|passphrase|credential|sshpass|_(?:pass|pwd)$", re.IGNORECASE
)
_KEYS: Final = re.compile(
    r"token(?!s|[_-]s\b|i[zs]|_?ids?\b|_type|_timeout)|api[_-]?keys?|access[_-]?key|account[_-]?key|private[_-]?key",
    re.IGNORECASE,
)
# FERNET_KEY=…, and Pwd=… of a database's connection string; but PWD=/srv is a folder and tls_key = "/etc/…" a file.
_NOT_PATHS: Final = re.compile(r"[_-]key$|^pwd$", re.IGNORECASE)
_FILE: Final = re.compile(r"[_-](?:file|path)\b", re.IGNORECASE)
# Of a longer name the end counts, next to the value.
_MAX_NAME: Final = 128
_MAX_URL: Final = 1024
# Texts whose result is kept: a page that is polled every 2 s has the same ones again. At most 2 MiB, usually a tenth.
_MAX_SEEN: Final = 2048
_MAX_SEEN_TEXT: Final = 256
# Every quantifier is possessive or bounded, as the text may be written to make matching slow; or it is the pattern's last:
# before 3.11.5 Python takes half a repetition for a whole one (gh-106052).
_NAME: Final = re.compile(r"""(?<![\w.-])(?:-[\w.-]++|[\w.-]++(?=\\?["']?\s{0,16}[=:]))""")
_BEHIND_NAME: Final = re.compile(r"""\\?["']?\s{0,16}[=:]\s{0,16}""")
# Not an ellipsis, nor the launcher's own error texts: "engine.env.HF_TOKEN: not text".
_VALUE: Final = re.compile(
    r"""(?!["']\.\.\.["']|not text\b)"""
    r"""(?:\\["'][^"'\\\n]*+|\[[^\]\n]{0,4096}+\]|"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'|[^\s,;&"'}\])]++)"""
)
_PATH: Final = re.compile(r"""\\?["']?/""")
# After a word such as "token", a count or null is not a secret.
_NUMBER: Final = re.compile(r"(?:\d++(?:\.\d++)?|null|None|true|false|True|False)(?![\w.-])")
# After an option: its values, up to the next option.
_VALUES: Final = re.compile(r"""(=|[\s"',]{1,16})(?!-)[^\s"',\]]++(?:[ \t"',]{1,16}(?!-)[^\s"',\]]++)*""")
_PORT: Final = r"(?::\d{1,5})?"
_SLASH: Final = r"(?:\\?/|%2[Ff])"
_PATTERNS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,32}PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
    # Headers, as curl, http.client and the launcher write them: all to the end of the value.
    (
        re.compile(
            r"""(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|(?:x-)?api-key|x-auth-token|otel_exporter_otlp_\w{0,32}headers)(\\?["']?\s{0,16}[:=,]\s{0,16}\\?["']?)[^"'\\\r\n]++"""
        ),
        rf"\1\2{MASK}",
    ),
    (
        re.compile(r"""\b([A-Z][A-Z0-9_]{0,64}_HEADERS\\?["']?\s{0,16}[:=]\s{0,16}\\?["']?)[^"'\\\r\n]++"""),
        rf"\1{MASK}",
    ),
    # On a command line, and as a list of arguments.
    (
        re.compile(
            r"""\b(sshpass(?:["'],\s{0,4}["']|\s{1,16})-p(?:["'],\s{0,4}["']|\s{0,16}))(?:'[^'\n]*+'|"[^"\n]*+"|[^\s"']++)"""
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"\b([Bb]earer|Basic)(\s{1,16})(?!auth)[\w.~+/=:-]{6,}+"), rf"\1\2{MASK}"),
)  # fmt: skip
_FORMS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    # https://user:password@host and https://token@host; also with a slash or an @ in the password.
    (re.compile(rf"(://)[^\s/\"'?#]{{1,{_MAX_URL}}}@"), rf"\1{MASK}@"),
    (re.compile(rf"(://)[^\s/@:\"']{{0,256}}:(?!\d{{1,5}}(?:[/?#]|\b(?!@)))[^\s@\"':]{{1,{_MAX_URL}}}@"), rf"\1{MASK}@"),
    # http_proxy=user:password@host: curl and requests accept a proxy without a scheme.
    (
        re.compile(
            rf"""(?i)(_proxy(?:\\?["'])?\s{{0,16}}[=:]\s{{0,16}}(?:\\?["'])?)(?![a-z][a-z0-9+.-]{{0,24}}://)[^\s@"',]{{1,{_MAX_URL}}}@"""
        ),
        rf"\1{MASK}@",
    ),
    # Signed URLs: Azure's, AWS's, Google's.
    (re.compile(r"""(?i)([?&](?:sig|signature|[\w-]{1,32}-signature)=)[^\s&"']++"""), rf"\1{MASK}"),
    # Web hooks, whose path is the password: Slack's, Discord's, Microsoft Teams', Telegram's; with a port, as urllib3 logs
    # them, and with slashes as JSON or a query may have them.
    (
        re.compile(
            rf"""(?i)((?:hooks\.slack(?:-gov)?\.com{_PORT}{_SLASH}(?:services|workflows|triggers)"""
            rf"""|discord(?:app)?\.com{_PORT}{_SLASH}api(?:{_SLASH}v\d{{1,2}})?{_SLASH}webhooks"""
            rf"""|webhook\.office\.com{_PORT}{_SLASH}webhookb2){_SLASH}|api\.telegram\.org{_PORT}{_SLASH}bot)[^\s"'<>]++"""
        ),
        rf"\1{MASK}",
    ),
    (re.compile(rf"({_SLASH}services{_SLASH}T[0-9A-Z]{{6,16}}{_SLASH}B[0-9A-Z]{{6,16}}{_SLASH})\w++"), rf"\1{MASK}"),
    # Keys with a recognisable form: Hugging Face, OpenAI, numa-launcher, GitHub, AWS, Slack, JSON web tokens.
    (
        re.compile(
            r"\bhf_[A-Za-z0-9]{8,}+|\bsk-[A-Za-z0-9_-]{8,}+|\bnl-[a-z2-7]{8}-[a-z2-7]{20,}+|\bgh[pousr]_[A-Za-z0-9]{16,}+|"
            r"\bgithub_pat_\w{16,}+|\bA(?:KIA|SIA)[0-9A-Z]{12,}+|\bxox[a-z]-[\w-]{8,}+|\bxapp-[\w-]{8,}+|"
            r"\beyJ[\w-]{6,}+\.[\w-]{6,}+\.?[\w-]*+|"
            # Google, GitLab, Groq, NVIDIA, xAI, Replicate, Perplexity, Together, Cerebras, Weights & Biases, LangSmith.
            r"\bAIza[\w-]{30,}+|\bya29\.[\w-]{16,}+|\bgl(?:pat|rt|dt|ptt|cbt|agent|soat|ffct)-[\w.-]{16,}+|"
            r"\bgsk_[A-Za-z0-9]{16,}+|\bnvapi-[\w-]{16,}+|\bxai-[A-Za-z0-9]{16,}+|\br8_[A-Za-z0-9]{16,}+|"
            r"\bpplx-[A-Za-z0-9]{16,}+|\btgp_v1_[\w-]{16,}+|\bcsk-[a-z0-9]{16,}+|\bwandb_v1_\w{16,}+|\blsv2_\w{16,}+|"
            # Stripe, SendGrid, npm, PyPI, Docker, DigitalOcean, Vault, Grafana, Databricks, New Relic, Sentry, age.
            r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}+|\bwhsec_[\w+/=]{16,}+|\bSG\.[\w-]{16,}+\.[\w-]{16,}+|\bnpm_[A-Za-z0-9]{30,}+|"
            r"\bpypi-[\w-]{16,}+|\bdckr_pat_[\w-]{16,}+|\bdo[opr]_v1_[a-f0-9]{16,}+|\bhv[sbr]\.[\w-]{16,}+|\bglsa_\w{16,}+|"
            r"\bdapi[a-f0-9]{32}\b|\bNRAK-[A-Z0-9]{16,}+|\bsntry[su]_[\w=-]{16,}+|\bAGE-SECRET-KEY-1[A-Z0-9]{16,}+"
        ),
        MASK,
    ),
)  # fmt: skip


def _value_after(text: str, name: str, end: int) -> tuple[int, int] | None:
    """The position of the value whose name ends at `end`, if it is a secret's: NAME=value, "name": "value", --name value."""
    option, name = name.startswith("-"), name.lstrip("-")[-_MAX_NAME:]
    words, keys = _last(_WORDS, name), _last(_KEYS, name)
    if not words and not keys and not _last(_NOT_PATHS, name):
        return None
    if option and (values := _VALUES.match(text, end)) is not None:
        is_path = not words and not keys and text.startswith("/", values.end(1))
        return None if is_path else (values.end(1), values.end())
    behind = None if option else _BEHIND_NAME.match(text, end)
    if behind is None or (not words and _NUMBER.match(text, behind.end()) is not None):
        return None
    if not words and not keys and _PATH.match(text, behind.end()) is not None:
        return None
    value = _VALUE.match(text, behind.end())
    return None if value is None else value.span()


def _last(pattern: re.Pattern[str], name: str) -> bool:
    """Whether a name contains a secret word without a following word for a file or path."""
    return any(_FILE.search(name, found.end()) is None for found in pattern.finditer(name))


# Variables whose values are known to be no secrets: of the launcher, engines and their libraries, the loader, Python and
# the system. Of all others the name alone does not tell.
_HARMLESS: Final = re.compile(
    r"(?:NUMA_LAUNCHER|VLLM|OMP|KMP|GOMP|LIBGOMP|MKL|OPENBLAS|BLIS|NUMEXPR|ONEDNN|DNNL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON"
    r"|ZENTORCH|ZENDNN\w{0,16}|AMDCPU\w{0,16}|TRANSFORMERS|TOKENIZERS|SAFETENSORS|HF_HUB|LLAMA_ARG|GGML|CUDA|NVIDIA|HIP|ROCR|NCCL|GLOO"
    r"|TCMALLOC|MALLOC|MIMALLOC|PYTHON|LC|XDG|NUMBA|CCACHE|TVM|DYNAMO|INDUCTOR|AOT_INDUCTOR|TPU|RAY_(?:memory|object_store)\w{0,32})_\w{1,64}"
    r"|LD_(?:PRELOAD|LIBRARY_PATH|BIND_NOW)|PYTHON[A-Z]{2,24}|HF_(?:HOME|DATASETS_OFFLINE|DATASETS_CACHE|ENDPOINT|MODULES_CACHE|XET_\w{1,32})"
    r"|PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|LANG|LANGUAGE|TZ|TERM|TMPDIR|TEMP|TMP|HOSTNAME|HOST|DISPLAY|EDITOR|PAGER|MAIL|UMASK"
    r"|CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|MAX_JOBS|VIRTUAL_ENV|CONDA_\w{1,32}|NO_COLOR|COLORTERM|DO_NOT_TRACK|NO_PROXY|no_proxy"
    r"|(?:https?|HTTPS?|all|ALL)_(?:proxy|PROXY)|(?:SSL|REQUESTS|CURL)_(?:CERT_FILE|CERT_DIR|CA_BUNDLE)|OUT_DIR"
    r"|(?:CACHE|CONFIGURATION|LOGS|RUNTIME|STATE)_DIRECTORY|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID|MEMORY_PRESSURE_\w{1,8}"
    r"|CPU_VISIBLE_MEMORY_NODES|GOTRACEBACK|RUST_(?:LOG|BACKTRACE)|FORCE_COLOR"
    r"|OTEL_(?:SERVICE_NAME|SDK_DISABLED|TRACES_SAMPLER\w{0,8}|EXPORTER_OTLP_(?:\w{1,8}_)?(?:ENDPOINT|PROTOCOL|INSECURE|TIMEOUT|COMPRESSION))",
    re.ASCII,
)


@lru_cache(maxsize=1024)
def is_harmless_name(name: str) -> bool:
    """Whether a variable of this name may be shown, but for parts of its value with the form of a secret."""
    return _HARMLESS.fullmatch(name) is not None and not is_secret_name(name)


def hides(name: str, value: str) -> bool:
    """Whether a variable's value does not leave the machine: a secret, or a name that is not known to be harmless."""
    return bool(value) and (not is_harmless_name(name) or is_secret(name, value))


@lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None and name not in _PLAIN


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is secret, by its name or its value."""
    return bool(value) and (is_secret_name(name) or secret_parts(name, value) != [])


def secret_parts(name: str, value: str) -> list[str]:
    """The secret parts of a variable's value: all under a secret name, else the parts with the form of a secret."""
    return list(_secret_parts(name, value))


# An environment is searched at every masked answer, and does not change.
@lru_cache(maxsize=512)
def _secret_parts(name: str, value: str) -> tuple[str, ...]:
    if is_secret_name(name):
        return (value,)
    found = [match[1] for match in _USERINFO.finditer(value)]
    if name.lower().endswith("_proxy") and (bare := _BARE_USERINFO.match(value)) is not None:
        found.append(bare[1])
    parts = [part for userinfo in found for part in (userinfo, userinfo.partition(":")[2])]
    parts += [unquote(part) for part in parts]
    masked = Redactor().text(f"{name}={value}") != f"{name}={value}"
    return tuple(dict.fromkeys(filter(None, parts))) or ((value,) if masked else ())


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with its secret words masked."""
    return [str(word) for word in Redactor().tree(list(arguments))]


def secret_arguments(arguments: Sequence[str]) -> list[str]:
    """The secret words of a command line."""
    found = []
    for word, shown in zip(arguments, masked_arguments(arguments), strict=True):
        if word != shown:
            name, equals, value = word.partition("=")
            found += [value] if equals and shown == f"{name}={MASK}" else secret_parts("", word) or [word]
    return found


class Redactor:
    """Masks secrets in text. `known` values are masked wherever they appear."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """Values shorter than MIN_SECRET are masked only next to a secret name."""
        values: set[str] = set()
        for value in known:
            if len(value.strip()) >= MIN_SECRET:
                values |= _written(value.strip())
        # Longest first: a secret may be a prefix of another.
        every = "|".join(re.escape(value) for value in sorted(values, key=lambda value: (-len(value), value)))
        self._known = re.compile(every) if every else None
        self.count = 0
        """Number of masked places so far."""
        self._seen: dict[str, tuple[str, int]] = {}
        """What texts became, and how many places were masked."""

    def text(self, text: str) -> str:
        if len(text) > _MAX_SEEN_TEXT:
            return self._masked(text)
        seen = self._seen.get(text)
        if seen is None:
            before = self.count
            masked = self._masked(text)
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[text] = masked, self.count - before
            return masked
        self.count += seen[1]
        return seen[0]

    def _masked(self, text: str) -> str:
        if self._known is not None:
            text = self._sub(self._known, MASK, text)
        for pattern, mask in _PATTERNS:
            text = self._sub(pattern, mask, text)
        text = self._named_values(text)
        for pattern, mask in _FORMS:
            text = self._sub(pattern, mask, text)
        return text

    def _named_values(self, text: str) -> str:
        """Masks values of secret names and options, in one pass from name to name."""
        parts, done, at = [], 0, 0
        while (name := _NAME.search(text, at)) is not None:
            at = name.end()
            if text[max(0, name.start() - 1) : name.start()] == "/" and not name[0].startswith("-"):
                continue
            if (span := _value_after(text, name[0], at)) is not None:
                parts += [text[done : span[0]], MASK]
                done = at = span[1]
                self.count += 1
        return "".join((*parts, text[done:])) if parts else text

    def _sub(self, pattern: re.Pattern[str], mask: str, text: str) -> str:
        text, found = pattern.subn(mask, text)
        self.count += found
        return text

    def tree(self, value: Any) -> Any:
        match value:
            case Mapping():
                return {self._key(key): self._named(str(key), inner) for key, inner in value.items()}
            case str():
                return self.text(value)
            case Sequence():
                return self._items(value)
            case _:
                return value

    def _key(self, key: Any) -> Any:
        return self._sub(self._known, MASK, key) if self._known is not None and isinstance(key, str) else key

    def _named(self, name: str, value: Any) -> Any:
        if name in _ENVIRONMENTS and isinstance(value, Mapping):
            return {self._key(key): self._variable(str(key), inner) for key, inner in value.items()}
        if not is_secret_name(name) or name.endswith(("_file", "_path")):
            if isinstance(value, str) and name.lower().endswith("_proxy"):
                return self.text(f"{name}={value}").partition("=")[2]  # a proxy may have no scheme
            return self.tree(value)
        if isinstance(value, str) and value:
            self.count += 1
            return MASK
        if isinstance(value, list | tuple):
            return [self._named(name, inner) for inner in value]
        return self.tree(value)

    def _variable(self, name: str, value: Any) -> Any:
        if not isinstance(value, str) or not value:
            return self._named(name, value)
        if not is_harmless_name(name):
            self.count += 1
            return MASK
        return self._named(name, value)

    def _items(self, items: Sequence[Any]) -> list[Any]:
        """A list, possibly of arguments: after `--api-key` all items up to the next option are masked."""
        found, option = [], ""
        for item in items:
            if isinstance(item, str) and item.startswith("-"):
                option, equals, value = item.partition("=")
                if equals:
                    if _hides(option, value):
                        self.count += 1
                        item = f"{option}={MASK}"  # noqa: PLW2901
                    option = ""
            elif isinstance(item, str) and _hides(option, item):
                self.count += 1
                item = MASK  # noqa: PLW2901
            found.append(self.tree(item))
        return found


# Keys of tables of environment variables: engine.env, and a slot's in `plan --json`.
_ENVIRONMENTS: Final = frozenset({"env", "environment"})
_USERINFO: Final = re.compile(
    rf"://([^\s/\"'?#]{{1,{_MAX_URL}}}|[^\s/@:\"']{{0,256}}:[^\s@\"']{{1,{_MAX_URL}}})@"
)
_BARE_USERINFO: Final = re.compile(rf"([^\s@/]{{1,{_MAX_URL}}})@")


@lru_cache(maxsize=1024)
def _kind(option: str) -> tuple[bool, bool]:
    """Whether the values of an option are secret, and whether they are unless they are paths."""
    name = option.lstrip("-")[-_MAX_NAME:]
    return _last(_WORDS, name) or _last(_KEYS, name), _last(_NOT_PATHS, name)


def _hides(option: str, value: str) -> bool:
    always, but_paths = _kind(option)
    return always or (but_paths and not value.startswith("/"))


def _written(value: str) -> set[str]:
    """A value's spellings in output: plain, in JSON, in Python's quotes, and each line of a multi-line value."""
    forms = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    forms |= {line.strip() for line in value.splitlines() if len(line.strip()) >= 16 and "-----" not in line}
    return forms
