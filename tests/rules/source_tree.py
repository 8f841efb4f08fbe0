"""The source code of Baton as syntax trees, and what is counted in them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("services", "kvtransfer", "loadtest")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One file of a package. nodes: all of its tree, as `ast.walk` yields them."""

    path: str  # from the repository's root
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @classmethod
    def of(cls, path: str, source: str) -> "Module":
        """Parses a file's source."""
        tree = ast.parse(source)
        return cls(path, tree, tuple(ast.walk(tree)))

    @property
    def name(self) -> str:
        """The module's dotted name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def in_kernels(self) -> bool:
        """True for code that is compiled for a processor or a GPU."""
        return self.path.startswith("services/engine/kernels/")

    def functions(self) -> Iterator[Function]:
        """All functions and methods, nested ones too."""
        return (node for node in self.nodes if isinstance(node, Function))

    def docstrings(self) -> Iterator[tuple[int, str]]:
        """Docstrings with their lines."""
        for node in self.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
                yield node.body[0].lineno, text

    def texts(self) -> Iterator[tuple[int, str]]:
        """String literals that people may read, with their lines: those with a space, docstrings aside.

        A literal without a space is a name, such as a field of a message. Pieces of an f-string come one by one.
        """
        bodies = (node.body for node in self.nodes if isinstance(node, ast.Module | ast.ClassDef | Function))
        described = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
        for node in self.nodes:
            match node:
                case ast.Constant(value=str(text)) if " " in text and id(node) not in described:
                    yield node.lineno, text

    def logged_names(self) -> Iterator[tuple[int, str]]:
        """Names of the values that lines of the log have, with their lines."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and dotted(node.func).startswith("log."):
                yield from ((node.lineno, keyword.arg) for keyword in node.keywords if keyword.arg)

    def classes(self) -> Iterator[ast.ClassDef]:
        """All classes, nested ones too."""
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))


def modules(*packages: str) -> Iterator[Module]:
    """Yields every module of these packages."""
    return chain.from_iterable(map(_modules, packages))


@cache
def _modules(package: str) -> tuple[Module, ...]:
    files = sorted((ROOT / package).rglob("*.py"))
    return tuple(Module.of(str(file.relative_to(ROOT)), file.read_text()) for file in files)


def dotted(node: ast.expr) -> str:
    """Returns a name with dots, such as `os.path.join`, as it is written; empty: the expression is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def num_lines(node: Function) -> int:
    """Lines from `def` to the end, without the docstring's."""
    assert node.end_lineno is not None
    first = node.body[0]
    is_documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = first.end_lineno - first.lineno + 1 if is_documented and first.end_lineno else 0
    return node.end_lineno - node.lineno + 1 - docstring


def num_parameters(node: Function) -> int:
    """Parameters, `self` and `cls` aside."""
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def public_methods(node: ast.ClassDef) -> list[str]:
    """Names of the methods that others call; properties count."""
    return [child.name for child in node.body if isinstance(child, Function) and not child.name.startswith("_")]


def imports(module: Module, *, everywhere: bool = False) -> set[str]:
    """Dotted names of what a module imports when it is loaded; `everywhere`: inside functions and for types too."""
    found: set[str] = set()
    for node in module.nodes if everywhere else module.tree.body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def defined_names(module: Module) -> set[str]:
    """Names that a module gives: of itself, its classes, functions, parameters, variables and attributes."""
    names = {module.path.rpartition("/")[2].removesuffix(".py")}
    for node in module.nodes:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names
