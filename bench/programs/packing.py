"""Modules of this package as one program: the parts that `main` uses, without docstrings and annotations, like a
program written by hand. Every launch compiles the source in the sandbox, so unused parts would add to the measured
time."""

from __future__ import annotations

import ast
from pathlib import Path

OURS = ("bench", "__future__", "collections", "typing")
"""Of imports: what is packed, and what only annotations need."""


def source_of(*names: str, also: str = "") -> str:
    """The source of the modules in this order, then `also`. Of several definitions of a name, the last one is used."""
    parts = [Path(__file__).with_name(f"{name}.py").read_text() for name in names]
    tree = ast.parse("\n".join([*parts, also]).replace("from __future__ import annotations", ""))
    tree = _Bare().visit(tree)
    defined = {name: part for part in tree.body for name in _defines(part)}
    used: set[str] = set()
    wanted = ["main"]
    while wanted:
        name = wanted.pop()
        if name in defined and name not in used:
            used.add(name)
            wanted += [part.id for part in ast.walk(defined[name]) if isinstance(part, ast.Name)]
    kept = {id(defined[name]) for name in used}
    tree.body = [part for part in tree.body if id(part) in kept]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


class _Bare(ast.NodeTransformer):
    """Removes annotations and docstrings."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value is not None else None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        self.generic_visit(node)
        return None if isinstance(node.value, ast.Constant) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._body(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._body(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._body(node)

    def _body(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node, ast.ClassDef):
            node.returns = None
        node.body = node.body or [ast.Pass()]
        return node


def _defines(part: ast.stmt) -> list[str]:
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [part.name]
    if isinstance(part, ast.Assign):
        return [name.id for target in part.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    if isinstance(part, ast.Import):
        return [(alias.asname or alias.name).split(".")[0] for alias in part.names]
    if isinstance(part, ast.ImportFrom) and (part.module or "").split(".")[0] not in OURS:
        return [alias.asname or alias.name for alias in part.names]
    return []
