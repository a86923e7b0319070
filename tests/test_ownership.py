"""Every object is changed by its own methods, and the proxy's request path has one place that catches everything."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from support.source_tree import Classes, assignments, functions, trees

# Assigned from another module today. This list only shrinks: pass the value to the constructor, or give the class a
# method. Records (Structs, dataclasses, and classes without methods) are exempt: their owner changes them.
ASSIGNED_FROM_OUTSIDE: set[str] = set()

# Handlers of `Exception` in the request path, by module: the executor's guard, and that of predictions, without which
# a request is served as well.
CATCH_EVERYTHING = {"proxy.dispatch.executor": 1, "balancing.prediction": 1}


def assigned_from_outside() -> set[str]:
    """Class and attribute of each assignment to an object with behaviour of another module."""
    classes, found = Classes(), set()
    for module, owner, function in functions():
        names = classes.arguments(function)
        if owner in classes.by_name:
            names["self"] = owner
        for target, value, _ in assignments(function):
            # What a function has built itself it may also complete.
            if isinstance(target, ast.Name) and value is not None and classes.built(value) is None:
                names.setdefault(target.id, classes.type_of(value, names))
        for target, _, _ in assignments(function):
            if not isinstance(target, ast.Attribute):
                continue
            if isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"}:
                continue
            kind = classes.type_of(target.value, names)
            if kind is None:
                continue
            changed = classes.by_name[kind]
            if not changed.is_record and changed.module != module:
                found.add(f"{kind}.{target.attr} in {module}")
    return found


def test_objects_with_behaviour_are_changed_by_their_own_methods() -> None:
    found = assigned_from_outside()
    new, stale = found - ASSIGNED_FROM_OUTSIDE, ASSIGNED_FROM_OUTSIDE - found
    assert not new, f"pass these to the constructor, or give the class a method: {sorted(new)}"
    assert not stale, f"no longer assigned from outside, remove from the list: {sorted(stale)}"


def test_the_request_path_catches_everything_in_one_place() -> None:
    found = Counter(
        module
        for module, tree in trees().items()
        if module.startswith(("proxy.", "balancing."))
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        if node.type is None
        or "Exception" in {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
    )
    assert dict(found) == CATCH_EVERYTHING, "let errors reach the executor's guard"


def test_a_foreign_assignment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in tuple(trees()):
        monkeypatch.delitem(trees(), module)
    owner = "class MadeUpOwner:\n    def __init__(self) -> None:\n        self.x = 1\n    def act(self) -> None: ...\n"
    monkeypatch.setitem(trees(), "made_up.owner", ast.parse(owner))
    other = "class MadeUpOther:\n    def act(self, it: MadeUpOwner) -> None:\n        it.x = 2\n"
    monkeypatch.setitem(trees(), "made_up.other", ast.parse(other))
    assert assigned_from_outside() == {"MadeUpOwner.x in made_up.other"}
