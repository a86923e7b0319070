"""The usage ledger's file on the command line, for verbs that no daemon answers."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.config.schema import Usage


def find_ledger(usage: Usage) -> Path:
    """Of the user who asks; of the service where only that one exists. Raises LauncherError for a user without a home."""
    from launcher.host.state_folder import SYSTEM, state_folder  # noqa: PLC0415  heavy
    from launcher.usage.schema import ledger_path  # noqa: PLC0415  heavy

    own, service = (
        ledger_path(usage, folder) for folder in (state_folder(None, os.environ, os.geteuid()), SYSTEM)
    )
    # os.path: another user's folder, which may not be searched, is no error here.
    found = os.path.exists(own) or not os.path.exists(service)  # noqa: PTH110
    return own if found else service
