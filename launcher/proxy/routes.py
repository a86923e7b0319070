"""The allow-list: the exact paths that clients may call. Everything else is 404.

vLLM (0.32, 0.33) serves its administration (/sleep, /collective_rpc, /v1/load_lora_adapter, ...) beside the API, so paths
are compared undecoded: no spelling of an administration route can match. Left out on purpose: /invocations and /ping
(SageMaker's aliases), REALTIME (a WebSocket), /server_info, /kv_event_sources, /inference/v1/abort_requests.

What else differs from route to route is in this table as well: how a whole stream ends, how its usage is asked for, and to
whose API it belongs, which decides the form of errors (error_forms.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

from launcher.proxy.sse.ends import StreamEnd


class Kind(StrEnum):
    """Who answers a route, and where its request names the model."""

    JSON = "json"  # an instance; `model` is in a JSON body
    FORM = "form"  # an instance; `model` is a multipart field (audio)
    STORED = "stored"  # the instance that stores this response
    ANY = "any"  # any ready instance
    MODELS = "models"  # the proxy, from the instances' lists
    MODEL = "model"
    HEALTH = "health"
    METRICS = "metrics"
    LOAD = "load"


class Api(StrEnum):
    """The API that a path belongs to: its clients read errors in that form."""

    OPENAI = "openai"  # and everything that has no form of its own
    RESPONSES = "responses"  # OpenAI's, with events of its own
    ANTHROPIC = "anthropic"
    COHERE = "cohere"


class UsageBy(StrEnum):
    """How a stream of a route comes to tell its usage; openai/answers.py reads all forms of it."""

    ENGINE = "engine"  # it always does
    STREAM_OPTIONS = "stream_options"  # the JSON field `include_usage` in there asks for it
    FORM_FIELD = "stream_include_usage"  # a field of a form does


HOST_METRICS = "/metrics/host"
REALTIME = "/v1/realtime"  # refused with an error of its own
OWN_PAGES = frozenset(
    {Kind.MODELS, Kind.MODEL, Kind.HEALTH, Kind.METRICS, Kind.LOAD}
)  # the proxy's own pages


@dataclass(frozen=True, slots=True)
class Stream:
    """The event stream of a route."""

    end: StreamEnd = StreamEnd.DONE
    usage: UsageBy = UsageBy.STREAM_OPTIONS
    opening: int = 0  # events before the first that brings a token (vLLM 0.32)


@dataclass(frozen=True, slots=True)
class Route:
    path: str
    methods: tuple[str, ...]
    kind: Kind
    stream: Stream | None = None  # None: it has none
    # JSON: the fields that make the prompt, in the template's order; (): no prompt.
    prompt: tuple[str, ...] = ()
    generates: bool = False  # more than a token or two

    @property
    def computes(self) -> bool:
        """Whether the model runs for it: such a request takes a place of an instance, and its tokens count."""
        return bool(self.prompt) or self.kind is Kind.FORM


@dataclass(frozen=True, slots=True)
class Match:
    """A request's route; `item` is the id at the end of the path, where the route has one."""

    route: Route
    item: str = ""


@dataclass(frozen=True, slots=True)
class NoMethod:
    """The path exists, the method does not."""

    allow: tuple[str, ...]


_OPENAI = Stream()
_RESPONSES = Stream(StreamEnd.RESPONSE_COMPLETED, UsageBy.ENGINE, opening=4)
_ANTHROPIC = Stream(StreamEnd.MESSAGE_STOP, UsageBy.ENGINE, opening=2)
_COHERE = Stream(StreamEnd.MESSAGE_END, UsageBy.ENGINE, opening=2)
_AUDIO = Stream(usage=UsageBy.FORM_FIELD)

_GET = ("GET", "HEAD")
_POST = ("POST",)
_CHAT = ("messages",)
# A request uses one of four pairs of names (vLLM 0.32, entrypoints/pooling/scoring/protocol.py).
_SCORED = ("queries", "text_1", "data_1", "documents", "items", "text_2", "data_2")

