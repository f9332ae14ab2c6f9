"""Which branch of an ``if`` runs, and what a ``try`` catches, as far as that can be read."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from packaging.version import InvalidVersion, Version

from envbuild.drift.bindings import Assigned, Scope, caught_names
from envbuild.drift.sources import SourceTree
from envbuild.drift.symbols import ClassSymbol, FunctionSymbol, MemberSymbol, ModuleSymbol, Reader
from envbuild.drift.syntax import walk

CALL_ERRORS = frozenset({"TypeError", "Exception", "BaseException"})
ATTRIBUTE_ERRORS = frozenset({"AttributeError", "Exception", "BaseException"})
_ANY_ERROR = frozenset({"BaseException"})
# is_te_min_version("2.0"), is_torch_atleast_version(...): a helper that compares an installed version.
_AT_LEAST = re.compile(r"is_(\w+?)_(?:min|atleast|at_least)_version")
_LOOKS = frozenset({"hasattr", "getattr"})
_INSPECTS = frozenset({"signature", "getfullargspec", "find_spec"})
_COMPARES: dict[type[ast.cmpop], Callable[[Version, Version], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_OF_A_TREE = ModuleSymbol | ClassSymbol | FunctionSymbol | MemberSymbol
_TERMINATORS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class BranchOutcome(Enum):
    """Whether the code below a condition runs."""

    TRUE = "runs"
    FALSE = "never runs"
    OPEN = "runs in some cases"
    ADAPTED = "runs where the installed version is right for it"


@dataclass
class Conditions:
    """Judges conditions in one module of the consumer.

    Attributes:
        lost: names that an import which fails leaves false or undefined.
        gained: flags that an import which works sets to true.
    """

    reader: Reader
    provider: SourceTree
    lost: set[str]
    gained: set[str]

    def verdict(self, test: ast.expr, scope: Scope) -> BranchOutcome:
        """Whether a test is certainly true or false, open, or asks for the provider's version or abilities."""
        match test:
            case ast.Constant(value=value):
                return BranchOutcome.TRUE if value else BranchOutcome.FALSE
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _opposite(self.verdict(operand, scope))
            case ast.BoolOp(op=ast.And(), values=values):
                return _all([self.verdict(value, scope) for value in values])
            case ast.BoolOp(values=values):
                # a or b is not (not a and not b).
                return _opposite(_all([_opposite(self.verdict(value, scope)) for value in values]))
        return self._flag(test) or self._version(test) or self._feature(test, scope)

    def _flag(self, test: ast.expr) -> BranchOutcome | None:
        """The verdict of ``HAVE_X``, ``x is None`` or ``TYPE_CHECKING``; None for other tests."""
        match test:
            # False when the program runs (typing.TYPE_CHECKING).
            case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
                return BranchOutcome.FALSE
            case ast.Name(id=name):
                return BranchOutcome.FALSE if name in self.lost else BranchOutcome.TRUE if name in self.gained else None
            case ast.Compare(left=ast.Name(id=name), ops=[how], comparators=[ast.Constant(value=None)]):
                if name in self.lost and isinstance(how, ast.Is | ast.IsNot):
                    return BranchOutcome.TRUE if isinstance(how, ast.Is) else BranchOutcome.FALSE
        return None

    def _version(self, test: ast.expr) -> BranchOutcome | None:
        """The verdict of a comparison of versions; None for other tests."""
        holds: bool | None = None
        match test:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(least)), *_]):
                which = _AT_LEAST.fullmatch(name)
                # is_torch_min_version is about another package: no verdict here.
                if which and which[1] in _nicknames(self.provider.name):
                    holds = self._compare(operator.ge, least)
            case ast.Compare(left=left, ops=[how], comparators=[right]) if type(how) in _COMPARES:
                literal = _literal(right)
                if literal and self._is_own_version(left):
                    holds = self._compare(_COMPARES[type(how)], literal)
        if holds is not None:
            # A test that the version passes protects nothing: megatron-core 0.12.3 asks for Transformer Engine
            # 2.2.0.dev0, and then passes an argument that 2.2.0 lacks and 2.3.0 has (tests/integration/test_drift.py).
            return BranchOutcome.TRUE if holds else BranchOutcome.FALSE
        # A version that is not compared with a literal, or not the provider's: its author thought of other versions.
        return BranchOutcome.ADAPTED if any("version" in word for word in _words(test)) else None

    def _compare(self, compare: Callable[[Version, Version], bool], other: str) -> bool | None:
        try:
            return compare(Version(self.provider.version), Version(other))
        # A component from git has its commit as version.
        except InvalidVersion:
            return None

    def _is_own_version(self, node: ast.expr) -> bool:
        """Whether an expression names the provider and the word version: ``mcore_version``, ``te.__version__``."""
        # So that `te` is found in te_version and not in "interleaved".
        words = [re.sub(r"[^a-z0-9]+", "_", word) for word in _words(node)]
        own = "|".join(sorted(_nicknames(self.provider.name)))
        named = any(re.search(rf"(?:^|_)(?:{own})(?:_|$)", word) for word in words)
        return named and any("version" in word.split("_") for word in words)

    def _feature(self, test: ast.expr, scope: Scope) -> BranchOutcome:
        for node in walk(test):
            if isinstance(node, ast.Name) and self._holds_answer(node, scope):
                return BranchOutcome.ADAPTED
        return BranchOutcome.ADAPTED if self._asks(test, scope) else BranchOutcome.OPEN

    def _holds_answer(self, node: ast.Name, scope: Scope) -> bool:
        """Whether a name was assigned the answer to such a question: ``HAS_X = hasattr(module, "x")``."""
        return any(
            isinstance(value, Assigned)
            and (self._asks(value.value, value.scope) or self._version(value.value) is not None)
            for value in scope.values(node.id)
        )

    def _asks(self, test: ast.expr, scope: Scope) -> bool:
        """Whether an expression looks at what the provider has: hasattr on it, or a signature."""
        for node in walk(test):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in _INSPECTS:
                return True
            if name in _LOOKS and node.args:
                symbols = self.reader.evaluate(node.args[0], scope)
                if any(isinstance(symbol, _OF_A_TREE) for symbol in symbols):
                    return True
        return False


