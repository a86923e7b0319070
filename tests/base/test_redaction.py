"""Secrets are masked; what is none can still be read."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.redaction import (
    MASK,
    MIN_SECRET,
    Redactor,
    hides,
    is_secret,
    is_secret_name,
    masked_arguments,
    secret_arguments,
    secret_parts,
)

SECRET = "Tr0ub4dor-and-3"

# How secrets stand in what programs print: nothing of them is left, whether or not the value is known.
PLANTED = (
    "HF_TOKEN={}",
    "export MY_API_KEY='{}'",
    '{{"api_key": "{}", "port": 80}}',
    '{{"message":"started with \\"api_key\\":\\"{}\\" set"}}',
    "non-default args: {{'api_key': ['{}', 'other-{}'], 'port': 80}}",
    "vllm serve m --api-key {} --port 80",
    "vllm serve m --api-key {} second-{} --port 80",
    "vllm serve m --api-key={}",
    "['vllm', '--hf-token', '{}', '--port', '80']",
    '["vllm","--api-key","{}","third-{}","--port"]',
    "Authorization: Bearer {}",
    '{{"Authorization":"Bearer {}"}}',
    "{{'authorization': 'Basic {}'}}",
    "curl -H 'X-Api-Key: {}' http://h/v1/models",
    "curl -H 'api-key: {}' http://h/v1/models",
    "Cookie: a=1; session={}",
    "b'Set-Cookie: id={}'",
    "db.password: {}",
    "PASSWORD={}",
    "client_secret={}&grant=1",
    "https://me:{}@mirror.example/simple",
    "https://{}@git.example/repository",
    "https://me:a@{}@mirror.example/simple",
    "https://me:a/{}@mirror.example/simple",
    "http_proxy=me:{}@proxy:3128",
    '{{"HTTPS_PROXY": "me:{}@proxy:3128"}}',
    "SMTP_PASS={}",
    "MYSQL_PWD={}",
    "https://store.example/x?sv=1&sig={}&se=2",
    "https://bucket.example/x?X-Amz-Signature={}",
    "GET /v1/models?api_key={}&x=1",
    "set=engine.env.HF_TOKEN={}",
    "FERNET_KEY={}",
    'env: {{"ENCRYPTION_KEY": "{}", "PORT": "80"}}',
    "OTEL_EXPORTER_OTLP_HEADERS=x-scope=a,dd-api={},tenant=other",
    'OTEL_EXPORTER_OTLP_TRACES_HEADERS: "x-scope=a, dd-api={}"',
    "SSHPASS={}",
    "sshpass -p {} ssh host",
    "Server=db;Uid=sa;Pwd={};",
    "AccountName=a;AccountKey={};EndpointSuffix=core",
    "db?user=a&pwd={}",
    "cannot post to https://hooks.slack.com/services/T024/B024/{}: 404",
    "https://discord.com/api/webhooks/81/{}",
    "https://acme.webhook.office.com/webhookb2/81@82/IncomingWebhook/{}/83",
    "https://api.telegram.org/bot81:{}/sendMessage",
    "https://hooks.slack.com:443/services/T024/B024/{}",
    'https://hooks.slack.com:443 "POST /services/T024BE7LD/B024BE7LE/{} HTTP/1.1" 404',
    '{{"url":"https:\\/\\/hooks.slack-gov.com\\/services\\/T024\\/B024\\/{}"}}',
    "next=https%3A%2F%2Fhooks.slack.com%2Fservices%2FT024%2FB024%2F{}",
    "discord.com/api/v10/webhooks/81/{}",
    "CUSTOM_HEADERS=x-scope=a,team={}",
    "train --wandb-key {} --port 80",
    "train --encryption-key={}",
    "sshpass -p 'two {}' ssh host",
    "['sshpass', '-p', '{}', 'ssh']",
)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_secret_is_masked_by_what_stands_beside_it(planted: str) -> None:
    for secret in (SECRET, "s" * 300):
        text = planted.replace("{}", secret).replace("{{", "{").replace("}}", "}")
        shown = Redactor().text(f"before\n{text}\nafter")
        assert secret not in shown
        assert MASK in shown
        assert shown.startswith("before\n")
        assert shown.endswith("\nafter")


def test_a_number_is_a_password_and_no_token() -> None:
    assert Redactor().text("PASSWORD=82319750 --api-key 82319750") == f"PASSWORD={MASK} --api-key {MASK}"
    assert Redactor().text("first_token: 82319750") == "first_token: 82319750"


@pytest.mark.parametrize(
    "value",
    [
        "hf_abcdefghijklmnop",
        "sk-proj-abcdefgh12345678",
        "nl-abcdefgh-" + "a2" * 26,
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "x1" * 20,
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-123456789-abcdef",
        "AIzaSyA1234567890abcdefghijklmnopqrstu",
        "glpat-abcdefghij0123456789",
        "gsk_abcdefghij0123456789abcdefghij",
        "nvapi-abcdefghij0123456789-_abcdefghij",
        "xai-abcdefghij0123456789abcdefghij",
        "r8_abcdefghij0123456789abcdefghij",
        "pplx-abcdefghij0123456789",
        "sk_live_abcdefghij0123456789",
        "whsec_abcdefghij0123456789",
        "SG.abcdefghij0123456789.abcdefghij0123456789",
        "npm_abcdefghij0123456789abcdefghij012345",
        "pypi-AgEIcHlwaS5vcmcabcdefgh",
        "dckr_pat_abcdefghij0123456789",
        "dop_v1_0123456789abcdef0123456789abcdef",
        "hvs.abcdefghij0123456789abcd",
        "glsa_abcdefghij0123456789_abcdef12",
        "dapi0123456789abcdef0123456789abcdef",
        "NRAK-ABCDEFGHIJ0123456789",
        "AGE-SECRET-KEY-1QQPQZRFHSL8ABCDEF",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\nline\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIEabc\nand then the file ends",
    ],
)
def test_a_secret_is_masked_by_its_form(value: str) -> None:
    assert Redactor().text(f"found {value} there").startswith(f"found {MASK}")
    assert value.splitlines()[-2 if "END" in value else -1] not in Redactor().text(f"found {value} there")


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=4096, tokens: 5",
        "tokenizer='/srv/models/m', tokenizer_mode=auto",
        '"first_token_timeout_s":300.0,"keepalive_comment_s":15.0',
        "hf_token_file = /etc/numa-launcher/secrets/hf-token",
        '"api_keys_file":"/etc/numa-launcher/keys","api_key_file":null',
        "eos_token_id=3 pad_token_id: 0",
        'vllm:generation_tokens_total{model_name="m"} 51',
        'numa_launcher_key_tokens_total{key="team-a"} 7',
        "slot 0: generated 5 tokens in 2 s; 1 request unauthorized",
        "POST /v1/slots/0/restart by root (uid 0, pid 7): 200",
        "http://127.0.0.1:8000/v1 and unix:/run/x.sock:0",
        "hf_token: None",
        "basic training, bearer of news",
        "https://huggingface.co/org/model@main and http://127.0.0.1:8000/v1/a@b",
        "http_proxy=http://proxy.example:3128 no_proxy=localhost",
        "OLDPWD=/srv BYPASS=1 compass=north",
        "PWD=/srv pwd: /srv --ssl-key /etc/tls.key",
        "max_headers: 5, RESPONSE_HEADERS, /services/T1/B1/x",
        "https://hooks.slack.com/docs and https://discord.com/api/webhooks",
        '"tls_key":"/etc/numa-launcher/tls.key","tls_key":null,primary_key=3',
        "fake_engine.py --token-s 0.3 --allocate 48",
        "git@github.com:org/repository, mail somebody@example.org",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor().text(text) == text


@given(
    st.text(min_size=MIN_SECRET, max_size=60).map(str.strip).filter(lambda s: len(s) >= MIN_SECRET and s not in MASK),
    st.text(max_size=30),
    st.text(max_size=30),
)  # fmt: skip
def test_a_known_value_never_comes_out(secret: str, before: str, after: str) -> None:
    """Plain, in JSON or as Python shows it, wherever it stands."""
    redactor = Redactor([f" {secret}\n"])
    assert secret not in redactor.text(before + secret + after).replace(MASK, "")
    for written in (json.dumps(secret), json.dumps(secret, ensure_ascii=False), repr(secret)):
        assert written[1:-1] not in redactor.text(f"<{written}>").replace(MASK, "")
    assert redactor.count > 0


def test_each_line_of_a_known_file_is_known() -> None:
    key = (
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG\nAbCdEfGhIjKlMnOpQrSt\n-----END PRIVATE KEY-----\n"
    )
    shown = Redactor([key]).text("12:00:01 g1 | MIIEvQIBADANBgkqhkiG\n12:00:01 g1 | AbCdEfGhIjKlMnOpQrSt")
    assert shown == f"12:00:01 g1 | {MASK}\n12:00:01 g1 | {MASK}"


def test_short_values_are_left_to_their_names() -> None:
    assert Redactor(["1", "", "  ", "abc"]).text("slot 1 abc, MY_TOKEN=abc") == f"slot 1 abc, MY_TOKEN={MASK}"


def test_one_secret_begins_with_another() -> None:
    assert Redactor(["abcd", "abcdefgh"]).text("abcdefgh abcd") == f"{MASK} {MASK}"


def test_a_tree() -> None:
    tree = {
        "engine": {
            "env": {"MY_TOKEN": "x", "OMP_NUM_THREADS": "8", "NOTE": "quiet", "EMPTY_SECRET": ""},
            "args": ["--api-key", "a", "b", "--port", "80", "--hf-token=c", "plain"],
            "hf_token_file": "/etc/token",
        },
        "proxy": {"overflow": {"url": "https://u:p@h/v1"}, "max_body_bytes": 5, "tls_key": None},
    }
    assert Redactor().tree(tree) == {
        "engine": {
            "env": {"MY_TOKEN": MASK, "OMP_NUM_THREADS": "8", "NOTE": MASK, "EMPTY_SECRET": ""},
            "args": ["--api-key", MASK, MASK, "--port", "80", f"--hf-token={MASK}", "plain"],
            "hf_token_file": "/etc/token",
        },
        "proxy": {"overflow": {"url": f"https://{MASK}@h/v1"}, "max_body_bytes": 5, "tls_key": None},
    }


def test_a_list_under_a_secret_name() -> None:
    tree = {"api_keys": ["a", 5, None, {"note": "x"}], "api_keys_file": "/etc/keys"}
    assert Redactor().tree(tree) == {"api_keys": [MASK, 5, None, {"note": "x"}], "api_keys_file": "/etc/keys"}


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "openai_api_key",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWD",
        "HTTP_COOKIE",
        "FERNET_KEY",
        "SSHPASS",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "HF_HOME", "OMP_NUM_THREADS", "KEYBOARD", "PWD", "tls_key"]
)
def test_plain_names(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("HF_TOKEN", "x", ["x"]),
        ("https_proxy", "http://me:s3cret@proxy:3128", ["me:s3cret", "s3cret"]),
        ("HTTPS_PROXY", "me:s3cret@proxy:3128", ["me:s3cret", "s3cret"]),
        ("INDEX", "https://t0ken@host/x", ["t0ken"]),
        ("INDEX", "https://me:p%40ss@host/x", ["me:p%40ss", "p%40ss", "me:p@ss", "p@ss"]),
        ("OPTIONS", "--api-key abcdef", ["--api-key abcdef"]),
        (
            "ALERTS",
            "https://hooks.slack.com/services/T0/B0/x1",
            ["https://hooks.slack.com/services/T0/B0/x1"],
        ),
        ("DSN", "Server=db;Pwd=hush", ["Server=db;Pwd=hush"]),
        ("http_proxy", "http://proxy:3128", []),
        ("HF_HOME", "/srv/hf", []),
    ],
)
def test_what_of_a_variable_is_secret(name: str, value: str, parts: list[str]) -> None:
    assert secret_parts(name, value) == parts
    assert is_secret(name, value) == bool(parts)


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("OMP_NUM_THREADS", "8", False),
        ("VLLM_CPU_KVCACHE_SPACE", "40", False),
        ("PATH", "/usr/bin", False),
        ("HF_HOME", "/srv/hf", False),
        ("HTTPS_PROXY", "http://proxy:3128", False),
        ("HTTPS_PROXY", "http://me:secret@proxy:3128", True),
        ("VLLM_API_KEY", "abc", True),
        ("VLLM_SOMETHING", "glpat-abcdefghij0123456789", True),
        ("SLACK_WEBHOOK_URL", "https://hooks.example/T1", True),
        ("MY_SETTING", "1", True),
        ("PATHS", "x", True),
        ("omp_num_threads", "8", True),
        ("MY_SETTING", "", False),
    ],
)
def test_a_variable_is_hidden_unless_it_is_known_to_be_harmless(name: str, value: str, hidden: bool) -> None:
    assert hides(name, value) is hidden
    shown = Redactor().tree({"engine": {"env": {name: value}}, "slots": [{"env": {name: value}}]})
    assert shown["slots"][0] == shown["engine"]
    assert (shown["engine"]["env"][name] != value) is hidden


def test_only_tables_of_variables_are_hidden() -> None:
    tree = {"environment": "production", "env": None, "models": {"MY_SETTING": "x"}}
    assert Redactor().tree(tree) == tree
    nested = Redactor().tree({"env": {"A": ["sk-proj-abcdefgh12345678"], "B": 3}})
    assert nested == {"env": {"A": [MASK], "B": 3}}


def test_a_proxy_without_a_scheme_in_a_tree() -> None:
    shown = Redactor().tree({"env": {"https_proxy": "me:hush@proxy:3128", "no_proxy": "localhost"}})
    assert shown == {"env": {"https_proxy": f"{MASK}@proxy:3128", "no_proxy": "localhost"}}


def test_an_option_of_a_key_or_of_the_file_of_one() -> None:
    words = ["--wandb-key", "a1", "--ssl-key", "/etc/tls.key", "--sign-key=b2", "--sign-key=/etc/sign", "m"]
    assert masked_arguments(words) == [
        "--wandb-key", MASK, "--ssl-key", "/etc/tls.key", f"--sign-key={MASK}", "--sign-key=/etc/sign", "m",
    ]  # fmt: skip


def test_arguments() -> None:
    words = [
        "vllm",
        "serve",
        "m",
        "--hf-token",
        "a1",
        "--port=80",
        "--api-key=b2",
        "--index",
        "https://u:c3@h/x",
    ]
    assert masked_arguments(words) == [
        "vllm", "serve", "m", "--hf-token", MASK, "--port=80", f"--api-key={MASK}", "--index", f"https://{MASK}@h/x",
    ]  # fmt: skip
    assert secret_arguments(words) == ["a1", "b2", "u:c3", "c3"]


# What makes a regular expression look at the same characters again and again, as a line of an instance may.
SLOW = (
    "a.", "a-", "a+", "--a", "a://b:", "://", "://:", "://a:b", "token.", "token_", "_proxy", "_proxy=", "a_proxy=x",
    "token:", 'token="', "token=[", "--token ", "--token, ", "secret", "eyJaaaaaa.", "Bearer ", "-----BEGIN ",
    "authorization", "cookie: ",
    "otel_exporter_otlp_", "sshpass -p", "pwd=", "_key=", "://hooks.slack.com/", "hooks.slack.com:", "/services/T",
    "A_HEADERS", "sshpass -p '", "x.webhook.office.com/",
    "?a-", "&sig", '\\"', "api_key: [", "hf_", "github_pat_",
)  # fmt: skip


@pytest.mark.budget
@pytest.mark.parametrize("unit", SLOW)
def test_no_line_takes_long(unit: str) -> None:
    """Eight times the text may take at most some ten times as long, not 64 times; counted in the process's own time."""

    def seconds(length: int) -> float:
        text = (unit * length)[:length] + " end"
        began = time.process_time()
        Redactor().text(text)
        return time.process_time() - began

    short = max(min(seconds(8_192) for _ in range(3)), 0.001)
    assert any(seconds(65_536) < 30 * short for _ in range(2))


@given(st.lists(st.sampled_from(("plain", f"a {SECRET}", "HF_TOKEN=hunter22", "x" * 300)), max_size=20))
def test_a_text_that_comes_again_is_masked_and_counted_again(texts: list[str]) -> None:
    redactor = Redactor([SECRET])
    assert [redactor.text(text) for text in texts] == [Redactor([SECRET]).text(text) for text in texts]
    assert redactor.count == sum(text.startswith(("a ", "HF")) for text in texts)


def test_few_texts_are_remembered() -> None:
    redactor = Redactor()
    for number in range(5000):
        redactor.text(f"line {number}")
    assert len(redactor._seen) <= 2048
