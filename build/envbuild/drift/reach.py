"""Which code runs, or may be called, once the modules of a stack are imported.

Names are not resolved: whoever names ``setup`` uses every function of that name. So code counts as out of reach only
where nothing that is in reach names it at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from envbuild.drift.families import family_of, is_of_one_family
from envbuild.drift.outline import Segment, methods_called_by, outline
from envbuild.drift.sources import SourceTree, parents


@dataclass
class Outlines:
    """The outlines of modules, each made once."""

    _made: dict[tuple[SourceTree, str], Segment] = field(default_factory=dict)

    def segment(self, tree: SourceTree, module: str) -> Segment:
        """The outline of a module of a tree."""
        key = (tree, module)
        if key not in self._made:
            self._made[key] = outline(tree.files[tree.modules[module]], module, tree.package_of(module))
        return self._made[key]


@dataclass(frozen=True, eq=False)
class StackPart:
    """A component as a part of a stack.

    Attributes:
        modules: those that the stack imports.
        is_used: another of the components uses it, and is there to be read.
    """

    tree: SourceTree
    modules: tuple[str, ...] = ()
    is_used: bool = False


class Reach:
    """What a stack reaches in a component and in those that use it.

    A component that others use is entered through these, and through the modules that the stack imports. One that no
    other uses is entered through the stack's modules and what these offer; where they are no more than its outermost
    packages, all of its modules may be imported.

    Args:
        parts: the component, and all components that use it.
    """

    def __init__(self, parts: Sequence[StackPart], outlines: Outlines | None = None) -> None:
        self._parts = parts
        self._outlines = outlines or Outlines()
        self._modules = {module: part.tree for part in parts for module in part.tree.modules}
        self._live: set[Segment] = set()
        self._words: set[str] = set()
        # Segments that are defined in something live, and that nothing names so far, by name.
        self._waiting: dict[str, list[Segment]] = {}
        # Live classes, by name.
        self._classes: dict[str, list[Segment]] = {}
        self._queue: list[Segment] = []
        self._one_family: dict[str, bool] = {}

    def obstacle(self, module: str, within: str) -> str:
        """Why nothing in the stack reaches a function of a module; empty: something does, or may."""
        top = self._top(module)
        if top is None:
            return ""
        # Where nothing drifted, nobody asks: of the 7 s of processor time for NeMo this takes 2.
        if not self._live:
            self._explore()
        if top not in self._live:
            return f"nothing that the stack imports leads to {module}"
        segments = [top]
        for name in filter(None, within.split(".")):
            segments = [child for segment in segments for child in segment.children if child.name == name]
            # What is not found in the text is taken as used.
            if segments and not self._live.intersection(segments):
                return f"nothing that the stack reaches names {segments[0].qualname}"
        if within and self._is_of_one_family(module):
            return f"only models of {family_of(module)} run into it, which the stack does not name"
        return ""

    def _top(self, module: str) -> Segment | None:
        """The outline of a module; None where it is of none of the components."""
        tree = self._modules.get(module)
        return None if tree is None else self._outlines.segment(tree, module)

    def _is_of_one_family(self, module: str) -> bool:
        if module not in self._one_family:
            tops = [segment for segment in self._live if not segment.qualname]
            named = [name for part in self._parts for name in part.modules]
            self._one_family[module] = is_of_one_family(module, tops, self._live, named)
        return self._one_family[module]

    # Entries

    def _explore(self) -> None:
        for part in self._parts:
            self._enter(part)
        self._settle()

    def _enter(self, part: StackPart) -> None:
        whole = not part.is_used and part.tree.roots.issuperset(part.modules)
        for module in part.tree.modules if whole else part.modules:
            self._import(module)
        if not part.is_used and not whole:
            for module in part.modules:
                self._offer(module)

    def _offer(self, module: str) -> None:
        """The public names of a module that the user of a stack imports, and of those that it offers as its own."""
        self._publish(module)
        if top := self._top(module):
            for name in [*top.mentioned, *top.stars()]:
                self._publish(name)

    def _publish(self, module: str) -> None:
        if top := self._top(module):
            self._import(module)
            for segment in top.children:
                if not segment.name.startswith("_"):
                    self._use(segment)

    # Marking

    def _import(self, module: str) -> None:
        """A module is imported, with the packages around it; a name in a module imports that module."""
        for name in (module, *parents(module)):
            if top := self._top(name):
                self._use(top)

    def _import_below(self, package: str) -> None:
        for module in self._modules:
            if module.startswith(f"{package}."):
                self._import(module)

    def _use(self, segment: Segment) -> None:
        if segment not in self._live:
            self._live.add(segment)
            self._queue.append(segment)

    def _settle(self) -> None:
        while self._queue:
            while self._queue:
                self._read(self._queue.pop())
            # Which bases are in the trees is known when everything that is imported was read.
            for segment in [segment for group in self._classes.values() for segment in group]:
                called = self._called_from_outside(segment)
                for child in segment.children:
                    if called is None or child.name in called:
                        self._use(child)

    def _read(self, segment: Segment) -> None:
        """Everything that a live segment leads to."""
        for name in segment.mentioned:
            if name in self._modules or name.rpartition(".")[0] in self._modules:
                self._import(name)
        for package in segment.computed():
            self._import_below(package)
        if segment.imports_computed_names:
            self._import_below(segment.package)
        for word in segment.words - self._words:
            self._words.add(word)
            for waiting in self._waiting.pop(word, ()):
                self._use(waiting)
        if segment.bases is not None:
            self._classes.setdefault(segment.name, []).append(segment)
        for child in segment.children:
            # Python calls __init__, __call__ and the like itself.
            if child.name in self._words or child.is_registered or child.name.endswith("__"):
                self._use(child)
            else:
                self._waiting.setdefault(child.name, []).append(child)

    def _called_from_outside(self, segment: Segment, seen: frozenset[str] = frozenset()) -> frozenset[str] | None:
        """The methods of a class that bases which are not here call, as frameworks do; None: any."""
        called: frozenset[str] = frozenset()
        for base in (segment.bases or frozenset()) - seen:
            methods = [methods_called_by(base)]
            if base in self._classes:
                methods = [self._called_from_outside(other, seen | {base}) for other in self._classes[base]]
            for names in methods:
                if names is None:
                    return None
                called |= names
        return called
