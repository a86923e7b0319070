"""What is let in, what is not, in any spelling."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.routes import ROUTES, Api, Kind, Match, NoMethod, Route, api_of, match, split_target

ADMINISTRATION = """
    /sleep /wake_up /is_sleeping /collective_rpc /reset_prefix_cache /reset_mm_cache /reset_encoder_cache
    /v1/load_lora_adapter /v1/unload_lora_adapter /pause /resume /is_paused /abort_requests
    /inference/v1/abort_requests /scale_elastic_ep /is_scaling_elastic_ep /release_kv_cache_memory
    /update_weights /init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update
    /start_draft_weight_update /finish_weight_update /update_weight_version /weight_info /weight_checker
    /get_world_size /start_profile /stop_profile /server_info /kv_event_sources
    /fault_tolerance/apply /fault_tolerance/status /invocations /ping /docs /openapi.json /static/x
""".split()  # noqa: SIM905

SPELLINGS = [
    "{0}/",
    "/{0}",
    "/v1/..{0}",
    "/v1/%2e%2e{0}",
    "/v1/%2E%2E{0}",
    "/v1/models/..{0}/x",
    "/v1/responses/..{0}",
    "/v1/responses/%2e%2e{0}",
    "/.{0}",
    "/V1{0}",
    "{0}%00",
    "{0};x",
    "\\{0}",
    "{0}#",
]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT"])
def test_administration_is_not_there(method: str) -> None:
    assert [path for path in ADMINISTRATION if match(method, path) is not None] == []


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_reaches_administration(spelling: str) -> None:
    found = {path: match("POST", split_target(spelling.format(path))[0]) for path in ADMINISTRATION}
    assert [path for path, its in found.items() if isinstance(its, Match)] == []


@given(st.sampled_from(ADMINISTRATION), st.data())
def test_no_encoding_reaches_administration(path: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(path) - 1))
    spelled = path[:at] + f"%{ord(path[at]):02x}" + path[at + 1 :]
    assert match("POST", spelled) is None


def test_each_route_has_its_methods() -> None:
    for route in ROUTES:
        for allowed in route.methods:
            assert match(allowed, route.path) == Match(route)
        refused = match("DELETE", route.path)
        assert isinstance(refused, NoMethod), route
        assert match("POST", quote(route.path[:-1]) + f"%{ord(route.path[-1]):02x}") is None, route


@pytest.mark.parametrize(
    ("method", "path", "kind", "item"),
    [
        ("GET", "/v1/responses/resp_0a-Z", Kind.STORED, "resp_0a-Z"),
        ("POST", "/v1/responses/resp_1/cancel", Kind.STORED, "resp_1"),
        ("POST", "/v1/responses/input_tokens", Kind.JSON, ""),
        ("GET", "/v1/models/Qwen/Qwen3-8B", Kind.MODEL, "Qwen/Qwen3-8B"),
        ("GET", "/v1/models/Qwen%2FQwen3-8B", Kind.MODEL, "Qwen/Qwen3-8B"),
    ],
)
def test_ids_in_paths(method: str, path: str, kind: Kind, item: str) -> None:
    found = match(method, path)
    assert isinstance(found, Match)
    assert (found.route.kind, found.item) == (kind, item)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", ("POST",)),
        ("POST", "/v1/models", ("GET", "HEAD")),
        ("GET", "/v1/responses/resp_1/cancel", ("POST",)),
        ("OPTIONS", "/v1/completions", ("POST",)),
        ("GET", "/v1/responses/render", ("POST",)),
    ],
)
def test_a_wrong_method_says_which(method: str, path: str, allow: tuple[str, ...]) -> None:
    assert match(method, path) == NoMethod(allow)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/v1/models", "/v1/models", ""),
        ("/v1/models?a=1?b", "/v1/models", "?a=1?b"),
        ("http://h:80/v1/models?x", "/v1/models", "?x"),
        ("HTTPS://h/sleep", "/sleep", ""),
        ("http://h", "", ""),
        ("http://h?x", "", "?x"),
        ("*", "*", ""),
        ("h:80", "h:80", ""),
    ],
)
def test_targets(target: str, path: str, query: str) -> None:
    assert split_target(target) == (path, query)


# What routers of vLLM 0.33 declare (entrypoints/) and clients may call. /v1/decisions is not in 0.32.
ENGINE = """
    get /health get /load get /version get /tokenizer_info get /v1/models get /v1/responses/{response_id}
    post /v1/chat/completions post /v1/chat/completions/batch post /v1/completions post /v1/responses
    post /v1/responses/{response_id}/cancel post /v1/messages post /v1/messages/count_tokens post /cohere/v2/chat
    post /cohere/v2/chat/render post /generative_scoring post /v1/systemone post /v1/decisions post /classify
    post /v1/embeddings post /v2/embed post /pooling post /score post /v1/score post /rerank post /v1/rerank
    post /v2/rerank post /v1/chat/completions/render post /v1/chat/completions/derender post /v1/completions/render
    post /v1/completions/derender post /v1/messages/render post /v1/responses/render post /inference/v1/generate
    post /tokenize post /detokenize post /v1/audio/transcriptions post /v1/audio/translations
