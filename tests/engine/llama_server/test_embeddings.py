"""Two llama-servers that embed or rank: the same answers of both, and a kill under load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import ask, check_embeddings, engine_of

from launcher.engines.tiny_model import HIDDEN

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

Start = Callable[..., DaemonProcess]
# Their lengths differ: llama.cpp embeds texts of one length rightly in any case.
TEXTS = [f"{words} " * length for words in ("a core", "two sockets", "a node") for length in range(1, 9)]
WORKERS = 8
# Elements of a vector of 256 are about 0.06.
CLOSE = 0.001


def through_a_kill(daemon: DaemonProcess, path: str, body: dict[str, Any]) -> list[tuple[int, Any]]:
    """Status and JSON of each request of a steady load, in which an instance is killed and replaced."""
    answers: list[tuple[int, Any]] = []
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            answers.append(ask(daemon, path, body))

    with ThreadPoolExecutor(WORKERS) as pool:
        works = [pool.submit(work) for _ in range(WORKERS)]
        try:
            eventually(lambda: len(answers) >= 20, what="answers")
            engine_of(daemon.slot(0)).kill()
            eventually(
                lambda: daemon.slot(0)["restarts"] >= 1 and daemon.status()["ready"] == 2, what="a restart"
            )
            before = len(answers)
            eventually(lambda: len(answers) >= before + 20, what="answers")
        finally:
            ended.set()
    for each in works:
        each.result()
    requests = daemon.status()["requests"]
    assert requests["failed"] == 0
    assert requests["retried"] > 0, "the kill met no request"
    return answers


def embedded(answer: Any) -> Any:
    return np.array([item["embedding"] for item in answer["data"]])


def scores(answer: Any) -> Any:
    """In the order of the documents."""
    return np.array(
        [item["relevance_score"] for item in sorted(answer["results"], key=lambda item: item["index"])]
    )


def check_together(
    daemon: DaemonProcess, path: str, body: dict[str, Any], texts: str, numbers: Callable[[Any], Any]
) -> None:
    """Texts give the same numbers together as each alone, on both instances and through a kill. `texts`: their key in the
    body; `numbers`: those of an answer, in the order of the texts."""
    alone = [daemon.post(0, path, body | {texts: [text]}) for text in TEXTS]
    expected = np.concatenate([numbers(answer) for answer in alone])
    together = body | {texts: TEXTS}
    for slot in (0, 1):
        assert np.allclose(numbers(daemon.post(slot, path, together)), expected, rtol=0, atol=CLOSE)
    for status, answer in through_a_kill(daemon, path, together):
        assert status == 200
        assert np.allclose(numbers(answer), expected, rtol=0, atol=CLOSE)


def test_embeddings(start_by_kind: Start) -> None:
    # The tiny model's file names no pooling; without one llama-server refuses /v1/embeddings.
    daemon = start_by_kind("--embedding", "--pooling", "mean")
    check_embeddings(daemon.url, "tiny", HIDDEN)
    check_together(daemon, "/v1/embeddings", {"model": "tiny"}, "input", embedded)


def test_ranks(start_by_kind: Start) -> None:
    """The tiny model has no head for ranks: a score is a number of its vector, and means nothing."""
    body = {"model": "tiny", "query": "a core"}
    check_together(start_by_kind("--rerank"), "/v1/rerank", body, "documents", scores)
