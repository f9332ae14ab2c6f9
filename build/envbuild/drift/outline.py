"""The outline of a source: its functions and classes, and the words of each. Read from the text, without a parser.

Reach needs the words of every module that a stack imports. Parsing them all would take longer than the comparison; a
wrong word here makes code count as used, never as unused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

# Comments and strings, a string with its quotes; a backslash keeps the next character from ending it.
_TEXT = re.compile(
    r"#[^\n]*"
    r'|"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'",
    re.DOTALL,
)
# A name, or the path of one: "forward", "package.module.Class", "package.module:function".
_PATH = re.compile(r"[^\W\d]\w*(?:[.:][^\W\d]\w*)*")
_WORD = re.compile(r"\w+")
# Names with what stands behind their dots, and numbers, which no one asks for.
_DOTTED = re.compile(r"[\w.]+")
_HEADER = re.compile(r"(?:async\s+def|def|class)\s+([^\W\d]\w*)")
# These begin with a text, which is searched for much faster than a pattern.
_FROM = re.compile(r"from[ \t]+(\.*)[ \t]*([\w.]*)\s+import\s*(?:\(([^)]*)\)|([^\n]*))")
_ALIAS = re.compile(r"\bas\s+\w+")
# Functions that import modules whose names are computed.
_DYNAMIC = frozenset({"import_module", "__import__", "iter_modules", "walk_packages"})
_BRACKETS = str.maketrans("()[]", "    ")
# The default value of a parameter is made where the function is defined.
_DEFAULT = re.compile(r"=\s*([^\W\d][\w.]*)")
# Decorators that do nothing with a function but what its callers meet; others may register it somewhere.
_HARMLESS = frozenset(
    [
        "abstractmethod",
        "asynccontextmanager",
        "cache",
        "cached_property",
        "classmethod",
        "compile",
        "contextmanager",
        "dataclass",
        "deleter",
        "deprecated",
        "deprecated_args",
        "final",
        "getter",
        "inference_mode",
        "jit_fuser",
        "lru_cache",
        "no_grad",
        "nvtx_decorator",
        "overload",
        "override",
        "property",
        "script",
        "setter",
        "singledispatchmethod",
        "staticmethod",
        "total_ordering",
        "wraps",
    ]
)
# What bases of other packages call of their subclasses; of one that is not here, it may be anything.
_CALLS = {
    **dict.fromkeys(
        ["object", "ABC", "Generic", "Protocol", "NamedTuple", "TypedDict", "str", "int", "dict", "list", "tuple"],
        frozenset[str](),
    ),
    **dict.fromkeys(["Enum", "IntEnum", "StrEnum"], frozenset({"_generate_next_value_", "_missing_"})),
    # torch.nn.Module and torch.autograd.Function.
    "Module": frozenset(
        [
            *["forward", "extra_repr", "reset_parameters", "train", "_apply", "state_dict", "load_state_dict"],
            *["_load_from_state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state", "_get_name"],
        ]
    ),
    "Function": frozenset(["forward", "backward", "setup_context", "vmap", "jvp"]),
}


@dataclass(eq=False)
class Segment:
    """The text of a module, a class or a function, without that of the classes and functions in it.

    Attributes:
        qualname: such as ``Strategy.setup``; empty for a module.
        bases: the last words of a class's bases; None for a function.
        decorators: the last words of its decorators.
    """

    module: str
    package: str
    qualname: str
    parent: Segment | None
    bases: frozenset[str] | None = None
    decorators: tuple[str, ...] = ()
    children: list[Segment] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name that it is used by."""
        return self.qualname.rpartition(".")[2]

    @property
    def is_package(self) -> bool:
        """Whether it is of a package's ``__init__``."""
        return self.package == self.module

    @property
    def is_registered(self) -> bool:
        """Whether a decorator may hand it to something that uses it without naming it."""
        return not _HARMLESS.issuperset(self.decorators)

    def add(self, line: str) -> None:
        """A line of its text."""
        self._lines.append(line)

    @cached_property
    def text(self) -> str:
        """Its code: without comments, without strings that are no names."""
        return "\n".join(self._lines)

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name in it."""
        return frozenset(word for dotted in self._dotted for word in dotted.split("."))

    @cached_property
    def mentioned(self) -> frozenset[str]:
        """Dotted names in it, in imports and elsewhere: modules, and what is in modules."""
        mentioned = set(self._dotted)
        if "import" in self.words:
            for dots, module, inside, rest in _FROM.findall(self.text):
                origin = self._absolute(len(dots), module)
                names = _WORD.findall(_ALIAS.sub("", inside or rest.partition(";")[0]))
                mentioned.update([origin, *(f"{origin}.{name}" for name in names)])
        return frozenset(mentioned)

    @property
    def imports_computed_names(self) -> bool:
        """Whether it imports modules by names that are not written here."""
        return not _DYNAMIC.isdisjoint(self.words)

    def computed(self) -> list[str]:
        """Beginnings of dotted names that go on with something computed: ``f"package.recipes.{name}"``."""
        return [dotted.rstrip(".") for dotted in self._dotted if dotted.endswith(".") and f"{dotted}{{" in self.text]

    @cached_property
    def _dotted(self) -> frozenset[str]:
        return frozenset(_DOTTED.findall(self.text))

    def stars(self) -> list[str]:
        """The modules of ``from ... import *``."""
        modules = _FROM.findall(self.text)
        return [self._absolute(len(dots), module) for dots, module, _, rest in modules if rest.strip().startswith("*")]

    def _absolute(self, level: int, module: str) -> str:
        if not level:
            return module
        package = self.package.split(".")
        return ".".join(filter(None, [*package[: len(package) - (level - 1)], module]))


# Measured on 160 modules of the standard library: 0.28 s, where ast.parse alone takes 0.65 s (Python 3.11).
def outline(source: bytes, module: str, package: str) -> Segment:
    """The segments of a module, below that of its own text; relative imports start from ``package``."""
    top = Segment(module, package, "", None)
    _Outliner(top).read(_code(source))
    return top


def methods_called_by(base: str) -> frozenset[str] | None:
    """The methods that a class of another package, of which only the name is known, calls; None: any."""
    if base.endswith(("Error", "Exception")):
        return frozenset()
    return _CALLS.get(base)


class _Outliner:
    """Puts each line into the segment that it belongs to."""

    def __init__(self, top: Segment) -> None:
        # Each open class and function, with its indentation.
        self._open = [(-1, top)]
        self._decorators: list[str] = []

    def read(self, code: str) -> None:
        depth = 0
        continued = False
        where = self._open[0][1]
        for line in code.split("\n"):
            stripped = line.lstrip()
            if not stripped:
                continue
            if not depth and not continued:
                # A form feed starts the count anew, and a tab goes to the next multiple of eight, for Python too
                # (Language Reference, 2.1.8).
                before = line[: len(line) - len(stripped)].rpartition("\f")[2]
                where = self._statement(stripped, len(before.expandtabs()))
            where.add(line)
            # Strings and comments are gone: brackets count.
            depth += sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
            depth = max(depth, 0)
            continued = line.endswith("\\")
        for _, segment in self._open[1:]:
            _finish(segment)

    def _statement(self, text: str, indent: int) -> Segment:
        """The segment of a statement that begins with this line."""
        while indent <= self._open[-1][0]:
            _finish(self._open.pop()[1])
        around = self._open[-1][1]
        header = _HEADER.match(text)
        if header is None:
            if text.startswith("@"):
                self._decorators.append(text[1:].partition("(")[0].strip().rpartition(".")[2])
            return around
        inside = Segment(
            around.module,
            around.package,
            f"{around.qualname}.{header[1]}".lstrip("."),
            around,
            frozenset() if text.startswith("class") else None,
            tuple(self._decorators),
        )
        self._decorators = []
        around.children.append(inside)
        self._open.append((indent, inside))
        return inside


def _finish(segment: Segment) -> None:
    """What the header of a complete segment says."""
    code = segment.text
    head = _header(code)
    if segment.bases is not None:
        bases = re.sub(r"\[[^]]*\]", "", head.partition("(")[2].rpartition(")")[0])
        names = [part.strip() for part in bases.split(",") if "=" not in part]
        segment.bases = frozenset(name.rpartition(".")[2] for name in names if name)
    elif segment.parent is not None:
        segment.parent.add(" ".join(_DEFAULT.findall(head)))
    # Its own name is no use of it. A cached_property keeps its value under its name in the object's dictionary.
    segment.__dict__["text"] = code.replace(segment.name, "", 1)


def _header(code: str) -> str:
    """The text up to the colon that begins the body."""
    depth = 0
    for bracket in re.finditer(r"[(\[{)\]}:]", code):
        depth += (bracket[0] in "([{") - (bracket[0] in ")]}")
        if bracket[0] == ":" and not depth:
            return code[: bracket.start()]
    return code


def _code(source: bytes) -> str:
    """The text without comments, and without strings other than those that are names."""
    text = source.decode(errors="replace").replace("\r\n", "\n")
    return _TEXT.sub(_as_code, text)


def _as_code(match: re.Match[str]) -> str:
    literal = match[0]
    if literal.startswith("#"):
        return ""
    content = literal[3:-3] if literal.startswith(('"""', "'''")) else literal[1:-1]
    start = match.start()
    # Two letters: `rf` and `fr` are prefixes as well.
    if "f" in match.string[max(0, start - 2) : start].lower():
        # What stands in braces is code; brackets outside of them are not balanced.
        return (
            f" {content.translate(_BRACKETS)} ".replace("\n", " ") if content.count("{") == content.count("}") else ""
        )
    return f" {content.replace(':', '.')} " if _PATH.fullmatch(content) else ' ""'
