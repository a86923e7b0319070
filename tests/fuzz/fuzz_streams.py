"""Coverage-guided fuzzing of what follows streams and peeks into bodies, by hand: `pip install atheris msgspec`, then

    PYTHONPATH=tests:. python tests/fuzz/fuzz_streams.py -max_total_time=180 [CORPUS]

The first byte of an input chooses the check, the next three where the bytes are cut; the rest are the bytes.
What must hold is what the properties in tests/proxy/end_to_end/test_stream_checks.py hold.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["launcher.proxy"]):
    from support import stream_checks


def one(data: bytes) -> None:
    """Run one input."""
    if len(data) < 4:
        return
    cuts, rest = list(data[1:4]), data[4:]
    match data[0] % 4:
        case 0:
            stream_checks.check_tracker(rest, cuts)
        case 1:
            stream_checks.check_transcript(rest, cuts)
        case 2:
            stream_checks.check_peek(rest)
        case _:
            stream_checks.check_form(rest)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
