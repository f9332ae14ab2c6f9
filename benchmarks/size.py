"""Sizes of the code base: python benchmarks/size.py [ROOT]; prints one JSON object.

Lines of code are those that are neither blank, nor a comment, nor part of a docstring.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

MOST_LINES = 300
MOST_PARAMETERS = 6
SKIPPED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines of all docstrings, those of attributes among them."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def code_lines(text: str) -> int:
    """Lines of code of one file."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a function has, without self and cls."""
    words = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(words) - (1 if words and words[0].arg in ("self", "cls") else 0)


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether click makes the parameters."""
    return any("command" in ast.unparse(decorator) for decorator in node.decorator_list)


def measure(root: Path) -> dict[str, object]:
    """All figures of a checkout."""
    product = [file for top in ("build/envbuild", "smoke") for file in sorted((root / top).rglob("*.py"))]
    tests = sorted((root / "tests").rglob("*.py"))
    packages: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    wide = []
    for file in product:
        text = file.read_text(encoding="utf-8")
        parts = file.relative_to(root).parts
        name = parts[2] if parts[0] == "build" and len(parts) > 3 else parts[0]
        for index, number in enumerate((1, text.count("\n"), code_lines(text))):
            packages[name][index] += number
        wide += [
            f"{file.relative_to(root)}:{node.name}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and parameters(node) > MOST_PARAMETERS
            and not is_command(node)
        ]
    docs = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return {
        "files": len(product),
        "lines": sum(lines for _, lines, _ in packages.values()),
        "lines_of_code": sum(code for _, _, code in packages.values()),
        "files_of_tests": len(tests),
        "lines_of_code_of_tests": sum(code_lines(file.read_text(encoding="utf-8")) for file in tests),
        "modules_over_300_lines": sum(file.read_text(encoding="utf-8").count("\n") > MOST_LINES for file in product),
        "functions_with_more_than_6_parameters": len(wide),
        "words_of_docs": sum(len(file.read_text(encoding="utf-8").split()) for file in docs),
        "packages": {
            name: dict(zip(("files", "lines", "code"), item, strict=True)) for name, item in sorted(packages.items())
        },
        "wide": wide,
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])), indent=1))
