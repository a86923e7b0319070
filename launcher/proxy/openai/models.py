"""The model names that requests may use."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.printable import quoted
from launcher.proxy.errors import HttpError


class ModelNames:
    """The models that the configuration serves, and their aliases."""

    def __init__(self, names: tuple[str, ...] = (), aliases: Mapping[str, str] | None = None) -> None:
        """`aliases`: from an alias to a model's name."""
        self.names = names
        self.aliases = dict(aliases or {})

    def all_of(self, name: str) -> tuple[str, ...]:
        return (name, *(alias for alias, real in self.aliases.items() if real == name))

    def resolve(self, wanted: str | None) -> str:
        """The model that a request goes to. Raises HttpError when there is none of that name."""
        if wanted is None:
            if len(self.names) == 1:
                return self.names[0]
            raise HttpError(400, "you must name a model in `model`", param="model", code="model_required")
        if wanted in self.names:
            return wanted
        if (real := self.aliases.get(wanted)) is not None:
            return real
        raise unknown_model(wanted)


def unknown_model(name: str) -> HttpError:
    """404 as OpenAI's."""
    why = f"The model `{quoted(name)}` does not exist."
    return HttpError(404, why, type_="NotFoundError", param="model", code="model_not_found")
