"""What the project promises of its own source files."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "jaxpar"
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULE_LINES, FUNCTION_LINES = 400, 40
LONG_FUNCTIONS = {
    "search/contraction.py:find_order": "one greedy loop around one heap",
    "search/exhaustive.py:exhaustive": "one table, filled and read once",
}
"""Functions that may be longer, as "module.py:name", and why."""
PRIVATE = re.compile(r"\bjax\._src\b|\bflax\.[\w.]*\._\w")
PRIVATE_HOME = "_jax_private.py"


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Name of every function, and its lines without the docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _lines(node)
            if ast.get_docstring(node) is not None:
                lines -= _lines(node.body[0])
            yield node.name, lines


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_modules_are_short():
    lines = {name: len(text.splitlines()) for name, text in SOURCES.items()}
    assert lines, "no modules found"
    long = {name: n for name, n in lines.items() if n >= MODULE_LINES}
    assert not long, "split them along a concept"


def test_functions_are_short():
    long = {
        f"{name}:{function}": lines
        for name, text in SOURCES.items()
        for function, lines in functions(text)
        if lines > FUNCTION_LINES
    }
    assert long.keys() == LONG_FUNCTIONS.keys(), long


def test_private_apis_stay_in_one_module():
    found = [name for name, text in SOURCES.items() if PRIVATE.search(text)]
    assert set(found) <= {PRIVATE_HOME}
