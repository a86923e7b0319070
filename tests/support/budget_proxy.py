"""The proxy and the accounts of a daemon over one engine that is there already, without supervision: a process to kill.

    python budget_proxy.py FOLDER ENGINE_SOCKET API_KEYS

Prints the endpoint's URL and serves until it is killed. The ledger is in FOLDER.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from launcher.base.address import UnixAddress
from launcher.config.loading import parse_config
from launcher.daemon.accounts import Accounts
from launcher.proxy.server import ProxyServer


async def serve(folder: str, engine: str, keys: str) -> None:
    config = parse_config(
        {
            "models": [{"name": "fake", "path": "/fake"}],
            "proxy": {"listen": ["127.0.0.1:0"], "api_keys_file": keys},
            "usage": {"path": f"{folder}/usage.db"},
        },
        origin="test",
    )
    accounts = Accounts(config)
    proxy = ProxyServer(
        config.proxy,
        models=config.models,
        on_idle=lambda *_: None,
        on_suspect=lambda *_: None,
        accounting=accounts.accounting,
    )
    await accounts.start(dict)
    await proxy.start()
    proxy.add_upstream(0, 1, "fake", UnixAddress(engine), 64, context_tokens=4096)
    print(proxy.endpoint, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:]))
