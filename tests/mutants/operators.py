"""The ways in which a module can be wrong by one small thing: where a mutant may stand, and how it is made.

A site is one place and one change. Sites are found in the order of the source, so the same source always gives the
same sites. Left alone: docstrings, annotations, imports, decorators, asserts (they state what mypy must know), and what
stands inside a ``raise`` (texts for people; that the raise happens at all is a site of its own).
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.Pow: ast.Mult,
}
_CALLS = {
    "min": "max",
    "any": "all",
    "startswith": "endswith",
    "removeprefix": "removesuffix",
    "lstrip": "rstrip",
    "bisect_left": "bisect_right",
    "partition": "rpartition",
    "split": "rsplit",
    "find": "rfind",
}
_CALLS |= {there: here for here, there in _CALLS.items()}
# Calls whose text argument decides something; any other text is for people.
_TEXT_DECIDES = frozenset({
    "get", "pop", "getattr", "startswith", "endswith", "split", "partition", "rpartition", "removeprefix",
    "removesuffix", "replace", "join", "count", "find", "strip", "lstrip", "rstrip", "frozenset",
})  # fmt: skip


@dataclass(frozen=True)
class Site:
    """One change at one place. ``apply`` makes it in the tree that the site was found in.

    ``key`` names the site by what it says and not by its line, so that an edit elsewhere in the file leaves it alone;
    ``binds`` are the names by which the rest of the program knows the outermost statement that the site is in.
    """

    module: str
    scope: str
    operator: str
    line: int
    last_line: int
    before: str
    after: str
    key: str
    in_function: bool
    binds: frozenset[str]
    apply: Callable[[], None]


@dataclass(frozen=True)
class _Place:
    """Where the walk is: the scope, and the statement that it is in."""

    scope: tuple[str, ...] = ()
    statement: ast.stmt | None = None
    function: ast.FunctionDef | None = None
    binds: frozenset[str] = frozenset()


def sites(module: str, tree: ast.Module) -> list[Site]:
    """Every site of a module, in order, each with a key of its own."""
    seen: dict[str, int] = {}
    out = []
    for place, operator, node, after, put in _walk(tree, _Place()):
        at = place.statement or node
        head = _head(at)
        said = "|".join((module, ".".join(place.scope), operator, head, _text(node), after))
        nth = seen[said] = seen.get(said, -1) + 1
        key = hashlib.sha256(f"{said}|{nth}".encode()).hexdigest()[:10]
        line, last = _lines(node, at)
        function = place.function is not None
        out.append(
            Site(
                module, ".".join(place.scope), operator, line, last, _text(node), after, key, function, place.binds, put
            )
        )
    return out


def _lines(node: ast.AST, statement: ast.AST) -> tuple[int, int]:
    """Where a run that meets the node leaves its mark: the whole of a plain statement, the head of a compound one."""
    first = getattr(statement, "lineno", 0)
    whole = node if hasattr(statement, "body") else statement
    return first, max(first, getattr(whole, "end_lineno", None) or first)


_Found = tuple[_Place, str, ast.AST, str, Callable[[], None]]


def _text(node: ast.AST) -> str:
    line = " ".join(ast.unparse(node).split())
    return line if len(line) <= 90 else line[:87] + "..."


def _head(statement: ast.AST) -> str:
    """A statement without the statements inside it."""
    if not getattr(statement, "body", None) or isinstance(statement, ast.expr):
        return ast.unparse(statement)
    bare = copy.copy(statement)
    for name in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"):
        if hasattr(bare, name):
            setattr(bare, name, [ast.Pass()] if name == "body" else [])
    try:
        return ast.unparse(bare)
    except (AttributeError, ValueError):
        return type(statement).__name__


def _put(parent: ast.AST, field: str, index: int | None, new: ast.AST) -> Callable[[], None]:
    def put() -> None:
        if index is None:
            setattr(parent, field, new)
        else:
            getattr(parent, field)[index] = new
        ast.fix_missing_locations(parent)

    return put


_SKIPPED_FIELDS = frozenset({"annotation", "returns", "decorator_list", "type_comment", "ctx"})


def _walk(node: ast.AST, place: _Place) -> Iterator[_Found]:
    for field, value in ast.iter_fields(node):
        if field in _SKIPPED_FIELDS:
            continue
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST) or _left_alone(child, node):
                continue
            inner = _enter(child, place)
            for operator, new in _changes(child, node, field, inner):
                yield inner, operator, child, _text(new), _put(node, field, index, new)
            yield from _operators_within(child, inner)
            if not isinstance(child, ast.Raise):
                yield from _walk(child, inner)


def _left_alone(node: ast.AST, parent: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Pass() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Constant()):
            return True  # a docstring, or the three dots of a protocol
        case ast.ClassDef(bases=bases):
            return any(isinstance(b, ast.Name) and b.id == "Protocol" for b in bases)
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Subscript(value=ast.Name(id="Literal")):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.keyword(arg="maxsize"):
            return True  # of a cache: it only saves time
    return isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id in ("cast", "TypeVar")


def _enter(node: ast.AST, place: _Place) -> _Place:
    if isinstance(node, ast.ClassDef):
        return _Place((*place.scope, node.name), node, place.function, place.binds or frozenset({node.name}))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inner = node if isinstance(node, ast.FunctionDef) else None
        binds = place.binds if place.scope else frozenset({node.name})
        return _Place((*place.scope, node.name), node, inner, binds)
    if isinstance(node, ast.stmt):
        binds = place.binds
        if not place.scope:
            binds = frozenset(stored(node))
        return _Place(place.scope, node, place.function, binds)
    return place


def stored(statement: ast.stmt) -> tuple[str, ...]:
    """The names that a statement gives a value to."""
    return tuple(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _operators_within(node: ast.AST, place: _Place) -> Iterator[_Found]:
    """Changes of a part that is no node of its own text: an operator, a filter of a comprehension."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in _COMPARE[type(op)]:
                new = copy.deepcopy(node)
                new.ops[i] = other()
                yield place, "compare", node, _text(new), _put(node, "ops", i, other())
    if isinstance(node, ast.comprehension):
        for i, test in enumerate(node.ifs):
            yield place, "filter", test, "True", _put(node, "ifs", i, ast.Constant(value=True))


