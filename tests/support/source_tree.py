"""Reads launcher/ as source: its modules, their classes, and what the type annotations say of an expression."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launcher"

MODULES = {
    ".".join(path.relative_to(LAUNCHER).with_suffix("").parts).removesuffix(".__init__"): path
    for path in LAUNCHER.rglob("*.py")
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A module of launcher/: parsing all of it takes seconds. Tests are too many to be kept."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {module: parsed(path) for module, path in MODULES.items()}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def decorated(node: Function | ast.ClassDef, word: str) -> bool:
    return any(word in ast.unparse(decorator) for decorator in node.decorator_list)


class Class:
    """A class of launcher/ and the types of its attributes, as far as annotations and constructor calls say."""

    def __init__(self, module: str, node: ast.ClassDef) -> None:
        self.module, self.node = module, node
        self.attributes: dict[str, str] = {}
        self.functions = [inner for inner in node.body if isinstance(inner, Function)]
        self.is_record = (
            decorated(node, "dataclass")
            or any(ast.unparse(base) in {"Struct", "msgspec.Struct"} for base in node.bases)
            or all(
                function.name.startswith("__") or decorated(function, "property")
                for function in self.functions
            )
        )

    def infer(self, known: Classes) -> None:
        for inner in self.node.body:
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                self._set(inner.target.id, known.annotated(inner.annotation))
        for function in self.functions:
            if decorated(function, "property"):
                self._set(function.name, known.annotated(function.returns))
            arguments = known.arguments(function)
            for target, value, annotation in assignments(function):
                if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)):
                    continue
                if target.value.id != "self":
                    continue
                if annotation is not None:
                    self._set(target.attr, known.annotated(annotation))
                elif isinstance(value, ast.Name):
                    self._set(target.attr, arguments.get(value.id))
                else:
                    self._set(target.attr, known.built(value))

    def _set(self, name: str, found: str | None) -> None:
        if found is not None:
            self.attributes.setdefault(name, found)


class Classes:
    """All classes of launcher/ whose name occurs once, and what they say of expressions."""

    def __init__(self) -> None:
        found: dict[str, list[Class]] = {}
        for module, tree in trees().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(Class(module, node))
        self.by_name = {name: classes[0] for name, classes in found.items() if len(classes) == 1}
        for one in self.by_name.values():
            one.infer(self)

    def annotated(self, annotation: ast.expr | None) -> str | None:
        """The one class of ours in an annotation: `Desk`, `server.Desk`, `Desk | None`, `"Desk"`."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self.annotated(ast.parse(text, mode="eval").body)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return name if name in self.by_name else None
            case ast.BinOp(left=left, right=right):
                either = {self.annotated(left), self.annotated(right)} - {None}
                return either.pop() if len(either) == 1 else None
            case _:
                return None

    def built(self, value: ast.expr | None) -> str | None:
        """The class that a constructor call makes one of."""
        return self.annotated(value.func) if isinstance(value, ast.Call) else None

    def arguments(self, function: Function) -> dict[str, str | None]:
        every = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        return {argument.arg: self.annotated(argument.annotation) for argument in every}

    def type_of(self, value: ast.expr, names: dict[str, str | None]) -> str | None:
        if isinstance(value, ast.Name):
            return names.get(value.id)
        if isinstance(value, ast.Attribute):
            owner = self.by_name.get(self.type_of(value.value, names) or "")
            return None if owner is None else owner.attributes.get(value.attr)
        return None


Assignment = tuple[ast.expr, ast.expr | None, ast.expr | None]


@functools.cache
def assignments(node: Function) -> tuple[Assignment, ...]:
    """Target, value and annotation of every assignment; tuples are taken apart."""
    return tuple(_assignments(node))


def _assignments(node: Function) -> Iterator[Assignment]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.AnnAssign):
            yield inner.target, inner.value, inner.annotation
        elif isinstance(inner, ast.AugAssign):
            yield inner.target, None, None
        elif isinstance(inner, ast.Assign):
            for target in inner.targets:
                if not isinstance(target, ast.Tuple):
                    yield target, inner.value, None
                    continue
                values = inner.value.elts if isinstance(inner.value, ast.Tuple) else [None] * len(target.elts)
                for one, value in zip(target.elts, values, strict=False):
                    yield one, value, None


def functions() -> Iterator[tuple[str, str | None, Function]]:
    """Module, class and node of every function and method."""
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, Function):
                yield module, None, node
            elif isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, Function):
                        yield module, node.name, inner


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them, and of `<a id>`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found
