"""What a component from git declares, read from its tree at the commit, without a build.

uv would build it to learn that, which needs torch and a compiler for one of the compile phase. What a tree states
before a build is in ``pyproject.toml``, in ``setup.cfg``, or written out in the call of ``setup`` in ``setup.py``; code
is not run. A tree of the compile phase that leaves it to code is refused: wrong metadata would hide real conflicts.
"""

from __future__ import annotations

import ast
import configparser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from packaging.version import InvalidVersion, Version

from envbuild.core.errors import CheckRefusedError
from envbuild.lock.components.models import Chosen, CompileMetadata
from envbuild.lock.components.project_metadata import (
    PYPROJECT,
    ProjectTable,
    are_texts,
    before_build,
    build_requires,
    marked_line,
    project_table,
    refuse_unreadable,
    with_cuda_names,
)
from envbuild.lock.components.static_values import Value, values_of
from envbuild.lock.components.tree import Tree

SETUP_CFG, SETUP_PY = "setup.cfg", "setup.py"
_SETUP_CALLS = frozenset({"setup", "setuptools.setup"})
LinesAndExtras = tuple[list[str], list[str]]


def metadata_of_tree(tree: Tree, cuda_major: str | None) -> CompileMetadata:
    """What a component declares at its commit.

    Raises:
        CheckRefusedError: the tree does not state its requirements or its version before a build.
    """
    stated, component = _Stated(tree), tree.component
    try:
        declared, version = stated.declared(), stated.version()
        needed = build_requires(tree.pyproject())
        if declared is not None:
            refuse_unreadable([*declared[0], *needed], declared[1], stated.project.requires_python)
    except (ValueError, SyntaxError, configparser.Error) as error:
        raise _refused(component, f"{type(error).__name__}: {error}") from error
    if declared is None:
        raise _refused(
            component, f"Neither {PYPROJECT} nor {SETUP_CFG} states its requirements, and {SETUP_PY} computes them."
        )
    if version is None:
        raise _refused(
            component, "Its version is not written out anywhere (release_file can name a file that holds it)."
        )
    requires, rewritten = with_cuda_names(declared[0], cuda_major)
    return CompileMetadata(
        name=component.name,
        version=version,
        requires_python=stated.project.requires_python,
        requires_dist=tuple(requires),
        provides_extra=tuple(declared[1]),
        build_requires=needed,
        rewritten=tuple(rewritten),
    )


def stated_metadata(tree: Tree) -> CompileMetadata | None:
    """What [project] of a component states at its commit, which no build can change (PEP 621); None: not all of it.

    So uv neither clones the repository with its submodules to lock, nor installs what builds the package: for
    Megatron-Bridge that is Megatron-LM and torch.
    """
    stated = _Stated(tree)
    try:
        declared, version = before_build(tree.pyproject() or ""), stated.version()
        if declared is None or version is None:
            return None
        refuse_unreadable(
            [*declared[0], *build_requires(tree.pyproject())], declared[1], stated.project.requires_python
        )
    except (ValueError, SyntaxError, configparser.Error):
        return None
    return CompileMetadata(
        name=tree.component.name,
        version=version,
        requires_python=stated.project.requires_python,
        requires_dist=tuple(declared[0]),
        provides_extra=tuple(declared[1]),
    )


def declared_by(tree: Tree) -> LinesAndExtras | None:
    """What a component requires at its commit, as PEP 508 lines, and its extras; None: only a build would tell."""
    try:
        return _Stated(tree).declared()
    except (ValueError, SyntaxError, configparser.Error):
        return None


def setup_names(text: str, tree: Tree) -> bool:
    """Whether this text is written out in a component's setup.py; also where there is none that can be read."""
    try:
        setup = ast.parse(tree.read(SETUP_PY) or "")
    except (ValueError, SyntaxError):
        return True
    return not setup.body or any(isinstance(node, ast.Constant) and node.value == text for node in ast.walk(setup))


def _refused(component: Chosen, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"what {component.title} requires is not known before a build",
        why=f"{component.git} at that commit: {why}",
        fix="Its metadata decides the lock, so nothing is guessed. Take a release, whose sdist states it: "
        f"--pin {component.name}=VERSION",
    )