def catching(statement: ast.Try, errors: frozenset[str]) -> list[ast.ExceptHandler]:
    """The handlers that catch one of these errors and go on; one that raises again protects nothing."""
    return [
        handler
        for handler in statement.handlers
        if caught_names(handler) & (errors | _ANY_ERROR) and not isinstance(handler.body[-1], ast.Raise)
    ]


def suppressed(statement: ast.With | ast.AsyncWith) -> frozenset[str]:
    """The errors that ``with contextlib.suppress(...)`` swallows."""
    names: set[str] = set()
    for manager in statement.items:
        match manager.context_expr:
            case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=arguments):
                names.update(getattr(node, "id", getattr(node, "attr", "BaseException")) for node in arguments)
    return frozenset(names)


def ends(block: list[ast.stmt]) -> bool:
    """Whether nothing after this block runs."""
    return any(isinstance(statement, _TERMINATORS) for statement in block)


def _all(verdicts: list[BranchOutcome]) -> BranchOutcome:
    # The first that occurs decides: `False and x` is false whatever x is.
    for strongest in (BranchOutcome.FALSE, BranchOutcome.ADAPTED, BranchOutcome.OPEN):
        if strongest in verdicts:
            return strongest
    return BranchOutcome.TRUE


def _opposite(verdict: BranchOutcome) -> BranchOutcome:
    opposites = {BranchOutcome.TRUE: BranchOutcome.FALSE, BranchOutcome.FALSE: BranchOutcome.TRUE}
    return opposites.get(verdict, verdict)


def _nicknames(distribution: str) -> frozenset[str]:
    """How code names a distribution: transformer_engine, te, mcore, megatron_core."""
    words = distribution.split("-")
    initials = "".join(word[0] for word in words)
    # mcore of megatron-core: a letter, and the rest.
    short = words[0][0] + "".join(words[1:])
    return frozenset({distribution.replace("-", "_"), initials, short} if len(words) > 1 else {distribution})


def _literal(node: ast.expr) -> str | None:
    """The version in ``"2.0"`` or ``Version("2.0")``."""
    match node:
        case ast.Constant(value=str(text)) | ast.Call(args=[ast.Constant(value=str(text))]):
            return text
    return None


def _words(node: ast.expr) -> Iterator[str]:
    """Every identifier and short text in an expression, in lower case."""
    for inner in walk(node):
        match inner:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                yield word.lower()
