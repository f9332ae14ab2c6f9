"""Which functions need not be walked: no word in their text leads to anything of the provider."""

from __future__ import annotations

import ast
import re
import unicodedata

from envbuild.drift.bindings import ClassDefinition, Scope
from envbuild.drift.classes import Classes
from envbuild.drift.symbols import ClassSymbol, ExternalSymbol, FunctionSymbol, Reader, Symbol, UnknownSymbol
from envbuild.drift.syntax import FunctionNode

_WORD = re.compile(r"\w+")


class Relevance:
    """Judges the functions of one module of the consumer by their words.

    Whatever a function asks of the provider begins with a name of its module, with an import of its own, or with
    ``super()``. Reading words is generous: those in comments and texts count too.
    """

    def __init__(self, reader: Reader, classes: Classes, scope: Scope, source: bytes) -> None:
        self._reader = reader
        self._classes = classes
        self._scope = scope
        self._lines = source.splitlines()
        self._leads: dict[str, bool] = {}

    def may_ask(self, node: FunctionNode, owner: ClassDefinition | None) -> bool:
        """Whether a function of the module, or a method of ``owner`` in it, can ask the provider anything."""
        body = node.body[1:] if _is_text(node.body[0]) else node.body
        if not body:
            return False
        # Annotations of parameters ask nothing, and name classes without calling them. Decorators stand above a `def`.
        first = min(first_node.lineno for first_node in (body[0], *getattr(body[0], "decorator_list", ())))
        text = b"\n".join(self._lines[first - 1 : node.end_lineno]).decode(errors="replace")
        # Python reads identifiers in this form (PEP 3131): `\ufb01` in a source is the name `fi`.
        words = set(_WORD.findall(text if text.isascii() else unicodedata.normalize("NFKC", text)))
        if "import" in words or ("super" in words and owner is not None and self._is_of_provider(owner)):
            return True
        return any(map(self._leads_there, words))

    def _is_of_provider(self, owner: ClassDefinition) -> bool:
        return any(
            isinstance(base, ClassDefinition) and self._reader.tables.provided(base.scope.module)
            for base in self._classes.order(owner)
        )

    def _leads_there(self, word: str) -> bool:
        if word not in self._scope.bindings and not self._scope.stars:
            return False
        if word not in self._leads:
            self._leads[word] = any(map(self._is_lead, self._reader.lookup(word, self._scope)))
        return self._leads[word]

    def _is_lead(self, symbol: Symbol) -> bool:
        match symbol:
            case UnknownSymbol() | ExternalSymbol():
                return False
            case FunctionSymbol(definition=definition):
                return self._reader.tables.provided(definition.scope.module)
            case ClassSymbol(definition=definition):
                return self._is_of_provider(definition)
        return True


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
