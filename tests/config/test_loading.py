"""Every way to say a configuration, and every error a person can make."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import LauncherError
from launcher.config.loading import load_config, parse_config, parse_listen
from launcher.config.schema import Config, EngineKind, Model, Policy, Strategy

MODEL = '[[models]]\nname = "m"\npath = "/m"\n'
ENDPOINT = '[[proxy.overflow]]\nurl = "https://x/v1"\nmodels = {m = "big"}\n'
TREE: dict[str, Any] = {"models": [{"name": "m", "path": "/m"}]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(MODEL)
    return path


def load(path: Path | None, *overrides: str, environ: dict[str, str] | None = None, **more: Any) -> Config:
    return load_config(path, environ=environ or {}, overrides=overrides, **more)


def refused(*args: Any, **kwargs: Any) -> LauncherError:
    with pytest.raises(LauncherError) as caught:
        load(*args, **kwargs)
    message, remedy = caught.value.message, caught.value.remedy
    assert re.match(r"cannot [a-z]+ .+: .+", message, re.DOTALL), message
    assert "\n" not in remedy
    assert remedy
    return caught.value


def test_one_model_is_enough(file: Path) -> None:
    config = load(file)
    assert [model.name for model in config.models] == ["m"]
    assert config.models[0].dtype == "bfloat16"
    assert config.proxy.listen == ("127.0.0.1:8000",)
    assert config.control.socket == "/run/numa-launcher/control.sock"


def test_types_arrive_as_the_schema_says(file: Path) -> None:
    file.write_text(
        MODEL
        + '[layout]\nstrategy = "l3-aligned"\ninstances_per_socket = 2\n[proxy]\npolicy = "round-robin"\n'
        '[engine]\nkind = "command"\ncommand = ["x", "{uds}"]\n[supervision]\nstop_timeout_s = 5\n'
    )
    config = load(file)
    assert config.layout.strategy is Strategy.L3_ALIGNED
    assert config.layout.instances_per_socket == 2
    assert config.proxy.policy is Policy.ROUND_ROBIN
    assert config.engine.kind is EngineKind.COMMAND
    assert config.engine.command == ("x", "{uds}")
    assert config.supervision.stop_timeout_s == 5.0


@pytest.mark.parametrize(
    ("engine", "command"),
    [
        ("", ("vllm",)),
        ('[engine]\nkind = "llama.cpp"\n', ("llama-server",)),
        ('[engine]\nkind = "llama.cpp"\ncommand = ["/opt/llama-server"]\n', ("/opt/llama-server",)),
    ],
)
def test_the_program_is_that_of_the_kind(file: Path, engine: str, command: tuple[str, ...]) -> None:
    file.write_text(MODEL + engine)
    assert load(file).engine.command == command


# --- who wins -------------------------------------------------------------------------------


def test_flags_win_over_environment_over_file_over_defaults(file: Path) -> None:
    file.write_text(MODEL + "[supervision]\ncrash_limit = 6\nstop_timeout_s = 6.0\nbackoff_max_s = 66.0\n")
    environ = {
        "NUMA_LAUNCHER_SUPERVISION__CRASH_LIMIT": "7",
        "NUMA_LAUNCHER_SUPERVISION__STOP_TIMEOUT_S": "7",
    }
    found = load(file, "supervision.crash_limit=8", "supervision.crash_limit=9", environ=environ).supervision
    assert (found.crash_limit, found.stop_timeout_s, found.backoff_max_s, found.probe_interval_s) == (
        9,
        7.0,
        66.0,
        5.0,
    )


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("layout.strategy=contiguous", lambda c: c.layout.strategy == Strategy.CONTIGUOUS),
        ("layout.use_smt=true", lambda c: c.layout.use_smt is True),
        ('proxy.listen=["0.0.0.0:1", "unix:/x"]', lambda c: c.proxy.listen == ("0.0.0.0:1", "unix:/x")),
        (" memory.kv_cache = 40GiB ", lambda c: c.memory.kv_cache == "40GiB"),
        ("models.0.path=/srv/models/a b", lambda c: c.models[0].path == "/srv/models/a b"),
        ('models.0.name="7"', lambda c: c.models[0].name == "7"),
        ("models.0.nodes=[0, 1]", lambda c: c.models[0].nodes == (0, 1)),
        ("engine.env.OMP_WAIT_POLICY=active", lambda c: c.engine.env == {"OMP_WAIT_POLICY": "active"}),
        ("engine.env.N=1", lambda c: c.engine.env == {"N": "1"}),
        ('engine.env.N="1"', lambda c: c.engine.env == {"N": "1"}),
        ("control.group=", lambda c: c.control.group == ""),
    ],
)
def test_override(file: Path, override: str, read: Any) -> None:
    assert read(load(file, override))


def test_one_overflow_endpoint_may_be_a_table(file: Path) -> None:
    file.write_text(MODEL + ENDPOINT)
    listed = load(file, "proxy.overflow.0.max_requests=3")
    file.write_text(MODEL + ENDPOINT.replace("[[", "[").replace("]]", "]"))
    assert load(file, "proxy.overflow.max_requests=3").proxy == listed.proxy
    environ = {"NUMA_LAUNCHER_PROXY__OVERFLOW__MAX_REQUESTS": "3"}
    assert load(file, environ=environ).proxy == listed.proxy
    file.write_text(MODEL)
    environ |= {
        "NUMA_LAUNCHER_PROXY__OVERFLOW__URL": "https://x/v1",
        "NUMA_LAUNCHER_PROXY__OVERFLOW__MODELS": '{m = "big"}',
    }
    assert load(file, environ=environ).proxy == listed.proxy
    (endpoint,) = listed.proxy.overflow
    assert (endpoint.endpoint, endpoint.max_requests, endpoint.predicted_s) == ("x", 3, None)


def test_an_endpoint_of_several_has_a_number(file: Path) -> None:
    file.write_text(MODEL + ENDPOINT + ENDPOINT + 'name = "y"')
    assert load(file, "proxy.overflow.1.max_requests=3").proxy.overflow[1].max_requests == 3
    error = refused(file, "proxy.overflow.max_requests=3")
    assert error.remedy == "name the table by its number: proxy.overflow.0.max_requests"
    assert "no [[proxy.overflow]] entry 2" in refused(file, "proxy.overflow.2.max_requests=3").message
    assert "names 'z'" in refused(file, 'proxy.overflow.1.models={z = "x"}').message


def test_environment(file: Path) -> None:
    environ = {
        "NUMA_LAUNCHER_PROXY__LISTEN": '["[::1]:9"]',
        "NUMA_LAUNCHER_MODELS__0__PATH": "/other",
        "NUMA_LAUNCHER_ENGINE__ENV__OMP_WAIT_POLICY": "active",  # a variable's name keeps its case
        "NUMA_LAUNCHER_SOCKET": "/another/option",
        "NUMA_LAUNCHER_INSTANCE": "a mark",
        "OTHER__THING": "x",
    }
    config = load(file, environ=environ)
    assert (config.proxy.listen, config.models[0].path) == (("[::1]:9",), "/other")
    assert config.engine.env == {"OMP_WAIT_POLICY": "active"}


def test_a_base_stands_in_for_the_file_and_is_not_changed() -> None:
    base = {"models": [{"name": "m", "path": "/m"}]}
    assert load(None, "models.0.path=/n", base=base).models[0].path == "/n"
    assert base == {"models": [{"name": "m", "path": "/m"}]}


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("", "the file: there is no [[models]]", 'add a [[models]] table with name = "..." and path = "..."'),
        (
            "models = []",
            "models = []: it is empty",
            'add a [[models]] table with name = "..." and path = "..."',
        ),
        (
            "models = [3]",
            "models[0] = 3: not a table",
            'add a [[models]] table with name = "..." and path = "..."',
        ),
        ('[[models]]\nname = "m"', "models[0]: path is missing", 'add path = "..." to models[0]'),
        ('[[models]]\nname = ""\npath = "/m"', "models[0].name = '': it is empty", 'write name = "..."'),
        (MODEL + "max_seqs = 3", "unknown key 'max_seqs' in [[models]]", "did you mean 'max_num_seqs'?"),
        (MODEL + "[proxy]\nlistn = []", "unknown key 'listn' in [proxy]", "did you mean 'listen'?"),
        (MODEL + "[proxi]\n", "unknown key 'proxi' in the file", "did you mean [proxy]?"),
        (
            MODEL + "[control]\nxyzzy = 1",
            "unknown key 'xyzzy' in [control]",
            "remove it, or use one of socket, group, read_group",
        ),
        # a table within a table, which may be left out
        (
            MODEL + "[proxy.overflow]\nmax_request = 3",
            "unknown key 'max_request' in [proxy.overflow]",
            "did you mean 'max_requests'?",
        ),
        (
            MODEL + '[proxy.overflow]\nurl = "https://x/v1"',
            "proxy.overflow: models is missing",
            'add models = { "our-name" = "their-name" } to [proxy.overflow]',
        ),
        (
            MODEL + '[proxy.overflow]\nmodels = {m = "x"}',
            "proxy.overflow: url is missing",
            'add url = "https://host/v1" to [proxy.overflow]',
        ),
        (
            MODEL + '[proxy.overflow]\nurl = "x.com"\nmodels = {m = "x"}',
            "proxy.overflow.url = 'x.com': not text that matches ^https?://",
            'write url = "https://host/v1"',
        ),
        (
            MODEL + '[proxy.overflow]\nurl = "https://x"\nmodels = {}',
            "proxy.overflow.models: it is empty",
            'write a table: models = { "our-name" = "their-name" }',
        ),
        (
            MODEL + '[proxy.overflow]\nurl = "https://x"\nmodels = {m = 3}',
            "proxy.overflow.models.m = 3: not text",
            'write m = "3"',
        ),
        (
            MODEL + "[proxy]\noverflow = 3",
            "proxy.overflow = 3: not a list of tables",
            'add a [[proxy.overflow]] table with url = "https://host/v1" and models = { "our-name" = "their-name" }',
        ),
        (
            MODEL + ENDPOINT + ENDPOINT + "max_request = 3",
            "unknown key 'max_request' in [[proxy.overflow]]",
            "did you mean 'max_requests'?",
        ),
        (
            MODEL + ENDPOINT + '[[proxy.overflow]]\nurl = "https://y/v1"',
            "proxy.overflow[1]: models is missing",
            'add models = { "our-name" = "their-name" } to proxy.overflow[1]',
        ),
        ("layout = 3\n" + MODEL, "layout = 3: not a table", "write a table: [layout]"),
        # lists
        (
            MODEL + "[proxy]\nlisten = 8000",
            "proxy.listen = 8000: not a list of text",
            'write a list of text: listen = ["127.0.0.1:8000"]',
        ),
        (MODEL + "[proxy]\nlisten = [1]", "proxy.listen[0] = 1: not text", 'write "1"'),
        (
            MODEL + "[proxy]\nlisten = []",
            "proxy.listen = []: it is empty",
            'write a list of text: listen = ["127.0.0.1:8000"]',
        ),
        (
            MODEL + '[proxy]\nlisten = "0.0.0.0:8000"',
            "proxy.listen = '0.0.0.0:8000': not a list of text",
            'write a list: listen = ["0.0.0.0:8000"]',
        ),
        (
            MODEL + '[proxy]\ncors_origins = "*"',
            "proxy.cors_origins = '*': not a list of text",
            'write a list: cors_origins = ["*"]',
        ),
        (
            MODEL + '[engine]\ncommand = "vllm serve"',
            "engine.command = 'vllm serve': not a list of text",
            'write a list: command = ["vllm", "serve"]',
        ),
        (
            MODEL + 'nodes = "0"',
            "models[0].nodes = '0': not a list of whole numbers",
            "write a list of whole numbers: nodes = [0]",
        ),
        (
            MODEL + "nodes = 1",
            "models[0].nodes = 1: not a list of whole numbers",
            "write a list: nodes = [1]",
        ),
        (
            MODEL + "nodes = [-1]",
            "models[0].nodes[0] = -1: not a whole number of 0 or more",
            "write a whole number of 0 or more",
        ),
        (
            MODEL + '[proxy]\nlisten = ["nowhere"]',
            "proxy.listen = 'nowhere' is not an address",
            'write "HOST:PORT"',
        ),
        # closed lists
        (
            MODEL + '[layout]\nstrategy = "zigzag"',
            "layout.strategy = 'zigzag': not an allowed value",
            'choose "interleaved", "contiguous", "l3-aligned" or "per-node"',
        ),
        (
            MODEL + 'dtype = "int3"',
            "models[0].dtype = 'int3': not an allowed value",
            'choose "auto", "bfloat16", "float16" or "float32"',
        ),
        (
            MODEL + '[logging]\nlevel = "verbose"',
            "logging.level = 'verbose': not an allowed value",
            'choose "debug", "info", "warning" or "error"',
        ),
        (
            MODEL + "[proxy]\naccess_log = true",
            "proxy.access_log = true: not an allowed value",
            'choose "all", "errors" or "off"',
        ),
        (
            MODEL + '[layout]\nuse_smt = "yes"',
            "layout.use_smt = 'yes': not true or false",
            "write true or false",
        ),
        # numbers
        (
            MODEL + "[layout]\ninstances_per_socket = 0",
            'instances_per_socket = 0: not a whole number of 1 or more, or "auto"',
            'write a whole number of 1 or more, or "auto"',
        ),
        (
            MODEL + '[layout]\ninstances_per_socket = "two"',
            "instances_per_socket = 'two': not a whole number of 1 or more, or \"auto\"",
            'write a whole number of 1 or more, or "auto"',
        ),
        (
            MODEL + '[layout]\ninstances_per_socket = "2"',
            "instances_per_socket = '2': not a whole number",
            "write instances_per_socket = 2",
        ),
        (
            MODEL + 'max_model_len = "0"',
            "max_model_len = '0': not a whole number of 1 or more",
            "write a whole number of 1 or more",
        ),
        (
            MODEL + '[proxy]\nqueue_timeout_s = "5m"',
            "proxy.queue_timeout_s = '5m': not a number above 0",
            "write seconds, a number above 0",
        ),
        (
            MODEL + "[proxy]\nfirst_token_timeout_per_1k_s = false",
            "first_token_timeout_per_1k_s = false: not a number above 0",
            "write seconds, a number above 0",
        ),
        (
            MODEL + '[proxy]\nmax_body_bytes = "64MiB"',
            "proxy.max_body_bytes = '64MiB': not a whole number of 1 or more",
            "write a number of bytes: 67108864",
        ),
        (
            MODEL + "[proxy]\nmax_body_bytes = 0",
            "proxy.max_body_bytes = 0: not a whole number of 1 or more",
            "write bytes, a whole number of 1 or more",
        ),
        (
            MODEL + "[supervision]\nstop_timeout_s = 0",
            "stop_timeout_s = 0: not a number above 0",
            "write seconds, a number above 0",
        ),
        (
            MODEL + "[supervision]\nstop_timeout_s = inf",
            "stop_timeout_s = inf: not a number above 0 and up to 31536000",
            "write seconds, a number above 0 and up to 31536000",
        ),
        (
            MODEL + "[supervision]\nstop_timeout_s = nan",
            "stop_timeout_s = nan: not a number above 0",
            "write seconds, a number above 0",
        ),
        (
            MODEL + "[supervision]\nbackoff_max_s = 0.5",
            "supervision.backoff_max_s = 0.5 is less than backoff_initial_s = 1",
            "raise backoff_max_s to 1 or more, or lower backoff_initial_s",
        ),
        # text
        (MODEL + "[layout]\ncpus = 3", "layout.cpus = 3: not text", 'write cpus = "3"'),
        (MODEL + "[engine]\nenv = {A = 1}", "engine.env.A = 1: not text", 'write A = "1"'),
        (
            MODEL + '[engine]\nenv = {A = "1", "b c" = true}',
            'engine.env."b c" = true: not text',
            'write "b c" = "true"',
        ),
        (
            MODEL + "[engine]\nenv = {HF_TOKEN = 1234}",
            "engine.env.HF_TOKEN: not text",
            'write HF_TOKEN = "..."',
        ),
        (
            MODEL + '[engine]\nenv = "A=1"',
            "engine.env = 'A=1': not a table of text",
            'write a table: env = { "NAME" = "value" }',
        ),
        (
            MODEL + '[engine]\nhealth_path = "x"',
            "engine.health_path = 'x': not text that matches ^/",
            'write health_path = "/health"',
        ),
        (
            MODEL + '[memory]\nkv_cache = "40 gigs"',
            "memory.kv_cache: '40 gigs' is not a size",
            'write "auto" or a size such as "40GiB"',
        ),
        (
            MODEL + '[memory]\nreserve = "some"',
            "memory.reserve: 'some' is not a size",
            'write "auto" or a size such as "40GiB"',
        ),
        (
            MODEL + '[systemd]\nmemory_max = "auto"',
            "systemd.memory_max: 'auto' is not a size",
            'write a size such as "400GiB", or remove it',
        ),
        (MODEL + MODEL, "two [[models]] have the name 'm'", "give each model a different name"),
    ],
)
def test_mistakes_in_the_file(file: Path, text: str, message: str, remedy: str) -> None:
    file.write_text(text)
    error = refused(file)
    assert error.message.startswith(f"cannot use {file}: ")
    assert message in error.message
    assert error.remedy.startswith(remedy)
    assert "`" not in error.message + error.remedy  # msgspec's own words


@pytest.mark.parametrize(
    ("text", "why", "remedy"),
    [
        (MODEL + 'listen = ["a:1"]', "'listen' in [[models]]", "it belongs to [proxy]"),
        ('listen = ["a:1"]\n' + MODEL, "'listen' in the file", "it belongs to [proxy]"),
        (MODEL + "[layout]\nsocket = 1", "'socket' in [layout]", "it belongs to [control]"),
        (
            MODEL + "socket = 1",
            "'socket' in [[models]]",
            "it belongs to [control]; or did you mean 'sockets'?",
        ),
        (
            MODEL + '[engine]\nname = "x"',
            "'name' in [engine]",
            "it belongs to [[models]], [[proxy.overflow]] or [[cost.reference]]",
        ),
        (MODEL + '[overflow]\nurl = "x"', "'overflow' in the file", "it belongs to [[proxy.overflow]]"),
        (MODEL + "[engine.proxy]\nx = 1", "'proxy' in [engine]", "it belongs to [proxy]"),
        (MODEL + "[layout]\nkv-cache = 1", "'kv-cache' in [layout]", "did you mean 'kv_cache' in [memory]?"),
        (MODEL + "[layout]\napi_key_fil = 1", "[layout]", "did you mean 'api_keys_file' in [proxy]?"),
        (MODEL + "[superivsion]\n", "'superivsion' in the file", "did you mean [supervision]?"),
        ('[model]\nname = "m"', "'model' in the file", "did you mean [[models]]?"),
        (MODEL + '[proxy.overflw]\nurl = "x"', "'overflw' in [proxy]", "did you mean [[proxy.overflow]]?"),
    ],
)
def test_where_a_key_belongs(file: Path, text: str, why: str, remedy: str) -> None:
    """From the schema: a key of another table, a misspelt key of another, a misspelt table."""
    file.write_text(text)
    error = refused(file)
    assert why in error.message
    assert error.remedy == remedy


def test_every_key_in_a_wrong_table_is_sent_home(file: Path) -> None:
    """Each key of the schema, in a table that lacks it, is sent to a table that has it."""
    tables = {field.name: field.type for field in msgspec.structs.fields(Config) if field.name != "models"}
    for name, kind in tables.items():
        for key in (field.name for field in msgspec.structs.fields(kind)):
            other = next(its for its, its_kind in tables.items() if not hasattr(its_kind, key) and its != key)
            file.write_text(MODEL + f"[{other}]\n{key} = 1\n")
            remedy = refused(file).remedy
            assert f"[{name}]" in remedy or f"[[{name}.{key}]]" in remedy or f"[{name}.{key}]" in remedy


def test_a_byte_order_mark_is_skipped(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + MODEL.encode())
    assert load(file).models[0].name == "m"


def test_files_that_can_not_be_read(tmp_path: Path, file: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.toml").message
    assert "is a directory" in refused(tmp_path).message
    file.write_bytes(MODEL.encode("utf-16"))
    assert "UTF-16, not UTF-8" in refused(file).message
    file.write_text("[layout\n")
    error = refused(file)
    assert "line 1" in error.message
    assert "TOML" in error.remedy


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout.strategy", "cannot use --set 'layout.strategy': '=' is missing"),
        ("strategy=contiguous", "cannot use --set strategy=contiguous: 'strategy' is not section.key"),
        ("models.5.path=/x", "there is no [[models]] entry 5 (there is 1, numbered from 0)"),
        ("models.path=/x", "'models.path' is not section.key"),
        ("models.name.5.path=/x", "'models.name.5.path' is not section.key"),
        ("models.0=x", "'models.0' is not section.key"),
        ("models.0.name.first=x", "'models.0.name.first' is not section.key"),
        ("layout.strateg=x", "cannot use --set layout.strateg=x: unknown key 'strateg' in [layout]"),
        ("layuot.use_smt=true", "cannot use --set layuot.use_smt=true: unknown key 'layuot' in the file"),
        ("layout.use_smt=7", "cannot use --set layout.use_smt=7: layout.use_smt = 7: not true or false"),
        (
            "memory.kv_cache=lots",
            "cannot use --set memory.kv_cache=lots: memory.kv_cache: 'lots' is not a size",
        ),
        ('proxy.listen=["x"]', "cannot use --set proxy.listen=[\"x\"]: proxy.listen = 'x' is not an address"),
        (
            "proxy.overflow.max_request=3",
            "cannot use --set proxy.overflow.max_request=3: unknown key 'max_request'",
        ),
        ("models.0.max_num_seqs=0", "cannot use --set models.0.max_num_seqs=0: models[0].max_num_seqs = 0"),
    ],
)
def test_mistakes_in_an_override(file: Path, override: str, message: str) -> None:
    assert message in refused(file, override).message


def test_an_error_names_who_said_the_value_that_holds(file: Path) -> None:
    environ = {"NUMA_LAUNCHER_LAYOUT__USE_SMT": "7", "NUMA_LAUNCHER_LAYOUT__SPAN_NODES": "true"}
    assert (
        "cannot use environment variable NUMA_LAUNCHER_LAYOUT__USE_SMT: "
        in refused(file, environ=environ).message
    )
    assert "cannot use --set layout.use_smt=8: " in refused(file, "layout.use_smt=8", environ=environ).message
    file.write_text(MODEL + "[layout]\nuse_smt = 9\n")
    assert (
        f"cannot use {file}: " in refused(file, environ={"NUMA_LAUNCHER_LAYOUT__SPAN_NODES": "true"}).message
    )


def test_every_key_of_the_schema_is_explained() -> None:
    """Whatever the type, a wrong value is answered with where it is and what to write."""
    wrong = dt.date(2026, 1, 1)  # TOML has dates, the schema has none
    keys = 0
    for section in msgspec.structs.fields(Config):
        kind = Model if section.encode_name == "models" else section.type
        for field in msgspec.structs.fields(kind):
            table = {"name": "m", "path": "/m"} if kind is Model else {}
            tree = TREE | {section.encode_name: [table | {field.encode_name: wrong}]}
            if kind is not Model:
                tree[section.encode_name] = tree[section.encode_name][0]
            with pytest.raises(LauncherError, match=field.encode_name) as caught:
                parse_config(tree, origin="f.toml")
            assert "`" not in caught.value.message
            assert re.match(r"(write|choose|add) \S", caught.value.remedy), caught.value.remedy
            keys += 1
    assert keys > 80


def test_an_unknown_variable_is_an_error_too(file: Path) -> None:
    error = refused(file, environ={"NUMA_LAUNCHER_PROXY__LISTN": "x"})
    assert "NUMA_LAUNCHER_PROXY__LISTN: unknown key 'listn'" in error.message
    assert error.remedy == "did you mean 'listen'?"


# --- listen ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("localhost:0", ("localhost", 0)),
        (":8000", ("0.0.0.0", 8000)),
        ("[::]:65535", ("::", 65535)),
        ("[fe80::1]:1", ("fe80::1", 1)),
        ("unix:/run/x.sock", "/run/x.sock"),
    ],
)
def test_listen(text: str, address: object) -> None:
    assert parse_listen(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8000",
        "host",
        "host:",
        "host:65536",
        "host:-1",
        "::1:80",
        "[::1]",
        "[x]:1",
        "a b:1",
        "unix:x",
        "unix:",
        "h:١",
    ],
)
def test_no_address(text: str) -> None:
    with pytest.raises(LauncherError, match="is not an address") as caught:
        parse_listen(text, "f.toml")
    assert caught.value.message.startswith("cannot use f.toml: proxy.listen")


# --- anything --------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [
        "models",
        "layout",
        "proxy",
        "listen",
        "name",
        "path",
        "strategy",
        "kv_cache",
        "memory",
        "overflow",
        "url",
        "engine",
        "env",
        "x",
        "",
        "a.b",
        "a`b",
        "a` - at `$.b",
        "[0]",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_tree_is_a_configuration_or_an_error_for_a_person(tree: dict[str, Any]) -> None:
    try:
        parse_config(tree, origin="f.toml")
    except LauncherError as error:
        assert error.message.startswith("cannot use f.toml: ")  # noqa: PT017
        assert error.remedy  # noqa: PT017
