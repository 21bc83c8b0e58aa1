"""Reads the library's own source: which files there are, what they import, how large their functions are."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANKS = {"strategies": 0, "callbacks": 1, "trainer": 2}


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name below drivetrain ("" for drivetrain itself), or another package's name."""

    module: str
    own: bool
    line: int
    at_top: bool  # runs when the module is imported: not inside a function, not under TYPE_CHECKING
    typing_only: bool


@dataclass(frozen=True)
class Source:
    """One source file of the library."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name below drivetrain: "trainer.loop", "callbacks.tracking"."""
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")

    @property
    def folder(self) -> str:
        """The top folder: "trainer", "callbacks", "strategies", or "" for a file of the root."""
        parts = self.path.relative_to(ROOT).parts
        return parts[0] if len(parts) > 1 else ""

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name, feature_version=(3, 10))

    def imports(self) -> list[Import]:
        """Return every import of this file, wherever it stands."""
        found: list[Import] = []
        self._visit(self.tree, False, False, found)
        return found

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]

    def _visit(self, node: ast.AST, inside: bool, typing_only: bool, found: list[Import]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found += [self._entry(a.name, child, inside, typing_only) for a in child.names]
            elif isinstance(child, ast.ImportFrom):
                found += self._from(child, inside, typing_only)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    self._visit(ast.Module([statement], []), inside, True, found)
                for statement in child.orelse:
                    self._visit(ast.Module([statement], []), inside, typing_only, found)
            else:
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                self._visit(child, inside or function, typing_only, found)

    def _from(self, node: ast.ImportFrom, inside: bool, typing_only: bool) -> list[Import]:
        package = list(self.path.relative_to(ROOT).parts[:-1])
        if node.level:
            package = package[: len(package) - node.level + 1]
            base = ".".join([*package, *(node.module.split(".") if node.module else [])])
        elif (node.module or "").split(".")[0] == "drivetrain":
            base = ".".join(node.module.split(".")[1:])
        else:
            return [self._entry(node.module or "", node, inside, typing_only)]
        names = [".".join(filter(None, (base, alias.name))) for alias in node.names]
        modules = {name if name in modules_by_name() else base for name in names}
        return [Import(m, True, node.lineno, not inside and not typing_only, typing_only) for m in sorted(modules)]

    def _entry(self, name: str, node: ast.stmt, inside: bool, typing_only: bool) -> Import:
        own = name.split(".")[0] == "drivetrain"
        name = ".".join(name.split(".")[1:]) if own else name
        return Import(name, own, node.lineno, not inside and not typing_only, typing_only)


@cache
def sources() -> tuple[Source, ...]:
    """Return all files of the library: the root's and the three folders'."""
    paths = [*ROOT.glob("*.py"), *(path for folder in RANKS for path in (ROOT / folder).rglob("*.py"))]
    return tuple(Source(path) for path in sorted(paths))


@cache
def modules_by_name() -> dict[str, Source]:
    return {source.module: source for source in sources()}
