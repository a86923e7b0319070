"""The certificates of an ingress host, watched: each has a state, and a renewed one is used without a restart."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from launcher.base.errors import LauncherError, RefusedError, TimedOutError, reason
from launcher.base.files import why_away
from launcher.base.watched_file import FileCondition, FileState, FileThatMayCome, WatchedFile, WatchedFiles
from launcher.fleet.config import FleetConfig
from launcher.fleet.haproxy import Servers
from launcher.fleet.loads import trust
from launcher.proxy.downstream.tls import Chain, ServerTls, load_chain, validities

_LOG: Final = logging.getLogger(__name__)

_PEM: Final = "name a PEM file with certificate and key in [ingress] {} of fleet.toml"
_CA: Final = "correct [hosts] ca in fleet.toml: a PEM file with the authority of the daemons' certificates"


class Certificates:
    """Those of clients and of the hosts' authority are HAProxy's, that of the picker is this process's."""

    def __init__(self, config: FleetConfig) -> None:
        """Raises LauncherError for a `picker_cert` that cannot be used, TimedOutError while it or `ca` is not there."""
        ingress, ca = config.ingress, config.hosts.ca
        for key, path in (("[ingress] picker_cert", ingress.picker_cert), ("[hosts] ca", ca)):
            _require(key, path)
        self.picker = (
            ServerTls(
                ingress.picker_cert, what="certificate of the picker", remedy=_PEM.format("picker_cert")
            )
            if ingress.picker_cert
            else None
        )
        """None: it is asked without TLS."""
        self._clients = _may_come("certificate of the ingress", ingress.tls_cert, _chain)
        self._authority = _may_come("authority of the hosts", ca, _authority)
        self._given: dict[str, str] = {}
        """Text that HAProxy has, by use."""
        self._refused: dict[str, LauncherError] = {}
        """Why HAProxy has another one, by use."""
        self._files = WatchedFiles(
            (*self._clients, *self._authority, *(() if self.picker is None else self.picker.files))
        )

    def look(self, now: float) -> None:
        """Begin to read what has changed; `now` is a monotonic clock's."""
        self._files.look(now)

    def authority(self, now: float) -> ssl.SSLContext | None:
        """How the daemons are asked now; None where they have no certificates, or it cannot be read."""
        found = next((file.latest(now) for file in self._authority), None)
        return None if found is None else found.context

    async def hand_on(self, servers: Servers, now: float) -> None:
        """Give HAProxy what it may not have: it has read the files at its start, which may have been before this process's.
        Raises LauncherError for what it does not take."""
        for file in self._clients:
            if (chain := self._new(file, now)) is not None:
                await self._handed(servers.renew(file.path, chain.pem), file.what, chain)
        for file in self._authority:
            if (chain := self._new(file, now)) is not None:
                await self._handed(servers.check_authority(file.path, chain.pem), file.what, chain)

    def started(self) -> None:
        """HAProxy has been started: it has read the files."""
        self._given.clear()
        self._refused.clear()

    def _new(self, file: FileThatMayCome[Chain], now: float) -> Chain | None:
        newest = file.latest(now)
        return None if newest is None or self._given.get(file.what) == newest.pem else newest

    async def _handed(self, given: Awaitable[None], what: str, chain: Chain) -> None:
        try:
            await given
        except RefusedError as error:  # until it is started again
            _LOG.warning("%s (%s)", error.message, error.remedy)
            self._refused[what] = error
        except LauncherError as error:
            self._refused[what] = error
            raise
        else:
            self._refused.pop(what, None)
        self._given[what] = chain.pem

    def states(self) -> tuple[FileState, ...]:
        """As of the last `look`, of which there must have been one."""
        return tuple(self._of_haproxy(state) for state in self._files.states())

    def _of_haproxy(self, state: FileState) -> FileState:
        """Not in use where HAProxy has refused it."""
        refused = self._refused.get(state.what)
        if refused is None or state.state is not FileCondition.IN_USE:
            return state
        why = f"{refused.message}; the {state.what} before stays in force"
        return replace(state, state=FileCondition.UNUSABLE, why=why, remedy=refused.remedy)


def _require(key: str, path: str | None) -> None:
    """Raises TimedOutError for a file that may come by itself: systemd starts the ingress again."""
    if path is not None and (why := why_away(path)) is not None:
        raise TimedOutError(
            f"cannot read {key} '{path}': {why}", f"make the file, or correct {key} in fleet.toml"
        )


def _may_come(
    what: str, path: str | None, read: Callable[[str], Chain]
) -> tuple[FileThatMayCome[Chain], ...]:
    """The file, if there is to be one."""
    if path is None:
        return ()

    def watch() -> WatchedFile[Chain]:
        return WatchedFile(what, partial(read, path), path, validity=lambda its: its.validity)

    return (FileThatMayCome(what, path, watch),)


def _chain(path: str) -> Chain:
    return load_chain(path, None, _PEM.format("tls_cert"))


def _authority(path: str) -> Chain:
    """Valid as long as one of its certificates is: while an authority is replaced there are two. Raises LauncherError."""
    context = trust(path)
    assert context is not None  # noqa: S101  there is a path
    try:
        pem = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise LauncherError(f"cannot read '{path}': {reason(error)}", _CA) from None
    bounds = validities(pem)
    valid = (min(begin for begin, _ in bounds), max(end for _, end in bounds)) if bounds else None
    return Chain(context, valid, pem)
