"""An embedding model through the proxy, with the openai SDK."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import READY_S, Configure

from launcher.engines.tiny_model import HIDDEN

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


@pytest.fixture
def embedder(configure: Configure, tmp_path: Path) -> Iterator[DaemonProcess]:
    """One instance: the tiny model, whose last hidden state is the embedding."""
    pooling = ("--runner", "pooling")
    daemon = DaemonProcess(tmp_path, configure(name="embedder", instances=1, max_model_len=512, args=pooling))
    try:
        daemon.wait_ready(1, READY_S)
        yield daemon
    finally:
        daemon.end()


def test_the_sdk_gets_embeddings(embedder: DaemonProcess) -> None:
    texts = ["a core", "a socket", "a core"]
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        for form in ("float", "base64"):
            answer = client.embeddings.create(model="embedder", input=texts, encoding_format=form)  # type: ignore[arg-type]
            vectors = [item.embedding for item in answer.data]
            assert [item.index for item in answer.data] == [0, 1, 2]
            assert answer.usage.prompt_tokens > 0
            if form == "base64":
                continue  # the SDK leaves to its caller what was asked for in so many words
            assert {len(vector) for vector in vectors} == {HIDDEN}
            first, second, third = vectors
            assert math.isclose(sum(a * b for a, b in zip(first, third, strict=True)), 1.0, abs_tol=1e-3)
            assert sum(a * b for a, b in zip(first, second, strict=True)) < 0.999
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "x"}])
    requests = embedder.status()["requests"]
    assert (requests["accepted"], requests["completed"], requests["refused"]) == (3, 2, 1)
