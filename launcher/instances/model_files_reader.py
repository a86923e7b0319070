"""Reads which files a model's path stands for, off the event loop, however long its file system takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from launcher.base.errors import PassingError
from launcher.models.identity import ModelFiles, model_files

# A network file system answers in milliseconds; one whose server is away may block for ever.
READ_S: Final = 20.0

Identify = Callable[[str], Awaitable[ModelFiles | None]]
"""The files of a model's path; None for a repository id that is not here. Raises LauncherError."""


class ModelFilesReader:
    """An `Identify`. A file system that hangs holds one thread for each path, however often it is asked for, and no exit of
    the daemon waits for it."""

    def __init__(
        self, read: Callable[[str], ModelFiles | None] = model_files, timeout_s: float = READ_S
    ) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._reading: dict[str, asyncio.Future[ModelFiles | None]] = {}

    async def __call__(self, path: str) -> ModelFiles | None:
        """Raises LauncherError; PassingError also where the files cannot be read in time."""
        reading = self._reading.get(path)
        if reading is None:
            reading = self._reading[path] = self._begin(path)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(reading)
        except TimeoutError:
            raise PassingError(
                f"cannot read model {path!r}: its file system has not answered for {self._timeout_s:g} s",
                "see whether its server is up (df, dmesg)",
            ) from None

    def _begin(self, path: str) -> asyncio.Future[ModelFiles | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ModelFiles | None] = loop.create_future()
        future.add_done_callback(lambda done: self._end(path, done))

        def settle(found: ModelFiles | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(found)
            else:
                future.set_exception(error)

        def read() -> None:
            found, failed = None, None
            try:
                found = self._read(path)
            except Exception as error:
                failed = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, found, failed)

        threading.Thread(target=read, name="model files", daemon=True).start()
        return future

    def _end(self, path: str, done: asyncio.Future[ModelFiles | None]) -> None:
        self._reading.pop(path, None)
        if not done.cancelled():
            done.exception()  # seen, also where nobody waits any more
