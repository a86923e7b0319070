"""`numa-launcher key add|list|set|revoke`: edits the API keys file."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base.errors import LauncherError
from launcher.base.text import table
from launcher.cli import key_budgets, options

if TYPE_CHECKING:
    from launcher.keys.key_record import KeyRecord

DEFAULT_FILE = Path("/etc/numa-launcher/api-keys")
_LIMITS = ("concurrency", "requests_per_minute", "tokens_per_minute")
_MAX_LIMIT = 10**12


def _number(text: str) -> int:
    """Also accepts 1_000_000 and 1,000,000."""
    return options.whole(1, _MAX_LIMIT)(text.replace("_", "").replace(",", ""))


_LIMIT = options.Value("a number of 1 or more", _number)
_LIMIT_OR_NONE = options.Value(
    f'a number of 1 or more, or "{key_budgets.REMOVED}"',
    lambda text: text if text == key_budgets.REMOVED else _number(text),
)
_OVERFLOW = ("never", "full", "predicted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in add_actions(actions):
        action.add_argument("--file", type=Path, metavar="FILE", help="use this API keys file")
        action.add_argument(
            "-c", "--config", type=Path, metavar="FILE",
            help=f"use proxy.api_keys_file of this configuration file (default: {options.DEFAULT_CONFIG})",
        )  # fmt: skip


def add_actions(actions: Any) -> Sequence[argparse.ArgumentParser]:
    """The parsers of all actions, in argparse's `actions`, without the arguments that name the file."""
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
    add.add_argument(
        "--budget", type=key_budgets.BUDGET, metavar="BUDGET",
        help='limit what it may spend in a period: "20M-tokens/month", "50-usd/week"; periods are day, week, month',
    )  # fmt: skip
    add.add_argument(
        "--overflow", choices=_OVERFLOW,
        help="send its requests to overflow endpoints never, when the queue is full, or also when the first token is "
        "predicted to be late (default: as `when` of the endpoint says)",
    )  # fmt: skip
    add.add_argument("--json", action="store_true", help="print the key and its record as JSON")
    show = actions.add_parser(
        "list", help="print names and limits of all keys, without the secrets",
        description="Print names and limits of all keys, without the secrets.", allow_abbrev=False,
    )  # fmt: skip
    show.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument(
        "--socket", metavar="PATH", help="ask the daemon at this control socket how much remains of budgets"
    )
    change = actions.add_parser(
        "set", help="change limits of an API key", allow_abbrev=False,
        description="Change limits of an API key. What the key has spent of a budget stays spent.",
    )  # fmt: skip
    change.add_argument(
        "key", metavar="ID|NAME", help="change the key with this id or name, as `list` prints it"
    )
    for name in _LIMITS:
        change.add_argument(
            f"--{name.replace('_', '-')}", type=_LIMIT_OR_NONE, metavar="N",
            help=f'as of `key add`; "{key_budgets.REMOVED}" removes it',
        )  # fmt: skip
    change.add_argument(
        "--budget", type=key_budgets.BUDGET_OR_NONE, metavar="BUDGET",
        help=f'as of `key add`; "{key_budgets.REMOVED}" removes it',
    )  # fmt: skip
    change.add_argument(
        "--overflow", choices=(*_OVERFLOW, key_budgets.REMOVED),
        help=f'as of `key add`; "{key_budgets.REMOVED}": as `when` of the endpoint says',
    )  # fmt: skip
    revoke = actions.add_parser(
        "revoke", help="revoke an API key", description="Revoke an API key.", allow_abbrev=False
    )
    revoke.add_argument(
        "key", metavar="ID|NAME", help="revoke the key with this id or name, as `list` prints it"
    )
    return add, show, change, revoke


def run(args: argparse.Namespace) -> int:
    """Edit or print the file. A running daemon applies a change within a second."""
    return perform(args.action, args, _file_of(args))


def perform(
    action: str,
    args: argparse.Namespace,
    path: str,
    states: Callable[[argparse.Namespace, Mapping[str, str]], dict[str, dict[str, Any]]] = key_budgets.states,
) -> int:
    """Perform one action on the file at `path`. `states`: of budgets, as key_budgets finds them."""
    match action:
        case "add":
            return _add(args, path)
        case "list":
            return _list(args, path, states)
        case "set":
            return _set(args, path)
        case _:
            return _revoke(args, path)


def _file_of(args: argparse.Namespace) -> str:
    if args.file is not None:
        return str(args.file)
    if args.config is None and not options.default_config().exists():
        raise LauncherError(
            "cannot find the API keys file: neither --file nor -c is given, and "
            f"'{options.default_config()}' does not exist",
            "give --file FILE, or a configuration with -c FILE",
        )
    from launcher.config.loading import load_config  # noqa: PLC0415  heavy

    config = args.config or options.default_config()
    path = load_config(config, environ=os.environ).proxy.api_keys_file
    if path is None:
        raise LauncherError(
            f"cannot find the API keys file: '{config}' does not set proxy.api_keys_file",
            f'set api_keys_file = "{DEFAULT_FILE}" under [proxy], or give --file FILE',
        )
    return path


