"""`numa-launcher bench`: measures an endpoint; prints, reports and compares results."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from launcher.base.errors import LauncherError
from launcher.base.files import make_folder, state_folder
from launcher.cli import bench_target, options
from launcher.measure.bench import offered_load, workloads

if TYPE_CHECKING:
    from launcher.measure.bench.load_generator import Progress
    from launcher.measure.bench.result import BenchResult

# Above any number of runs that are made by hand, so that two of them have no prompts in common.
_SEEDS: Final = 2**31
_CLEAR_LINE: Final = "\r\x1b[K"


def _share(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise ValueError(text)
    return value


_COUNT: Final = options.Value("a number of 1 or more", options.whole(1))
_SEED: Final = options.Value(f"a number from 0 to {_SEEDS}", options.whole(0, _SEEDS))
_CONCURRENCY: Final = options.Value("a list of numbers such as 1,4,16", offered_load.parse_concurrency)
_RATES: Final = options.Value("a list of rates such as 0.5,1,2", offered_load.parse_rates)
_TOLERANCE: Final = options.Value("a share such as 3%", _share)
_SLO: Final = options.Value(offered_load.WANTED, offered_load.parse)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=False)
    report = _action(actions, "report", "write one HTML file with the tables and charts of results")
    report.add_argument("results", nargs="+", metavar="RESULT", help="file or id of a result")
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write to FILE (default: ID.html in this directory)"
    )
    compare = _action(actions, "compare", "print how result B differs from result A, with intervals")
    compare.add_argument("before", metavar="A", help="file or id of a result")
    compare.add_argument("after", metavar="B", help="file or id of a result")
    compare.add_argument(
        "--tolerance", type=_TOLERANCE, metavar="SHARE",
        help="exit with 1 when a figure is worse by more than SHARE, such as 3%% (default: always exit with 0)",
    )  # fmt: skip
    _action(actions, "list", "print the stored results")


def _action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.", allow_abbrev=False
    )
    _add_state_dir(parser, default=argparse.SUPPRESS)
    return parser


def _add_state_dir(parser: argparse.ArgumentParser, default: Any = None) -> None:
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", default=default,
        help="keep results under DIR (default: /var/lib/numa-launcher for root, else ~/.local/state/numa-launcher)",
    )  # fmt: skip


def _add_run(parser: argparse.ArgumentParser) -> None:
    bench_target.add_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    names = ", ".join(workloads.all_workloads())
    what.add_argument(
        "--workload", choices=tuple(workloads.all_workloads()), default=workloads.DEFAULT, metavar="NAME",
        help=f"send this workload: {names} (default: {workloads.DEFAULT})",
    )  # fmt: skip
    what.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="send the requests of FILE: JSONL of requests, or ShareGPT's JSON",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency", type=_CONCURRENCY, metavar="N[,N…]", default=(),
        help="keep N requests in flight; one row each (default: the workload's)",
    )  # fmt: skip
    how.add_argument(
        "--rate", type=_RATES, metavar="R[,R…]", default=(),
        help="start R requests per second, at random intervals (Poisson); one row each",
    )  # fmt: skip
    how.add_argument("--sweep", action="store_true", help="search the highest rate that meets --slo")
    add = parser.add_argument
    add(
        "--slo", type=_SLO, metavar="LIMITS", default={},
        help="count the requests that meet these limits, such as ttft_p99=2s,itl_p99=150ms",
    )  # fmt: skip
    add(
        "--requests",
        type=_COUNT,
        metavar="N",
        help="send N requests per row (default: depends on workload and load)",
    )
    add(
        "--repeats",
        type=_COUNT,
        metavar="N",
        default=1,
        help="measure each row N times, in turn (default: 1)",
    )
    add(
        "--seed",
        type=_SEED,
        metavar="N",
        help="make the prompts from this number (default: another one each time)",
    )
    add(
        "--keep-cache",
        action="store_true",
        help="send the same prompts in every row: the prefix cache has them",
    )
    _add_state_dir(parser)
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a row (of a search: every row) is not what was asked for, or B is worse than A; 130 when
    interrupted."""
    results = state_folder(args.state_dir, os.environ, os.getuid()) / "bench"
    match args.action:
        case "list":
            return _list(results)
        case "report":
            return _report(results, args.results, args.output)
        case "compare":
            return _compare(results, args)
        case _:
            return _measure(results, args)


