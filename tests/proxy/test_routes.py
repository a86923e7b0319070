"""What is let in, what is not, in any spelling."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.routes import ROUTES, Kind, Match, NoMethod, match, split_target

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


@pytest.mark.parametrize("path", ADMINISTRATION)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT"])
def test_administration_is_not_there(method: str, path: str) -> None:
    assert match(method, path) is None


@pytest.mark.parametrize("path", ADMINISTRATION)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_reaches_administration(path: str, spelling: str) -> None:
    found = match("POST", split_target(spelling.format(path))[0])
    assert not isinstance(found, Match)


@given(st.sampled_from(ADMINISTRATION), st.data())
def test_no_encoding_reaches_administration(path: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(path) - 1))
    spelled = path[:at] + f"%{ord(path[at]):02x}" + path[at + 1 :]
    assert match("POST", spelled) is None


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_each_route_has_its_methods(route: object) -> None:
    assert route in ROUTES
    for allowed in route.methods:
        assert match(allowed, route.path) == Match(route)
    refused = match("DELETE", route.path)
    assert isinstance(refused, NoMethod)
    assert match("POST", quote(route.path[:-1]) + f"%{ord(route.path[-1]):02x}") is None


@pytest.mark.parametrize(
    ("method", "path", "kind", "item"),
    [
        ("GET", "/v1/responses/resp_0a-Z", Kind.STORED, "resp_0a-Z"),
        ("POST", "/v1/responses/resp_1/cancel", Kind.STORED, "resp_1"),
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


@pytest.mark.engine
def test_every_route_of_the_installed_vllm_was_judged() -> None:
    """A new vLLM's new route is either let in or known as one to keep out. Reads its sources, starts nothing."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no vLLM in this environment")
    root = Path(spec.submodule_search_locations[0]) / "entrypoints"
    literal = re.compile(r'@router\.(?:get|post)\(\s*"(/[^"]+)"')
    found = {path for file in root.rglob("api_router.py") for path in literal.findall(file.read_text())}
    judged = {
        path for path in found if match("GET", path.format(response_id="resp_1", cancel="")) is not None
    }
    assert "/v1/chat/completions" in judged
    assert found - judged <= set(ADMINISTRATION)
