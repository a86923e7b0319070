"""[audit] strict: while the audit trail cannot be written, a request is refused before an instance is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.proxy_under_test import Build, until

from launcher.accounts import audit
from launcher.accounts.audit import AuditTrail
from launcher.accounts.audit_verify import verify
from launcher.base.writer import Writer
from launcher.config.usage_schema import Audit
from launcher.proxy.ended import Accounting


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "TURN_S", 0.02)


def recorded(folder: Path) -> list[dict[str, object]]:
    (path,) = folder.glob("audit-*.jsonl")
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "request"]


async def test_requests_are_recorded_without_their_words(build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "trail"
    trail = AuditTrail(folder, Audit(strict=True), "1.0")
    writer = Writer("audit", trail)
    writer.start()
    trail.flush(60)
    proxy = await build(accounting=Accounting(record=trail.put, unrecorded=trail.refusal))
    await proxy.engine(3)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a secret word"}]})
    head = {"X-Request-Id": "mine-1"}
    async with proxy.client.post("/v1/chat/completions", data=body, headers=head) as answer:
        assert answer.status == 200
        said = (await answer.json())["choices"][0]["message"]["content"]
    async with proxy.client.post("/v1/chat/completions", data=b"{") as answer:
        assert answer.status == 400
    async with proxy.client.get("/health") as answer:
        assert answer.status == 200
    await until(lambda: trail.lines == 2)
    writer.stop(20)
    good, bad = recorded(folder)
    assert (good["request_id"], good["model"], good["slot"], good["status"]) == ("mine-1", "m", 3, 200)
    assert (good["outcome"], good["left_host"], good["path"]) == ("completed", False, "/v1/chat/completions")
    assert (bad["status"], bad["outcome"], bad["slot"]) == (400, "rejected", None)
    text = "".join(path.read_text() for path in folder.iterdir())
    assert "secret word" not in text
    assert said
    assert f'"{said}"' not in text
    assert verify(folder).wrong is None


@pytest.mark.parametrize("strict", [True, False])
async def test_a_trail_that_cannot_be_written(build: Build, tmp_path: Path, *, strict: bool) -> None:
    folder = tmp_path / "trail"
    folder.mkdir()
    folder.chmod(0o777)
    trail = AuditTrail(folder, Audit(strict=strict), "1.0")
    writer = Writer("audit", trail)
    writer.start()
    trail.flush(60)
    proxy = await build(accounting=Accounting(record=trail.put, unrecorded=trail.refusal))
    engine = await proxy.engine(0)
    async with proxy.chat() as answer:
        if strict:
            assert answer.status == 503
            error = (await answer.json())["error"]
            assert error["code"] == "audit_unavailable"
            assert error["message"] == "the audit trail cannot be written: other users may write there"
            assert int(answer.headers["Retry-After"]) >= 1
        else:
            assert answer.status == 200
    assert len(engine.calls) == (0 if strict else 1)
    async with proxy.client.get("/metrics") as answer:
        assert answer.status == 200
    folder.chmod(0o750)
    await until(lambda: trail.problem is None)
    async with proxy.chat() as answer:
        assert answer.status == 200
    assert proxy.balanced()
    await until(lambda: trail.lines == 2)
    writer.stop(20)
    first, second = recorded(folder)
    assert (first["status"], second["status"]) == (503 if strict else 200, 200)
    assert verify(folder).wrong is None
