"""Error messages for values that the schema rejects: the key, why its value is wrong, and what to write.

The text is generated from the schema's types: a new key needs no text here.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import inspect

from launcher.base.errors import LauncherError
from launcher.base.redaction import is_secret_name
from launcher.base.text import parse_size
from launcher.config.schema import Config
from launcher.config.values import notes_of, unwrap

Tree = dict[str, Any]
Origins = Mapping[str, str]
"""Where each key was set, in order: the last one wins."""

_AT: Final = re.compile(r" - at `\$\.?(?P<at>[^`]*)`$")
_STEP: Final = re.compile(r"\.?(?P<key>[A-Za-z_]\w*)|\[(?P<index>\d+|\.\.\.)\]")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<key>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<key>.*)`")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_SOME: Final = "..."


class _Place(NamedTuple):
    at: str
    """Its path, such as `models[0].path`; empty for the whole file."""
    name: str
    """The last key in it; empty for an item of a list."""
    kind: Any
    """The type it should have."""
    value: Any
    sample: Any
    """A valid value: an example or the default; None where there is neither."""
    secret: bool = False


def explain(
    error: str, tree: Tree, origin: str, origins: Origins, root: type[msgspec.Struct] = Config
) -> LauncherError:
    """Turn msgspec's message on a tree of plain values, which should be a `root`, into `cannot use ORIGIN: why` and a
    remedy."""
    whole = _UNKNOWN.fullmatch(error)  # a top-level key may look like a path
    found = None if whole and whole["key"] in tree else _AT.search(error)
    what, at = (error[: found.start()], found["at"]) if found else (error, "")
    place = _find(at, tree, root)
    if unknown := _UNKNOWN.fullmatch(what):
        origin = _origin_of_unknown(unknown["key"], place, origin, origins)
        why, remedy = _unknown(unknown["key"], place, root)
    elif missing := _MISSING.fullmatch(what):
        origin = origin_of(place.at, origin, origins)
        why, remedy = _missing(missing["key"], place)
    else:
        origin = origin_of(place.at, origin, origins)
        why, remedy = _wrong(place)
    return LauncherError(f"cannot use {origin}: {why}", remedy)


def origin_of(at: str, origin: str, origins: Origins) -> str:
    """Where the value at a path such as `models[0].path` was set: the last override of it or of a part of it."""
    key = re.sub(r"\[(\d+)\]", r".\1", at)
    for said, name in reversed(list(origins.items())):
        if key == said or key.startswith(f"{said}."):
            return name
    return origin


def _origin_of_unknown(key: str, table: _Place, origin: str, origins: Origins) -> str:
    """As `origin_of`, for a key that is not in the schema; overrides of keys below it may have created it."""
    at = f"{table.at}.{key}".lstrip(".")
    made = table.value.get(key)
    below = [name for said, name in origins.items() if said.startswith(f"{at}.")]
    overridden = bool(below) and isinstance(made, dict) and len(made) == len(below)
    return below[-1] if overridden else origin_of(at, origin, origins)


def _find(at: str, tree: Tree, root: type[msgspec.Struct]) -> _Place:
    """The key at msgspec's path. For an item of a table of text the path says `[...]`: the first invalid value is meant."""
    place = _Place("", "", root, tree, None)
    for step in _STEP.finditer(at):
        inner, value = unwrap(place.kind), place.value
        if name := step["key"]:
            field = next(its for its in msgspec.structs.fields(_section_of(inner)) if its.encode_name == name)
            path = f"{place.at}.{name}".lstrip(".")
            place = _Place(path, name, field.type, value.get(name), _sample(field))
        elif step["index"] != "...":
            index = int(step["index"])
            place = _Place(f"{place.at}[{index}]", "", get_args(inner)[0], value[index], None)
        else:
            kind = get_args(inner)[1]
            name = next(name for name, its in value.items() if not _fits(its, kind))
            shown = name if _BARE_KEY.fullmatch(name) else json.dumps(name)
            place = _Place(f"{place.at}.{shown}", shown, kind, value[name], None, is_secret_name(name))
    return place


def _section_of(kind: Any) -> Any:
    """The keys of a table, also of one that stands for a list with it alone."""
    inner = unwrap(kind)
    return unwrap(get_args(inner)[0]) if get_origin(inner) is tuple else inner


def _sample(field: msgspec.structs.FieldInfo) -> Any:
    examples = [example for note in notes_of(field.type) for example in note.examples or ()]
    return examples[0] if examples else None if field.default is msgspec.NODEFAULT else field.default


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        return False
    return True


