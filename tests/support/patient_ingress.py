"""`numa-launcher` whose HAProxy waits a minute for the picker's answers, and takes it for gone only where it cannot connect.

On a machine whose CPUs others take, the picker may answer later than HAProxy usually waits; HAProxy then chooses a host
itself. For tests of what the picker chooses. Those of HAProxy's own times: tests/fleet/test_haproxy.py."""

from __future__ import annotations

import re
import sys
from typing import Any

from launcher.cli import main
from launcher.fleet import haproxy

_files = haproxy.files


def patient(*given: Any, **named: Any) -> dict[str, str]:
    """As haproxy.files; only these times differ."""
    texts = _files(*given, **named)
    texts["spoe.cfg"], waits = re.subn(r"(timeout (?:hello|processing)) \w+", r"\1 60s", texts["spoe.cfg"])
    texts["haproxy.cfg"], checks = re.subn(
        r"(check inter 500ms fall) 2 (?=rise 1 observe)", r"\1 1000 ", texts["haproxy.cfg"]
    )
    assert (waits, checks) == (4, 1)
    return texts


if __name__ == "__main__":
    haproxy.files = patient
    sys.exit(main())