@dataclass
class _Stated:
    """What the files of a component's tree state before a build."""

    tree: Tree

    @cached_property
    def project(self) -> ProjectTable:
        return project_table(self.tree.pyproject() or "")

    @cached_property
    def cfg(self) -> configparser.ConfigParser:
        # Like setuptools, which reads setup.cfg with RawConfigParser: a % means itself.
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(self.tree.read(SETUP_CFG) or "")
        return parser

    @cached_property
    def setup(self) -> dict[str, ast.expr] | None:
        """The arguments of the one call of ``setup``; None without one, or where not all of them can be seen."""
        tree = ast.parse(self.tree.read(SETUP_PY) or "")
        calls = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in _SETUP_CALLS
        ]
        if len(calls) != 1 or calls[0].args or any(word.arg is None for word in calls[0].keywords):
            return None
        return {str(word.arg): _resolved(word.value, tree) for word in calls[0].keywords}

    def declared(self) -> LinesAndExtras | None:
        """The requirements and the extras; None: nothing states them."""
        if (declared := before_build(self.tree.pyproject() or "")) is not None:
            return declared
        if "options" in self.cfg or "options.extras_require" in self.cfg:
            return self._of_cfg()
        return self._of_setup()

    def _of_cfg(self) -> LinesAndExtras | None:
        lines = _listed(self.cfg.get("options", "install_requires", fallback=""))
        extras = dict(self.cfg["options.extras_require"]) if "options.extras_require" in self.cfg else {}
        # A setup.py next to setup.cfg may add requirements, which only its arguments would show.
        if any(line.startswith("file:") for line in lines) or (self.tree.read(SETUP_PY) and self._of_setup() is None):
            return None
        return _with_extras(lines, {name: _listed(text) for name, text in extras.items()})

    def _of_setup(self) -> LinesAndExtras | None:
        if self.tree.read(SETUP_PY) is None or self.setup is None:
            return None
        try:
            main = ast.literal_eval(self.setup.get("install_requires", ast.List(elts=[], ctx=ast.Load())))
            extras = ast.literal_eval(self.setup.get("extras_require", ast.Dict(keys=[], values=[])))
        except ValueError:
            return None
        if not are_texts(main) or not isinstance(extras, dict) or not all(map(are_texts, extras.values())):
            return None
        return _with_extras(list(main), {str(name): list(lines) for name, lines in extras.items()})

    def version(self) -> str | None:
        """The version, from the first place that has it written out; None: none has."""
        spec = self.tree.component.spec
        own_module = self.tree.component.name.replace("-", "_")
        places: tuple[Callable[[], str | None], ...] = (
            lambda: self.tree.read(spec.release_file) if spec.release_file else None,
            self._of_pyproject,
            lambda: self._at(self.cfg.get("metadata", "version", fallback="")),
            lambda: _constant((self.setup or {}).get("version")),
            lambda: self._attribute(f"{[*spec.modules, own_module][0]}.__version__"),
        )
        for place in places:
            if text := (place() or "").strip():
                try:
                    return str(Version(text))
                except InvalidVersion:
                    continue
        return None

    def _of_pyproject(self) -> str | None:
        project = self.project
        if project.version:
            return project.version
        if project.version_attribute:
            return self._attribute(project.version_attribute)
        return self.tree.read(project.version_file) if project.version_file else None

    def _at(self, text: str) -> str | None:
        """A value of setup.cfg: the text itself, or what the `attr:` or `file:` in it names."""
        kind, colon, place = text.partition(":")
        if colon and kind.strip() == "attr":
            return self._attribute(place.strip())
        return self.tree.read(place.strip()) if colon and kind.strip() == "file" else text

    def _attribute(self, dotted: str) -> str | None:
        """The text that a module assigns to a name at its top level."""
        # As setuptools reads `attr:`: from the syntax tree, without importing the module (StaticModule in its
        # config/expand.py).
        module, _, name = dotted.rpartition(".")
        path = module.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py", f"src/{path}.py", f"src/{path}/__init__.py"):
            if (text := self.tree.read(file)) is not None:
                return _version_among(values_of(text), name)
        return None


def _version_among(values: Mapping[str, Value | None], name: str) -> str | None:
    version, parts = values.get(name), values.get("VERSION")
    # The form of NVIDIA's package_info.py. NeMo 3.0's asks for the installed distribution before it says that.
    if version is None and isinstance(parts, tuple) and len(parts) == 4:
        major, minor, patch, pre_release = parts
        return f"{major}.{minor}.{patch}{pre_release}"
    return version if isinstance(version, str) else None


def _assigned(name: str, tree: ast.Module) -> ast.expr | None:
    """The one value that a module gives a name at its top level."""
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and name in (getattr(target, "id", "") for target in node.targets)
    ]
    return values[0] if len(values) == 1 else None


def _resolved(value: ast.expr, tree: ast.Module) -> ast.expr:
    """A value, or the one that its name is given and nothing else is done with."""
    if not isinstance(value, ast.Name):
        return value
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == value.id]
    given = _assigned(value.id, tree)
    # Twice: where it is assigned, and as the argument. Code in between could change the list.
    return given if given is not None and len(used) == 2 else value


def _constant(value: ast.expr | None) -> str | None:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _listed(text: str) -> list[str]:
    """The lines of a list in setup.cfg."""
    return [line for part in text.split("\n") if (line := part.partition("#")[0].strip())]


def _with_extras(main: Sequence[str], extras: dict[str, list[str]]) -> LinesAndExtras:
    lines, names = list(main), []
    for key, needs in extras.items():
        # "extra:marker", as in an egg-info
        extra, _, marker = (part.strip() for part in key.partition(":"))
        lines += [marked_line(line, marker, extra) for line in needs]
        names += [extra] if extra else []
    return lines, list(dict.fromkeys(names))
