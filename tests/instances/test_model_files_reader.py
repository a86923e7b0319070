"""Reading a model's identity from a file system that may hang."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.fakes import SOON_S

from launcher.base.errors import LauncherError, PassingError
from launcher.instances.model_files_reader import ModelFilesReader
from launcher.models.identity import ModelFiles

FILES = ModelFiles("/models/v1", "0123456789abcdef")


async def test_it_returns_what_is_read_and_raises_what_is_wrong() -> None:
    assert await ModelFilesReader(lambda _path: FILES)("/m") == FILES

    def wrong(_path: str) -> ModelFiles:
        raise LauncherError("cannot read it", "mend it")

    with pytest.raises(LauncherError, match="cannot read it"):
        await ModelFilesReader(wrong)("/m")


async def test_a_file_system_that_hangs_holds_one_thread() -> None:
    may_end, tries = threading.Event(), []

    def hangs(path: str) -> ModelFiles:
        tries.append(path)
        assert may_end.wait(SOON_S)
        return FILES

    reader = ModelFilesReader(hangs, timeout_s=0.02)
    for _ in range(3):
        with pytest.raises(PassingError, match="its file system has not answered for"):
            await reader("/m")
    assert tries == ["/m"]
    reader._timeout_s = SOON_S
    last = asyncio.create_task(reader("/m"))
    await asyncio.sleep(0)
    may_end.set()
    assert await last == FILES
    assert tries == ["/m"]
    assert await reader("/m") == FILES
    assert tries == ["/m", "/m"]
