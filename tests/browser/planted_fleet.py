"""The status of an ingress, planted: any number of hosts behind a socket that answers as that of `fleet ingress` does."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any, Final, Self

INSTANCES: Final = 8
# Of every so many hosts one is like that.
_DOWN, _DRAINING, _PARTLY, _SLOW = 97, 61, 37, 83


def planted(hosts: int) -> dict[str, Any]:
    """A fleet under load, with hosts of each kind among enough of them."""
    names = [f"host{number}" for number in range(1, hosts + 1)]
    loads = {name: _load(number) for number, name in enumerate(names)}
    running = {name: load["running"] for name, load in loads.items() if not load["draining"]}
    total = sum(running.values())
    members = [
        {
            "host": name, "address": f"10.0.{number // 200}.{number % 200 + 1}:8001",
            "state": "draining" if loads[name]["draining"] else "ready", "node": "",
        }
        for number, name in enumerate(names)
    ]  # fmt: skip
    return {
        "members": {"epoch": 1795440000, "version": 12, "members": members},
        "servers": {}, "decides": True, "asked": 812_347, "held": 3, "hosts": loads,
        "shares": {name: round(count / total, 4) for name, count in running.items()},
    }  # fmt: skip


def _load(number: int) -> dict[str, Any]:
    if number % _DOWN == 9:
        return {"draining": False, "lost": True, "sent": 0, "running": 0, "stragglers": []}
    draining, slow = number % _DRAINING == 5, number % _SLOW == 7
    return {
        "draining": draining, "lost": False, "sent": 30, "instances": INSTANCES,
        "ready": INSTANCES - (number % _PARTLY == 2), "running": 4 if draining or slow else 40 + number * 7 % 23,
        "waiting": number * 5 % 4, "predicted_ttft_s": 0.21 + number * 13 % 17 / 50 + 0.6 * slow,
        "kv_usage": 0.35 + number * 11 % 40 / 100, "stragglers": [1, 3] if slow else [],
    }  # fmt: skip


class PlantedIngress:
    """Answers each connection with `text`, and counts them."""

    def __init__(self, folder: Path, status: dict[str, Any], **config: str) -> None:
        """`config`: more keys of [hosts] in fleet.toml."""
        self.show(status)
        self.asked = 0
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "fleet.toml"
        more = "".join(f'{name} = "{value}"\n' for name, value in config.items())
        self.config.write_text(
            f'state = "{folder}"\n[ingress]\nhosts = ["10.0.0.1", "10.0.0.2"]\n[hosts]\n{more}'
        )
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / "ingress.sock"))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="planted ingress")

    def show(self, status: dict[str, Any]) -> None:
        self.text = json.dumps(status).encode()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                if not self.text:
                    return
                self.asked += 1
                connection.sendall(self.text)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.text = b""
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self._socket.getsockname())
        self._thread.join()
        self._socket.close()
