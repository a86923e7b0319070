"""The model names that requests may use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from launcher.base.api_errors import HttpError
from launcher.base.text import quoted
from launcher.proxy.continuation.continuation import EngineTraits


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


# --- What has been learned of each model's instances; shared by admission, continuations and the model list.


class ModelTraits:
    """One entry per model; instances bring them when they become ready."""

    def __init__(self, names: ModelNames) -> None:
        self.names = names
        self._adapters: dict[str, str] = {}  # models by the names of their LoRA adapters
        self._template_fits: dict[str, bool] = {}  # by model; those that are not here may not fit
        self._tells_ids: set[str] = set()  # models whose engines are asked for token ids
        self._ignores_ids: set[str] = set()  # those whose engines ignore ids that are given as a prompt
        self._refuses_usage: set[tuple[str | None, str]] = set()  # those at whose upstreams, see asks_usage
        self._tells_usage: set[tuple[str | None, str]] = set()  # those that were asked, and told it
        self._sampling_defaults: dict[str, Mapping[str, float]] = {}
        self._context_tokens: dict[str, int | None] = {}

    def learn(
        self,
        model: str,
        *,
        adapters: Iterable[str],
        token_ids: bool,
        sampling_defaults: Mapping[str, float],
        context_tokens: int | None,
    ) -> None:
        """An instance has become ready; see ProxyServer.add_upstream. Configured names come before adapters'."""
        taken = {*self.names.names, *self.names.aliases}
        self._adapters = {adapter: base for adapter, base in self._adapters.items() if base != model}
        self._adapters.update((adapter, model) for adapter in adapters if adapter not in taken)
        self._sampling_defaults[model] = sampling_defaults
        self._context_tokens[model] = context_tokens
        self._ignores_ids.discard(model)  # it may be another version
        self._refuses_usage.discard((model, ""))
        self._tells_usage.discard((model, ""))
        if token_ids:
            self._tells_ids.add(model)
        else:
            self._tells_ids.discard(model)

    def resolve(self, wanted: str | None) -> tuple[str, str | None]:
        """The model that a request goes to, and the adapter that it asks for by its name. Raises HttpError."""
        names = self.names
        if wanted in names.names:
            return wanted, None
        base = self.base_of(wanted)
        return (names.resolve(wanted), None) if base is None else (base, wanted)

    def base_of(self, adapter: str | None) -> str | None:
        """The model of a LoRA adapter; None: there is none of this name."""
        return None if adapter is None else self._adapters.get(adapter)

    def adapters_of(self, model: str) -> Iterator[str]:
        """The names of a model's LoRA adapters."""
        return (adapter for adapter, base in self._adapters.items() if base == model)

    def context_tokens(self, model: str | None) -> int | None:
        """The most tokens of prompt and response together; None: not known."""
        return self._context_tokens.get(model or "")

    def sampling_defaults(self, model: str | None) -> Mapping[str, float]:
        """What its instances apply to requests that name none; see EngineTraits."""
        return self._sampling_defaults.get(model or "", {})

    def asks_ids(self, model: str | None) -> bool:
        """Whether its streams' instances are asked for token ids."""
        return model in self._tells_ids and model not in self._ignores_ids

    def note_ids_ignored(self, model: str | None) -> None:
        """An instance ignored token ids that were given as a prompt."""
        if model is not None:
            self._ignores_ids.add(model)

    def asks_usage(self, model: str | None, overflow: str = "") -> bool:
        """Whether the usage of its streams is asked for. `overflow`: at this overflow endpoint; "": of instances."""
        return (model, overflow) not in self._refuses_usage

    def note_usage_refused(self, model: str | None, overflow: str) -> None:
        """A request for a stream was refused as it asked for its usage, and not without. Where others got theirs, that was
        not the reason: an error may pass, for example that of an image's address."""
        if (model, overflow) not in self._tells_usage:
            self._refuses_usage.add((model, overflow))

    def note_usage_told(self, model: str | None, overflow: str) -> None:
        """A stream that was asked for its usage told it."""
        self._tells_usage.add((model, overflow))

    def note_template(self, model: str, *, fits: bool | None) -> None:
        """Whether its chat template continues a partial answer; None: its newest instance does not tell."""
        if fits is None:  # it may be another version
            self._template_fits.pop(model, None)
        else:
            self._template_fits[model] = fits

    def engine(self, model: str | None) -> EngineTraits:
        """What a continuation must know."""
        return EngineTraits(
            template_fits=self._template_fits.get(model or "", False),
            one_token_events=model not in self._tells_ids,
            takes_ids=model not in self._ignores_ids,
            sampling_defaults=self.sampling_defaults(model),
        )