def _changes(node: ast.AST, parent: ast.AST, field: str, place: _Place) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.stmt):
        yield from _statement(node, place)
    elif isinstance(node, ast.expr):
        yield from _expression(node, parent, field, place)


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(op=ast.Not(), operand=test)


def _statement(node: ast.stmt, place: _Place) -> Iterator[tuple[str, ast.stmt]]:
    match node:
        case ast.Return(value=ast.expr() as value):
            yield from _returned(value, place)
        case ast.Raise():
            yield "raise", ast.Pass()
        case ast.Expr(value=ast.Yield() | ast.YieldFrom()):
            yield "yield", ast.Expr(value=ast.YieldFrom(value=ast.Tuple(elts=[], ctx=ast.Load())))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield "delete", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "delete", ast.Pass()
        case ast.Continue():
            yield "jump", ast.Break()
        case ast.Break():
            yield "jump", ast.Continue()


def _returned(value: ast.expr, place: _Place) -> Iterator[tuple[str, ast.stmt]]:
    if isinstance(value, ast.Constant) and value.value is None:
        return
    annotated = place.function.returns if place.function else None
    if isinstance(annotated, ast.Name) and annotated.id == "bool":
        if not isinstance(value, ast.Constant | ast.Compare):
            yield "return", ast.Return(value=_negated(value))
    else:
        yield "return", ast.Return(value=ast.Constant(value=None))


