"""`numa-launcher key add|list|revoke`: edits the API keys file."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli import options
from launcher.errors import LauncherError
from launcher.text_table import table

if TYPE_CHECKING:
    from launcher.proxy.auth.key_record import KeyRecord

DEFAULT_FILE = Path("/etc/numa-launcher/api-keys")
_LIMITS = ("concurrency", "requests_per_minute", "tokens_per_minute")
_MAX_LIMIT = 10**12


def _number(text: str) -> int:
    """Also accepts 1_000_000 and 1,000,000."""
    return options.whole(1, _MAX_LIMIT)(text.replace("_", "").replace(",", ""))


_LIMIT = options.Value("a number of 1 or more", _number)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add = actions.add_parser(
        "add", help="create an API key and print it, once",
        description="Create an API key and print it, once.", allow_abbrev=False,
    )  # fmt: skip
    add.add_argument("name", metavar="NAME", help="name the key's user; shown in logs and metrics")
    add.add_argument(
        "--concurrency", type=_LIMIT, metavar="N", help="limit the requests waiting or running at once"
    )
    add.add_argument(
        "--requests-per-minute", type=_LIMIT, metavar="N", help="limit the requests started per minute"
    )
    add.add_argument(
        "--tokens-per-minute", type=_LIMIT, metavar="N",
        help="limit the tokens of prompts and responses per minute",
    )  # fmt: skip
    add.add_argument(
        "--model", action="append", default=[], metavar="M", dest="models",
        help="allow this model; can be repeated (default: all models)",
    )  # fmt: skip
    add.add_argument(
        "--local-only",
        action="store_true",
        help="never send its requests to an overflow endpoint",
    )
    add.add_argument("--json", action="store_true", help="print the key and its record as JSON")
    show = actions.add_parser(
        "list", help="print names and limits of all keys, without the secrets",
        description="Print names and limits of all keys, without the secrets.", allow_abbrev=False,
    )  # fmt: skip
    show.add_argument("--json", action="store_true", help="print JSON")
    revoke = actions.add_parser(
        "revoke", help="revoke an API key", description="Revoke an API key.", allow_abbrev=False
    )
    revoke.add_argument(
        "key", metavar="ID|NAME", help="revoke the key with this id or name, as `list` prints it"
    )
    for action in (add, show, revoke):
        action.add_argument("--file", type=Path, metavar="FILE", help="use this API keys file")
        action.add_argument(
            "-c", "--config", type=Path, metavar="FILE",
            help=f"use proxy.api_keys_file of this configuration file (default: {options.DEFAULT_CONFIG})",
        )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Edit or print the file. A running daemon applies a change within a second."""
    path = _file_of(args)
    match args.action:
        case "add":
            return _add(args, path)
        case "list":
            return _list(args, path)
        case _:
            return _revoke(args, path)


def _file_of(args: argparse.Namespace) -> str:
    if args.file is not None:
        return str(args.file)
    if args.config is None and not options.DEFAULT_CONFIG.exists():
        raise LauncherError(
            "cannot find the API keys file: neither --file nor -c is given, and "
            f"'{options.DEFAULT_CONFIG}' does not exist",
            "give --file FILE, or a configuration with -c FILE",
        )
    from launcher.config.load import load_config  # noqa: PLC0415  heavy

    config = args.config or options.DEFAULT_CONFIG
    path = load_config(config, environ=os.environ).proxy.api_keys_file
    if path is None:
        raise LauncherError(
            f"cannot find the API keys file: '{config}' does not set proxy.api_keys_file",
            f'set api_keys_file = "{DEFAULT_FILE}" under [proxy], or give --file FILE',
        )
    return path


def _add(args: argparse.Namespace, path: str) -> int:
    from launcher.proxy.auth import key_record, key_store  # noqa: PLC0415  heavy

    key = key_record.compose_key(
        secrets.token_bytes(key_record.ID_BYTES), secrets.token_bytes(key_record.SECRET_BYTES)
    )
    salt = secrets.token_bytes(key_record.SALT_BYTES)
    fields = {
        "id": key_record.id_of(key),
        "name": args.name,
        "hash": key_record.hash_of(key, salt).hex(),
        "salt": salt.hex(),
        "created": _now(),
        "models": args.models,
        "local_only": args.local_only,
        **{name: getattr(args, name) for name in _LIMITS},
    }
    record = key_record.make(fields)

    def change(old: tuple[KeyRecord, ...]) -> Iterable[KeyRecord]:
        if any(other.name == record.name and other.revoked is None for other in old):
            raise LauncherError(
                f"cannot add key '{record.name}': the name is in use",
                f"choose another name, or revoke the old key first: numa-launcher key revoke {record.name}",
            )
        return (*old, record)

    key_store.update(path, change)
    if args.json:
        print(json.dumps({"key": key, **_shown(record)}, indent=2))
    else:
        print(key)
        _note(f"key {record.id} for {record.name} is stored in {path}; the key is not shown again")
    return 0


def _list(args: argparse.Namespace, path: str) -> int:
    from launcher.proxy.auth import key_store  # noqa: PLC0415  heavy

    records = key_store.read(path)
    if args.json:
        print(json.dumps([_shown(record) for record in records], indent=2))
        return 0
    rows = [("ID", "NAME", "CREATED", "LIMITS", "MODELS"), *(_row(record) for record in records)]
    print("\n".join(table(rows)))
    return 0


def _revoke(args: argparse.Namespace, path: str) -> int:
    import msgspec  # noqa: PLC0415  heavy

    from launcher.proxy.auth import key_store  # noqa: PLC0415  heavy

    done: list[KeyRecord] = []

    def change(old: tuple[KeyRecord, ...]) -> Iterable[KeyRecord]:
        done[:] = [record for record in old if record.id == args.key] or [
            record for record in old if record.name == args.key and record.revoked is None
        ]
        if not done:
            raise LauncherError(
                f"cannot revoke key '{args.key}': no key has this id or name", "see `numa-launcher key list`"
            )
        now = _now()
        return [
            msgspec.structs.replace(record, revoked=record.revoked or now) if record is done[0] else record
            for record in old
        ]

    key_store.update(path, change)
    _note(f"key {done[0].id} ({done[0].name}) revoked")
    return 0


def _shown(record: KeyRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "created": record.created,
        "revoked": record.revoked,
        **{name: getattr(record, name) for name in _LIMITS},
        "models": list(record.models),
        "local_only": record.local_only,
    }


def _row(record: KeyRecord) -> tuple[str, str, str, str, str]:
    limits = [
        f"{value:,} {words}"
        for name, words in zip(_LIMITS, ("at once", "requests/min", "tokens/min"), strict=True)
        if (value := getattr(record, name)) is not None
    ]
    limits += ["local only"] if record.local_only else []
    said = f"revoked {record.revoked}" if record.revoked else ", ".join(limits) or "none"
    return record.id, record.name, record.created, said, ", ".join(record.models) or "all"


def _now() -> str:
    return dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _note(text: str) -> None:
    print(text, file=sys.stderr)
