"""Rules on secrets where every user of the host can read them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from launcher.plan import Finding, warning
from launcher.planning.rules import Rule, Subject
from launcher.redaction import secret_arguments


def secret_arguments_are_public(subject: Subject) -> Iterator[Finding]:
    """proc_pid_cmdline(5): every user can read arguments; org.freedesktop.systemd1(5) shows ExecStart= to all."""
    engine = subject.config.engine
    for key, words in (("engine.command", engine.command), ("engine.args", engine.args)):
        if secret_arguments(words):
            yield warning(
                "secret-argument",
                f"{key} contains a secret: every user of this host can read an instance's arguments",
                "use engine.env, which is passed in a file that only root can read, or hf_token_file",
            )


SECRETS_RULES: Final[tuple[Rule, ...]] = (secret_arguments_are_public,)
