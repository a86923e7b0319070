"""Waiting for what may come by itself before the daemon starts; meanwhile the control socket says what is lacking."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from launcher.base.errors import LauncherError, PassingError
from launcher.base.files import why_away
from launcher.config.schema import Config, Control, Proxy
from launcher.control.handlers import NotYet
from launcher.control.server import ControlServer
from launcher.daemon.deployment import require_models
from launcher.proxy.downstream import listener

_LOG: Final = logging.getLogger("launcher.daemon")


def require(config: Config) -> None:
    """Raise PassingError for what the daemon needs and does not find: names of its addresses, files of [proxy], models of a
    custom server (those of vLLM are read by `build_deployment`, which raises it too)."""
    if not listener.sockets():  # systemd's are bound
        listener.require_names(config.proxy.listen)
    _require_files(config.proxy)
    require_models(config)


def _require_files(proxy: Proxy) -> None:
    """Raise PassingError for a file of [proxy] that is not there: its file system is mounted late, or a certificate is not
    issued yet. Those that cannot be used for another reason are named by what reads them."""
    named = {
        "tls_certificate": proxy.tls_certificate, "tls_key": proxy.tls_key, "api_keys_file": proxy.api_keys_file,
    } | {f"overflow.{number}.api_key_file": one.api_key_file for number, one in enumerate(proxy.overflow)}  # fmt: skip
    for key, path in named.items():
        if path is not None and (why := why_away(path)) is not None:
            raise PassingError(
                f"cannot read proxy.{key} '{path}': {why}",
                f"make the file, mount its file system, or correct proxy.{key}",
            )


class StandbyServer:
    """Answers on the control socket from the first `tell` on until the end of the context, in a thread of its own: what is
    waited for is read by the thread that waits. `tell` hands on each new error."""

    def __init__(self, settings: Control, told: Callable[[str], None]) -> None:
        """`told`: gets the line for the log and for systemd."""
        self._settings = settings
        self._told = told
        self._error = PassingError("", "")
        self._thread: threading.Thread | None = None
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()

    def tell(self, error: PassingError) -> None:
        self._error = error
        self._told(f"{error.message}; waiting for it ({error.remedy})")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="waiting")
            self._thread.start()

    def _run(self) -> None:
        self._loop.run_until_complete(self._answer())

    async def _answer(self) -> None:
        settings, answers = self._settings, NotYet(lambda: self._error)
        with contextlib.ExitStack() as stack:
            # Copies: a server closes its sockets, and systemd's are the daemon's afterwards.
            theirs = listener.sockets().get(listener.CONTROL, ())
            ready = [stack.enter_context(sock.dup()) for sock in theirs]
            try:
                server = ControlServer(
                    settings.socket, settings.group, answers, read_group=settings.read_group
                )
                await server.start(ready)
            except LauncherError as error:  # the daemon itself will say so once it starts
                _LOG.warning("%s (%s)", error.message, error.remedy)
                return
            await self._over.wait()
            await server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
        self._loop.close()
