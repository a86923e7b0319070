"""The command line's parser: its errors have two lines, message and remedy, like all others."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

_CHOICE: Final = re.compile(r"argument [A-Z]+: invalid choice: '(?P<word>[^']*)'")
_ARGUMENT: Final = re.compile(r"argument (?P<name>[^:]+): (?P<why>.*)", re.DOTALL)
_MISSING: Final = re.compile(r"the following arguments are required: (?P<names>.*)")


class Parser(argparse.ArgumentParser):
    """Also used for each verb: argparse creates subparsers of the same class."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As parse_args, with a suggestion for an unknown argument. Exits with 2."""
        args: argparse.Namespace
        args, unknown = self.parse_known_args(arguments)
        if unknown:
            parser = self
            while (inner := parser._choice()) is not None and getattr(args, inner.dest) is not None:
                parser = inner.choices[getattr(args, inner.dest)]
            parser.refuse_word(unknown[0])
        return args

    # argparse calls this for the words of a verb, too.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def _choice(self) -> argparse._SubParsersAction[Parser] | None:
        return next(
            (action for action in self._actions if isinstance(action, argparse._SubParsersAction)), None
        )

    def refuse_word(self, word: str) -> NoReturn:
        option = word.partition("=")[0]
        known = list(self._option_string_actions)
        self._refuse(
            f"run {self._what}: unknown argument '{word}'", _close(option, known) or f"{self.prog} --help"
        )

    def error(self, message: str) -> NoReturn:
        branch = self._choice()
        if branch is not None and (choice := _CHOICE.match(message)) is not None:
            word = choice["word"]
            near = _close(word, branch.choices)
            if not near:
                self._refuse_misspelled_option()
            what = f"{self.prog} {word}".partition(" ")[2]
            self._refuse(f"run '{what}': unknown verb", near or f"{self.prog} --help")
        if (missing := _MISSING.match(message)) is not None:
            if missing["names"] == "VERB":
                self.print_help(sys.stderr)
                self.exit(2)
            names = missing["names"]
            wanted = names if branch is None else f"{names}: {', '.join(branch.choices)}"
            be = "are" if ", " in names else "is"
            self._refuse(f"run {self._what}: {names} {be} missing", f"give {wanted}; {self.prog} --help")
        if (argument := _ARGUMENT.match(message)) is not None:
            self._refuse_value(**argument.groupdict())
        self._refuse(f"run {self._what}: {message}", f"{self.prog} --help")

    def _refuse_misspelled_option(self) -> None:
        """`bench --requets 1`: argparse takes the value for an action, and complains of that."""
        options = (word for word in self._words if word.startswith("--") and len(word) > 2)
        for word in options:
            if word.partition("=")[0] not in self._option_string_actions:
                self.refuse_word(word)

    def _refuse_value(self, name: str, why: str) -> NoReturn:
        action = next(its for its in self._actions if argparse._get_action_name(its) == name)
        wanted = getattr(action.type, "wanted", action.metavar or "a value")
        remedy = f"give {wanted}"
        if action.choices is not None:
            remedy = f"choose one of {', '.join(map(str, action.choices))}"
            why = why.partition(" (choose from")[0]
        elif why.startswith("not allowed with"):
            remedy = "remove one of the two"
        elif why.startswith("expected"):
            why = "its value is missing"
        self._refuse(f"run {self._what}: {name}: {why}", f"{remedy}; {self.prog} --help")

    @property
    def _what(self) -> str:
        """The verb and its subcommand: `key add`."""
        return self.prog.partition(" ")[2] or self.prog

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        self.exit(2, f"cannot {what}\n{remedy}\n")


def _close(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{found[0]}'?" if found else ""