def _expression(node: ast.expr, parent: ast.AST, field: str, place: _Place) -> Iterator[tuple[str, ast.expr]]:
    # The condition of an if or while; a bare comparison is changed as such.
    if isinstance(parent, ast.If | ast.While | ast.IfExp) and field == "test" and not isinstance(node, ast.Compare):
        yield "condition", _negated(node)
    match node:
        case ast.BoolOp(op=op):
            new = copy.copy(node)
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "boolean", new
            for i in range(len(node.values)):
                rest = node.values[:i] + node.values[i + 1 :]
                yield "boolean", rest[0] if len(rest) == 1 else ast.BoolOp(op=op, values=rest)
        case ast.UnaryOp(op=ast.Not()) if field != "test":
            yield "boolean", node.operand
        case ast.UnaryOp(op=ast.Invert() | ast.USub()):
            yield "arithmetic", node.operand
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            changed = copy.copy(node)
            changed.op = _ARITHMETIC[type(op)]()
            yield "arithmetic", changed
        case ast.Call():
            yield from _call(node)
        case ast.Constant():
            operator = "default" if isinstance(parent, ast.arguments) else "constant"
            yield from ((operator, new) for new in _constant(node, parent, field, place))


def _call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    # Without a limit of pieces, a text falls into the same ones from either end.
    if name in _CALLS and not (name in ("split", "rsplit") and len(node.args) < 2):
        new = copy.copy(node)
        new.func = copy.copy(node.func)
        setattr(new.func, "id" if isinstance(new.func, ast.Name) else "attr", _CALLS[name])
        yield "call", new
    if name == "compile" and node.args and isinstance(node.args[0], ast.Constant):
        for pattern in _patterns(node.args[0].value):
            changed = copy.copy(node)
            changed.args = [ast.Constant(value=pattern), *node.args[1:]]
            yield "pattern", changed


def _constant(node: ast.Constant, parent: ast.AST, field: str, place: _Place) -> Iterator[ast.expr]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(value=not value)
    elif isinstance(value, int):
        yield ast.Constant(value=value + 1)
        yield ast.Constant(value=value - 1)
    elif isinstance(value, str | bytes) and _decides(value, parent, field, place):
        yield ast.Constant(value=_other_text(value))


def _other_text(value: str | bytes) -> str | bytes:
    """One character less; a single one twice, an empty text with one."""
    if len(value) > 1:
        return value[:-1]
    if value:
        return value * 2
    return "~" if isinstance(value, str) else b"~"


def _decides(value: str | bytes, parent: ast.AST, field: str, place: _Place) -> bool:
    """Whether a text takes part in a decision: it is compared, looked up, a key, or an entry of a table."""
    match parent:
        case ast.Compare() | ast.Subscript() | ast.MatchValue() | ast.arguments():
            return True
        case ast.Dict():
            return field == "keys" or (place.function is None and b" " not in _bytes(value))
        case ast.Set() | ast.Tuple() | ast.List():
            return place.function is None and b" " not in _bytes(value)
        case ast.Call(func=func):
            name = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
            return name in _TEXT_DECIDES
        case ast.Assign() | ast.AnnAssign():
            return place.function is None and b" " not in _bytes(value)
    return False


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _patterns(pattern: object) -> Iterator[str]:
    """Regular expressions that differ by one quantifier, bound or negation, and still compile."""
    if not isinstance(pattern, str):
        return
    found = set()
    for match in re.finditer(r"(?<!\\)[+*?]|\[\^|(?<=[{,])\d+(?=[,}])", pattern):
        old = match[0]
        swapped = {"+": ("*",), "*": ("+",), "?": ("",), "[^": ("[",)}.get(old)
        for new in swapped or (str(int(old) + 1), str(int(old) - 1)):
            found.add(pattern[: match.start()] + new + pattern[match.end() :])
    for changed in sorted(found):
        try:
            re.compile(changed)
        except re.error:
            continue
        yield changed