def _add(args: argparse.Namespace, path: str) -> int:
    from launcher.keys import key_file, key_record  # noqa: PLC0415  heavy

    key_budgets.check(args, args.budget)
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
        "budget": args.budget,
        "overflow": args.overflow,
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

    key_file.update(path, change)
    if args.json:
        print(json.dumps({"key": key, **_shown(record)}, indent=2))
    else:
        print(key)
        _note(f"key {record.id} for {record.name} is stored in {path}; the key is not shown again")
    return 0


def _list(
    args: argparse.Namespace,
    path: str,
    find_states: Callable[[argparse.Namespace, Mapping[str, str]], dict[str, dict[str, Any]]],
) -> int:
    from launcher.keys import key_file  # noqa: PLC0415  heavy

    records = key_file.read(path)
    held = [record for record in records if record.budget is not None and record.revoked is None]
    states = find_states(args, {record.name: record.budget or "" for record in held})
    states = {record.id: states[record.name] for record in held if record.name in states}
    if args.json:
        print(
            json.dumps(
                [
                    {**_shown(each), **({"spending": states.get(each.id)} if each in held else {})}
                    for each in records
                ],
                indent=2,
            )
        )
        return 0
    rows: list[tuple[str, ...]] = [
        ("ID", "NAME", "CREATED", "LIMITS", "MODELS"),
        *(_row(record) for record in records),
    ]
    if held:
        columns = [
            ("BUDGET", "LEFT", "ELSEWHERE", "UNTIL"),
            *(_budget_columns(record, states.get(record.id)) for record in records),
        ]
        fleet = any(column[2] != "-" for column in columns[1:])
        rows = [
            (*row, budget, left, *((elsewhere,) if fleet else ()), until)
            for row, (budget, left, elsewhere, until) in zip(rows, columns, strict=True)
        ]
    print("\n".join(table(rows)))
    return 0


def _budget_columns(record: KeyRecord, state: dict[str, Any] | None) -> tuple[str, str, str, str]:
    until = "-" if state is None else state["ends"]
    return record.budget or "-", key_budgets.left(state), key_budgets.elsewhere(state), until


def _set(args: argparse.Namespace, path: str) -> int:
    import msgspec  # noqa: PLC0415  heavy

    from launcher.keys import key_file, key_record  # noqa: PLC0415  heavy

    names = (*_LIMITS, "budget", "overflow")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if not given:
        raise LauncherError(
            f"cannot change key '{args.key}': no limit is given", "give --budget or another limit"
        )
    changes = {name: None if value == key_budgets.REMOVED else value for name, value in given.items()}
    key_budgets.check(args, changes.get("budget"))
    done: list[KeyRecord] = []

    def change(old: tuple[KeyRecord, ...]) -> Iterable[KeyRecord]:
        found = next(_named(old, args.key), None)
        if found is None or found.revoked is not None:
            why = "no key has this id or name" if found is None else "it is revoked"
            raise LauncherError(f"cannot change key '{args.key}': {why}", "see `numa-launcher key list`")
        done[:] = [key_record.make({**msgspec.structs.asdict(found), **changes})]
        return [done[0] if record is found else record for record in old]

    key_file.update(path, change)
    _note(f"key {done[0].id} ({done[0].name}) changed: {_limits(done[0])}")
    return 0


def _named(records: tuple[KeyRecord, ...], key: str) -> Iterator[KeyRecord]:
    """The key of this id, or else those of this name that are not revoked."""
    yield from (record for record in records if record.id == key)
    yield from (record for record in records if record.name == key and record.revoked is None)


def _revoke(args: argparse.Namespace, path: str) -> int:
    import msgspec  # noqa: PLC0415  heavy

    from launcher.keys import key_file  # noqa: PLC0415  heavy

    done: list[KeyRecord] = []

    def change(old: tuple[KeyRecord, ...]) -> Iterable[KeyRecord]:
        done[:] = _named(old, args.key)
        if not done:
            raise LauncherError(
                f"cannot revoke key '{args.key}': no key has this id or name", "see `numa-launcher key list`"
            )
        now = _now()
        return [
            msgspec.structs.replace(record, revoked=record.revoked or now) if record is done[0] else record
            for record in old
        ]

    key_file.update(path, change)
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
        "budget": record.budget,
        "overflow": record.overflow,
    }


def _row(record: KeyRecord) -> tuple[str, ...]:
    said = f"revoked {record.revoked}" if record.revoked else _limits(record)
    return record.id, record.name, record.created, said, ", ".join(record.models) or "all"


def _limits(record: KeyRecord) -> str:
    """For people, without the models."""
    limits = [
        f"{value:,} {words}"
        for name, words in zip(_LIMITS, ("at once", "requests/min", "tokens/min"), strict=True)
        if (value := getattr(record, name)) is not None
    ]
    limits += ["local only"] if record.local_only else []
    limits += [f"overflow {record.overflow}"] if record.overflow else []
    limits += [f"budget {record.budget}"] if record.budget else []
    return ", ".join(limits) or "none"


def _now() -> str:
    return dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _note(text: str) -> None:
    print(text, file=sys.stderr)