""".split()  # noqa: SIM905
SERVED = set(zip(ENGINE[::2], ENGINE[1::2], strict=True))
LLAMA_SERVER = {("post", "/v1/responses/input_tokens"), ("post", "/v1/chat/completions/input_tokens")}
# Of other processes of vLLM (entrypoints/launchers/dp_supervisor.py), and REALTIME, which gets an error of its own.
NOT_OURS = {"/ready", "/readyz", "/v1/realtime", "/static"}
STREAMED = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/cohere/v2/chat",
    "/inference/v1/generate", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/responses/{response_id}",
}  # fmt: skip


def route_of(method: str, path: str) -> Route | None:
    found = match(method.upper(), path.format(response_id="resp_1"))
    return found.route if isinstance(found, Match) else None


def test_the_routes_of_the_engine_are_served() -> None:
    found = {(method, path): route_of(method, path) for method, path in SERVED | LLAMA_SERVER}
    assert [asked for asked, route in found.items() if route is None] == []
    streamed = {asked for asked, route in found.items() if route is not None and route.stream is not None}
    assert streamed == {(method, path) for method, path in found if path in STREAMED}


def test_the_table_has_nothing_that_the_engine_has_not() -> None:
    ours = {route.path for route in ROUTES if route.kind in {Kind.JSON, Kind.FORM, Kind.ANY}}
    assert ours <= {path for _, path in SERVED | LLAMA_SERVER}


_VERBS = {
    "get",
    "post",
    "put",
    "patch",
    "delete",
    "head",
    "options",
    "api_route",
    "add_api_route",
    "websocket",
    "mount",
}


def _routes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Method and path of each route that a syntax tree declares, whatever its router is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VERBS:
            match node.args:
                case [ast.Constant(value=str() as path), *_] if path.startswith("/"):
                    yield node.func.attr, path
                case _:
                    pass


@pytest.mark.engine
def test_every_route_of_the_installed_vllm_was_judged() -> None:
    """A new vLLM's new route is either let in or known as one to keep out. Reads its sources, starts nothing."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no vLLM in this environment")
    root = Path(spec.submodule_search_locations[0]) / "entrypoints"
    texts = [file.read_text() for file in root.rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "fastapi" in text]
    found = {route for tree in trees for route in _routes(tree)}
    assert ("post", "/v1/chat/completions") in found
    assert {route for route in found - SERVED if route[1] not in {*ADMINISTRATION, *NOT_OURS}} == set()
    streamed = {
        path
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and "media_type='text/event-stream'" in ast.unparse(node)
        for decorator in node.decorator_list
        for _, path in _routes(decorator)
    }
    assert "/v1/messages" in streamed
    assert streamed <= STREAMED


@pytest.mark.parametrize(
    ("api", "paths"),
    [
        (Api.ANTHROPIC, "/v1/messages /v1/messages/count_tokens /v1/messages/render /v1/messages/batches"),
        (
            Api.RESPONSES,
            "/v1/responses /v1/responses/resp_1 /v1/responses/resp_1/cancel /v1/responses/compact",
        ),
        (Api.COHERE, "/v2/embed /v2/rerank /v2/chat /cohere/v2/chat /cohere/v2/chat/render /cohere/v1/chat"),
        (
            Api.OPENAI,
            "/v1/chat/completions /v1/embeddings /v1/rerank /v1/messagesx /v1/models/v2 /health / - *",
        ),
    ],
)
def test_a_path_belongs_to_an_api_whether_it_is_served_or_not(api: Api, paths: str) -> None:
    assert {api_of(path) for path in paths.split()} == {api}