def _unknown(key: str, table: _Place, root: type[msgspec.Struct]) -> tuple[str, str]:
    """The remedy is the key or table that was meant, else the keys that are there. A key is looked for in all tables of the
    schema: as it is written first, then as it may have been meant."""
    known = [field.encode_name for field in msgspec.structs.fields(_section_of(table.kind))]
    where = re.sub(r"^(.*)\[\d+\]$", r"[[\1]]", table.at) if table.at.endswith("]") else f"[{table.at}]"
    tables = _tables(root)
    elsewhere = {path: keys for path, keys in tables.items() if path != _path_of(table.at)}
    homes = [_home(path, key, tables, root) for path, keys in elsewhere.items() if key in keys]
    close = _closest(key, known, _NEARLY if homes else _MISSPELT)
    if homes:
        # Of one letter more or less, either may be meant.
        remedy = f"it belongs to {_either(homes)}" + (f"; or did you mean '{close}'?" if close else "")
    elif close and f"{_path_of(table.at)}.{close}".lstrip(".") in tables:
        remedy = f"did you mean {_header(f'{_path_of(table.at)}.{close}'.lstrip('.'), root)}?"
    elif close:
        remedy = f"did you mean '{close}'?"
    else:
        remedy = _misspelt_elsewhere(key, elsewhere, root) or f"remove it, or use one of {', '.join(known)}"
    return f"unknown key '{key}' in {where if table.at else 'the file'}", remedy


_MISSPELT: Final = 0.6
# Where there are many to choose from, a guess is nearly the same word.
_NEARLY: Final = 0.85


def _closest(word: str, known: Iterable[str], cutoff: float) -> str:
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=cutoff)
    return found[0] if found else ""


def _tables(root: Any) -> dict[str, list[str]]:
    """Keys by table, in the schema's order: `proxy.overflow`; the file itself is ""."""
    found = {"": [field.encode_name for field in msgspec.structs.fields(root)]}
    for field in msgspec.structs.fields(root):
        section = _section_of(field.type)
        if _is_table(section):
            found |= {
                f"{field.encode_name}.{path}".rstrip("."): keys for path, keys in _tables(section).items()
            }
    return found


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _path_of(at: str) -> str:
    return re.sub(r"\[\d+\]", "", at)


def _header(path: str, root: Any) -> str:
    """A table as its header is written."""
    if not path:
        return "the top of the file, before all tables"
    kind = root
    for step in path.split("."):
        fields = msgspec.structs.fields(_section_of(kind))
        kind = next(field.type for field in fields if field.encode_name == step)
    return f"[[{path}]]" if get_origin(unwrap(kind)) is tuple else f"[{path}]"


def _home(path: str, key: str, tables: Mapping[str, list[str]], root: Any) -> str:
    """The header above a key, or of the table that it is."""
    below = f"{path}.{key}".lstrip(".")
    return _header(below if below in tables else path, root)


def _misspelt_elsewhere(key: str, elsewhere: Mapping[str, list[str]], root: Any) -> str:
    for path, keys in elsewhere.items():
        if close := _closest(key, keys, _NEARLY):
            below = f"{path}.{close}".lstrip(".")
            return (
                f"did you mean {_header(below, root)}?"
                if below in _tables(root)
                else (f"did you mean '{close}' in {_header(path, root)}?")
            )
    return ""


def _missing(key: str, table: _Place) -> tuple[str, str]:
    if not table.at:
        return _no_table(key, table)
    fields = msgspec.structs.fields(_section_of(table.kind))
    sample = next(_sample(field) for field in fields if field.encode_name == key)
    to = table.at if table.at.endswith("]") else f"[{table.at}]"
    return f"{table.at}: {key} is missing", f"add {key} = {_toml(sample or _SOME)} to {to}"


def _no_table(key: str, table: _Place) -> tuple[str, str]:
    field = next(its for its in msgspec.structs.fields(table.kind) if its.encode_name == key)
    if get_origin(unwrap(field.type)) is tuple:
        return f"the file: there is no [[{key}]]", _another_table(key)
    return f"the file: there is no [{key}]", f"add a [{key}] table with {_needed(field.type)}"


def _another_table(path: str) -> str:
    """How to add an entry to the list of tables at `path`, with its required keys."""
    kind: Any = Config
    for step in path.split("."):
        fields = msgspec.structs.fields(unwrap(kind))
        kind = next(field.type for field in fields if field.encode_name == step)
    return f"add a [[{path}]] table with {_needed(get_args(unwrap(kind))[0])}"


def _needed(table: Any) -> str:
    """Its required keys."""
    return " and ".join(
        f"{field.encode_name} = {_toml(_sample(field) or (0.5 if unwrap(field.type) is float else _SOME))}"
        for field in msgspec.structs.fields(table)
        if field.required
    )


def _wrong(place: _Place) -> tuple[str, str]:
    kinds = _kinds(place.kind)
    value = place.value
    empty = value in ("", [], {}) and any(_is_of(value, kind) for kind in kinds)
    if empty:
        why = "it is empty"
    elif all(isinstance(kind, inspect.EnumType | inspect.LiteralType) for kind in kinds):
        why = "not an allowed value"
    else:
        why = f"not {_either([_noun(kind, value) for kind in kinds])}"
    hidden = place.secret or value is None or isinstance(value, dict)
    shown = "" if hidden else f" = {json.dumps(value) if isinstance(value, bool) else repr(value)}"
    return f"{place.at or 'the file'}{shown}: {why}", _remedy(place, kinds)


