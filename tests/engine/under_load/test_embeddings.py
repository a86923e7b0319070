"""An embedding model through the proxy, with the openai SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import READY_S, Configure, check_embeddings

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
    check_embeddings(embedder.url, "embedder", HIDDEN)
    with (
        openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError),
    ):
        client.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "x"}])
    requests = embedder.status()["requests"]
    assert (requests["accepted"], requests["completed"], requests["refused"]) == (3, 2, 1)
