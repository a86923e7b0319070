"""Reads which files a model's path stands for, off the event loop, however long its file system takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from launcher.base.disk import OneRead
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
        self._reads: dict[str, OneRead[ModelFiles | None]] = {}

    async def __call__(self, path: str) -> ModelFiles | None:
        """Raises LauncherError; PassingError also where the files cannot be read in time."""
        read = self._reads.get(path)
        if read is None:
            read = self._reads[path] = OneRead(partial(self._read, path), "model files")
        try:
            return await read.result(self._timeout_s)
        except TimeoutError:
            raise PassingError(
                f"cannot read model {path!r}: its file system has not answered for {self._timeout_s:g} s",
                "see whether its server is up (df, dmesg)",
            ) from None
