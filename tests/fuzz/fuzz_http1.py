"""Coverage-guided fuzzing of the HTTP/1.1 parser, by hand: `pip install atheris h11`, then

    PYTHONPATH=tests python tests/fuzz/fuzz_http1.py -max_total_time=180 [CORPUS]

The first byte of an input chooses the check, the next three where the bytes are cut; the rest are the bytes.
What must hold is what the properties in tests/proxy/http1 hold, with h11 and a second grammar as references.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["launcher.proxy.http1"]):
    from proxy.http1 import checks

METHODS = ("GET", "POST", "HEAD")


def one(data: bytes) -> None:
    """Run one input."""
    if len(data) < 4:
        return
    cuts, rest = list(data[1:4]), data[4:]
    match data[0] % 4:
        case 0:
            checks.check_request(rest)
        case 1:
            checks.check_head_end(rest, cuts)
        case 2:
            checks.check_response(rest, METHODS[data[1] % len(METHODS)])
        case _:
            checks.check_chunks(rest, cuts)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