ROUTES: tuple[Route, ...] = (
    Route("/health", _GET, Kind.HEALTH),
    Route("/metrics", _GET, Kind.METRICS),
    # /metrics?view=host for those who can configure a path without a query.
    Route(HOST_METRICS, _GET, Kind.METRICS),
    Route("/load", _GET, Kind.LOAD),
    Route("/version", _GET, Kind.ANY),
    Route("/tokenizer_info", _GET, Kind.ANY),
    Route("/v1/models", _GET, Kind.MODELS),
    Route("/v1/audio/transcriptions", _POST, Kind.FORM, _AUDIO),
    Route("/v1/audio/translations", _POST, Kind.FORM, _AUDIO),
    *(
        Route(path, _POST, Kind.JSON, stream, prompt, generates=True)
        for path, stream, prompt in (
            ("/v1/chat/completions", Stream(opening=1), _CHAT),
            ("/v1/chat/completions/batch", None, _CHAT),
            ("/v1/completions", _OPENAI, ("prompt",)),
            ("/v1/responses", _RESPONSES, ("instructions", "input")),
            ("/v1/messages", _ANTHROPIC, ("system", "messages")),
            ("/cohere/v2/chat", _COHERE, ("documents", "messages")),
            ("/inference/v1/generate", _OPENAI, ("token_ids",)),
        )
    ),
    *(
        Route(path, _POST, Kind.JSON, prompt=prompt)
        for path, prompt in (
            ("/v1/embeddings", ("messages", "input")),
            ("/v1/score", _SCORED),
            ("/score", _SCORED),
            ("/v1/rerank", ("query", "documents")),
            ("/v2/rerank", ("query", "documents")),
            ("/rerank", ("query", "documents")),
            ("/v1/systemone", ("instructions", "state", "questions")),
            ("/v1/decisions", ("input", "questions")),  # vLLM 0.33
            ("/v2/embed", ("texts", "inputs")),
            ("/classify", ("messages", "input")),
            ("/pooling", ("messages", "input", "data")),
            ("/generative_scoring", ("query", "items")),
        )
    ),
    # Tokenizing and templates only (vLLM 0.32, entrypoints/serve and scale_out; llama.cpp, tools/server): no prompt is run.
    *(
        Route(path, _POST, Kind.JSON)
        for path in (
            "/v1/chat/completions/render",
            "/v1/chat/completions/derender",
            "/v1/completions/render",
            "/v1/completions/derender",
            "/v1/messages/count_tokens",
            "/v1/responses/input_tokens",  # llama-server's and OpenAI's; vLLM has none
            "/v1/chat/completions/input_tokens",  # llama-server's
            "/v1/messages/render",
            "/v1/responses/render",
            "/cohere/v2/chat/render",
            "/tokenize",
            "/detokenize",
        )
    ),
)

# By path, for what lies below it as well: there may be no such route (404), or no whole head that names one.
_APIS = (
    ("/v1/messages", Api.ANTHROPIC),
    ("/v1/responses", Api.RESPONSES),
    ("/cohere", Api.COHERE),
    ("/v2", Api.COHERE),  # OpenAI's and Anthropic's APIs have no second version
)

_EXACT = {route.path: Match(route) for route in ROUTES}
_STORED = Route("/v1/responses/{id}", ("GET",), Kind.STORED, _RESPONSES)
_CANCEL = Route("/v1/responses/{id}/cancel", _POST, Kind.STORED)
_MODEL = Route("/v1/models/{id}", _GET, Kind.MODEL)
_RESPONSE_ID = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,200})(/cancel)?")
_MODEL_ID = re.compile(r"/v1/models/(.{1,1000})")


def split_target(target: str) -> tuple[str, str]:
    """`(path, query)` of a request target, undecoded; absolute form loses scheme and authority.

    A server must accept absolute form (RFC 9112 section 3.2.2). Asterisk and authority form match no route.
    """
    if target[:1] == "/" and "?" not in target:
        return target, ""
    lowered = target[:8].lower()
    for scheme in ("http://", "https://"):
        if lowered.startswith(scheme):
            rest = target[len(scheme) :]
            cut = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
            target = rest[cut:]
            break
    path, mark, query = target.partition("?")
    return path, mark + query


def _route_of(path: str) -> Match | None:
    if exact := _EXACT.get(path):
        return exact
    if found := _RESPONSE_ID.fullmatch(path):
        return Match(_CANCEL if found[2] else _STORED, found[1])
    if found := _MODEL_ID.fullmatch(path):
        return Match(_MODEL, unquote(found[1]))
    return None


def api_of(path: str) -> Api:
    """The API that a path belongs to, whether there is such a route or not. `path` is undecoded and without its query."""
    for prefix, api in _APIS:
        if path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in {"", "/"}:
            return api
    return Api.OPENAI


def match(method: str, path: str) -> Match | NoMethod | None:
    """The route of a request, or why there is none. `path` is undecoded and without its query."""
    found = _route_of(path)
    if found is None:
        return None
    if method not in found.route.methods:
        return NoMethod(found.route.methods)
    return found