def _kinds(kind: Any) -> list[inspect.Type]:
    found: inspect.Type = inspect.type_info(kind)
    while isinstance(found, inspect.Metadata):
        found = found.type
    kinds = [its for its in getattr(found, "types", (found,)) if not isinstance(its, inspect.NoneType)]
    return [
        # inspect sorts them
        msgspec.structs.replace(its, values=_choices(kind)) if isinstance(its, inspect.LiteralType) else its
        for its in kinds
    ]


def _choices(kind: Any) -> tuple[Any, ...]:
    """The values of the Literal within a type, in source order."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((found for part in get_args(kind) if (found := _choices(part))), ())


def _is_of(value: Any, kind: inspect.Type) -> bool:
    wanted = {inspect.StrType: str, inspect.VarTupleType: list, inspect.DictType: dict}.get(type(kind))
    return wanted is not None and isinstance(value, wanted)


def _noun(kind: inspect.Type, value: Any = None) -> str:
    match kind:
        case inspect.StrType(pattern=str(pattern)):
            noun = f"text that matches {pattern}"
        case inspect.StrType():
            noun = "text"
        case inspect.IntType():
            noun = f"a whole number{_bounds(kind, value)}"
        case inspect.FloatType():
            noun = f"a number{_bounds(kind, value)}"
        case inspect.BoolType():
            noun = "true or false"
        case inspect.EnumType(cls=choices):
            noun = _either([_toml(str(choice)) for choice in choices])
        case inspect.LiteralType(values=choices):
            noun = _either([_toml(choice) for choice in choices])
        case inspect.VarTupleType(item_type=item):
            most = getattr(kind, "max_length", None)
            noun = f"a list of {_plural(item)}{'' if most is None else f', at most {most}'}"
        case inspect.DictType(value_type=its):
            noun = f"a table of {_plural(its)}"
        case _:
            noun = "a table"
    return noun


def _plural(kind: inspect.Type) -> str:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return {inspect.StrType: "text", inspect.IntType: "whole numbers"}.get(type(kind), "tables")


def _bounds(kind: inspect.IntType | inspect.FloatType, value: Any) -> str:
    above = "" if kind.gt is None else f" above {kind.gt}"
    least = "" if kind.ge is None else f" of {kind.ge} or more"
    too_much = kind.le is not None and isinstance(value, int | float) and value > kind.le
    return above + least + (f" and up to {kind.le}" if too_much else "")


def _either(words: Sequence[str]) -> str:
    """`a, b or c`; with a comma before "or" where an item contains one."""
    *most, last = words
    if not most:
        return last
    return f"{', '.join(most)}{',' if ' or ' in most[-1] else ''} or {last}"


def _remedy(place: _Place, kinds: Sequence[inspect.Type]) -> str:
    name, value, kind = place.name, place.value, kinds[0]
    assign = f"{name} = " if name else ""
    words = _either([_noun(its, value) for its in kinds])
    match kind:
        case inspect.EnumType() | inspect.LiteralType():
            remedy = f"choose {words}"
        case inspect.BoolType():
            remedy = f"write {words}"
        case inspect.IntType() | inspect.FloatType():
            remedy = f"write {_number(place) or words}"
        case inspect.StrType() if isinstance(value, bool | int | float) and kind.pattern is None:
            remedy = f"write {assign}{_toml(_SOME if place.secret else _text(value))}"
        case inspect.StrType():
            remedy = f"write {assign}{_toml(place.sample or _SOME)}"
        case inspect.VarTupleType(item_type=item) if _plural(item) == "tables":
            remedy = _another_table(place.at)
        case inspect.VarTupleType():
            items = value.split() if isinstance(value, str) else [value]
            fits = bool(items) and _fits(items, place.kind)
            some = place.sample or [_SOME if _plural(kind.item_type) == "text" else 0]
            remedy = f"write {'a list' if fits else words}: {assign}{_toml(items if fits else some)}"
        case inspect.DictType():
            remedy = f"write a table: {assign}{_toml(place.sample or {_SOME: _SOME})}"
        case _:
            remedy = f"write a table: [{place.at}]" if name else _another_table(place.at.partition("[")[0])
    return remedy


def _number(place: _Place) -> str:
    name, value = place.name, place.value
    if isinstance(value, str):
        with contextlib.suppress(msgspec.ValidationError):
            meant = msgspec.convert(value, place.kind, strict=False)
            if isinstance(meant, int | float):
                return f"{name} = {_toml(meant)}"
    noun = _noun(_kinds(place.kind)[0], value)
    if name.endswith("_s"):
        return f"seconds, {noun}"
    if name.endswith("_bytes"):
        try:
            return f"a number of bytes: {parse_size(value)}"
        except (ValueError, AttributeError):
            return f"bytes, {noun}"
    return ""


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key, ensure_ascii=False)} = {_toml(its)}" for key, its in value.items())
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value, ensure_ascii=False)
