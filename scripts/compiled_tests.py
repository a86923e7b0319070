"""The tests of the compiled copy, one a line: `scripts/test compiled` runs these.

Everything runs on the sources in the lane `unit`. Compilation can break two things more, which these tests were chosen by:
what a compiled module computes (types checked at run time, early binding, slices and numbers in C), so its own tests
run; and what passes between compiled and interpreted modules, so some of the tests over sockets run.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Final

# One request or several through each part that calls compiled modules or is called by them.
OVER_SOCKETS: Final = (
    "end_to_end/test_responses.py",  # forms of answers, retries, hung and killed instances
    "end_to_end/test_gateway.py",  # names of models, other paths, pages
    "end_to_end/test_stream_ends.py",  # what a client sees when a stream breaks
    "end_to_end/test_hot_path.py",  # usual events of each API
)


def tests(root: Path) -> list[str]:
    """Paths below `root`: the folder of a package of which all is compiled, the files of a single module by the rule of
    tests/test_mirror.py, `OVER_SOCKETS`, and the test that the copy is imported."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    found = [root / "tests" / "base" / "test_build.py"]
    for pattern in map(Path, project["tool"]["numa-launcher"]["compile"]):
        folder = root / "tests" / pattern.parent.relative_to("launcher")
        if pattern.name == "*.py":
            found.append(folder)
        else:
            found += sorted(
                (*folder.glob(f"test_{pattern.stem}.py"), *folder.glob(f"test_{pattern.stem}_*.py"))
            )
    found += [root / "tests" / "proxy" / name for name in OVER_SOCKETS]
    return [path.relative_to(root).as_posix() for path in dict.fromkeys(found)]


if __name__ == "__main__":
    print("\n".join(tests(Path(sys.argv[1]))))