def _measure(results: Path, args: argparse.Namespace) -> int:
    if args.sweep and not args.slo:
        raise LauncherError(
            "cannot run bench: --sweep needs --slo", "give --slo, such as --slo ttft_p99=2s,itl_p99=150ms"
        )
    from launcher.measure.bench import run as bench  # noqa: PLC0415  heavy
    from launcher.measure.bench import store  # noqa: PLC0415  heavy

    workload = workloads.named(args.workload) if args.dataset is None else workloads.of_dataset(args.dataset)
    target, driver = bench_target.select(args)
    folder = store.new_folder(make_folder(results), workload.name, dt.datetime.now(dt.UTC).astimezone())
    line = _LiveLine()
    try:
        result = bench.run(
            target, workload, driver=driver, folder=folder, loads=args.concurrency or args.rate, sweep=args.sweep,
            requests=args.requests, repeats=args.repeats, seed=_seed(args.seed), keep_cache=args.keep_cache,
            slo=args.slo, watch=line.show,
        )  # fmt: skip
        error: BaseException | None = None
    except (bench.Interrupted, bench.PartialError) as ended:
        result, error = ended.result, ended
    finally:
        line.clear()
        with contextlib.suppress(OSError):  # it has files, unless nothing was started
            folder.rmdir()
    _finish(results, result, as_json=args.json)
    if isinstance(error, LauncherError):
        raise error
    if error is not None:
        return 130
    return 1 if _is_other(result, any if not args.sweep else all) else 0


def _is_other(result: BenchResult, which: Callable[[Iterable[bool]], bool]) -> bool:
    """Whether rows have no figures, or those of other work. A search goes to rates at which requests fail."""
    from launcher.measure.bench.outcomes import other_work  # noqa: PLC0415  heavy

    return which(not point.completed or bool(other_work([point])) for point in result.points)


def _seed(given: int | None) -> int:
    """By default no run repeats the prompts of an earlier one, which the prefix cache may still have."""
    return int.from_bytes(os.urandom(4), "little") % _SEEDS if given is None else given


def _finish(results: Path, result: BenchResult, *, as_json: bool) -> None:
    """Prints first: the figures are not lost when the disk is full."""
    from launcher.measure.bench import store  # noqa: PLC0415  heavy

    if as_json:
        import msgspec  # noqa: PLC0415

        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    elif result.points:
        from launcher.measure.bench.table import to_text  # noqa: PLC0415  heavy

        print("\n".join(to_text(result)))
    sys.stdout.flush()
    if result.points:
        file = store.save(results, result)
        if not as_json:
            print(f"stored as {result.id} in {file.parent}")


class _LiveLine:
    """One line on the terminal that overwrites itself; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._point = -1
        self._began = time.monotonic()
        self._took: list[float] = []

    def show(self, progress: Progress) -> None:
        if not self._shown:
            return
        from launcher.measure.bench.table import live_line  # noqa: PLC0415  heavy

        if progress.point != self._point:
            now = time.monotonic()
            if self._point > 0:
                self._took.append(now - self._began)
            self._point, self._began = progress.point, now
        print(f"{_CLEAR_LINE}{live_line(progress, self._took)}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


def _list(results: Path) -> int:
    from launcher.measure.bench import store  # noqa: PLC0415  heavy
    from launcher.measure.bench.table import list_lines  # noqa: PLC0415  heavy

    found, broken = store.load_all(results)
    print("\n".join(list_lines(found)) if found else f"no results in {results}")
    for message in broken:
        print(f"warning: {message}", file=sys.stderr)
    return 0


def _report(results: Path, names: Sequence[str], output: Path | None) -> int:
    from launcher.cli.plan import write_file  # noqa: PLC0415  heavy
    from launcher.measure.bench.page import html_page  # noqa: PLC0415  heavy

    loaded = _load(results, names)
    file = output or Path(f"{loaded[0].id}.html")
    write_file(file, html_page(loaded).encode("utf-8"))
    print(f"wrote {file}")
    return 0


def _compare(results: Path, args: argparse.Namespace) -> int:
    from launcher.measure.bench.compare import compare  # noqa: PLC0415  heavy

    before, after = _load(results, (args.before, args.after))
    found = compare([before], [after], args.tolerance)
    print("\n".join(found.lines()))
    return 1 if found.worse else 0


def _load(results: Path, names: Sequence[str]) -> list[BenchResult]:
    from launcher.measure.bench import store  # noqa: PLC0415  heavy

    return [store.load(store.find(results, name)) for name in names]
