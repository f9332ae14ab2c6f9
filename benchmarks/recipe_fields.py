"""Count which fields of the library's configuration Megatron-Bridge's recipes set, and to what.

    python benchmarks/recipe_fields.py MEGATRON_BRIDGE.git --ref v0.6.0 --json benchmarks/records/recipe-fields.json

Every recipe function is called, with its package and the table of mixed precisions as they are and all else (torch,
megatron-core, the providers) replaced by objects that record what is set. So a field counts where a recipe, or what it
builds on, names it, whatever its default. `from_hub` are the fields that Bridge's converters set from a model's Hugging
Face config, with the number of converters: which of them a recipe sets is known only with that file.
`--recipe NAME` prints the fields of one recipe.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

BRIDGE = "megatron.bridge"
RECIPES = f"{BRIDGE}.recipes"
MIXED_PRECISION = f"{BRIDGE}.training.mixed_precision"
REAL = (RECIPES, MIXED_PRECISION, f"{BRIDGE}.utils.cuda_graph")
SECTIONS = ("model", "optimizer", "scheduler", "ddp", "mixed_precision", "comm_overlap", "dataset", "train", "peft")
MOST_VALUES = 8


class _Stub(type):
    """A class of a module that is not there: its attributes are recorded values named after it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _value(f"{cls.__name__}.{name}")

    def __getitem__(cls, name: str) -> Any:
        return _value(f"{cls.__name__}[{name!r}]")


class Recorded(metaclass=_Stub):
    """An object that takes any attribute, call and arithmetic, and remembers which attributes were set."""

    def __init__(self, *_args: Any, **fields: Any) -> None:
        vars(self).update(fields)
        vars(self)["_set"] = dict(fields)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
        self._set[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        child = _value(name)
        vars(self)[name] = child
        return child

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return _value(repr(self))

    def __getitem__(self, key: object) -> Any:
        return _value(f"{self!r}[{key!r}]")

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return str(vars(self).get("_name", type(self).__name__))

    def _same(self, *_others: Any) -> Any:
        return self

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __floordiv__ = __truediv__ = __or__ = __ror__ = _same
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda _self, _other: False
    __int__ = __index__ = __hash__ = lambda _self: 1

    def __float__(self) -> float:
        return 1.0


def _value(name: str) -> Recorded:
    value = Recorded()
    vars(value)["_name"] = name
    return value


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the trees that are not there, and of Bridge all but the recipes."""

    TREES = ("torch", "megatron", "transformers", "transformer_engine", "nemo_run", "numpy", "PIL", "omegaconf")

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        real = any(name == each or name.startswith(f"{each}.") for each in REAL)
        if name.partition(".")[0] not in self.TREES or real:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        # The parents of what is real have its folder, so that Python's own finder gets there.
        if any(each.startswith(f"{name}.") for each in REAL):
            spec.submodule_search_locations = [str(self.root.joinpath(*name.split(".")))]
        return spec

    def __init__(self, root: Path) -> None:
        self.root = root

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            stub = _Stub(name, (Recorded,), {})
            setattr(module, name, stub)
            return stub

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: a stub has no code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the table; the exit code is 1 if a recipe could not be called."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("repository", type=Path, help="a git repository of Megatron-Bridge")
    parser.add_argument("--ref", default="v0.6.0")
    parser.add_argument("--json", type=Path, help="where the table goes; else to stdout")
    parser.add_argument("--recipe", help="print this recipe's fields, and nothing else")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        _extract(options.repository, options.ref, root / "megatron" / "bridge")
        table, failed = _table(root, options.recipe)
        table["from_hub"] = _from_hub(root / "megatron" / "bridge" / "models")
    commit = _git(options.repository, "rev-parse", f"{options.ref}^{{commit}}").decode().strip()
    table = {"repository": "NVIDIA-NeMo/Megatron-Bridge", "ref": options.ref, "commit": commit, **table}
    if options.recipe:
        table.pop("from_hub")
    text = _json(table)
    if options.json:
        options.json.write_text(text)
    else:
        print(text, end="")
    for name, error in failed.items():
        print(f"recipe_fields.py: {name} could not be called: {error}", file=sys.stderr)
    return 1 if failed else 0


def _json(table: Mapping[str, Any]) -> str:
    """A field a line: a new version of Bridge is a readable difference."""

    def text(value: object) -> str:
        if not isinstance(value, dict):
            return json.dumps(value)
        lines = (f"  {json.dumps(name)}: {json.dumps(about)}" for name, about in value.items())
        return "{\n" + ",\n".join(lines) + "\n }"

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {text(value)}" for name, value in table.items()) + "\n}\n"


def _git(repository: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(repository), *words], check=True, stdout=subprocess.PIPE).stdout


def _extract(repository: Path, ref: str, into: Path) -> None:
    into.mkdir(parents=True)
    with tarfile.open(fileobj=BytesIO(_git(repository, "archive", f"{ref}:src/megatron/bridge"))) as archive:
        archive.extractall(into, filter="data")


def _table(root: Path, only: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, _Stubs(root))
    precisions = importlib.import_module(MIXED_PRECISION)
    # The default of a field that a precision does not name is not set by it.
    precisions.MixedPrecisionConfig = _Stub("MixedPrecisionConfig", (Recorded,), {})  # type: ignore[attr-defined]
    counts: Counter[str] = Counter()
    values: dict[str, Counter[str]] = defaultdict(Counter)
    hubs = recipes = 0
    failed = {}
    for name, recipe in sorted(_recipes(root)):
        if only and name != only:
            continue
        try:
            config = recipe()
        except NotImplementedError:
            # Bridge's own words for a recipe that there is only by name.
            continue
        except Exception as error:  # noqa: BLE001 - any recipe may do anything; the table must say which were left out
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        recipes += 1
        hubs += "to_megatron_provider" in repr(config.model)
        for field, value in _fields(config, precisions):
            counts[field] += 1
            values[field][_text(value)] += 1
    if only and not recipes:
        raise SystemExit(f"recipe_fields.py: Megatron-Bridge has no recipe {only}")
    fields = {
        field: {"recipes": count, "values": dict(values[field].most_common(MOST_VALUES))}
        for field, count in sorted(counts.items(), key=lambda each: (_section(each[0]), -each[1], each[0]))
    }
    return {"recipes": recipes, "model_from_hub": hubs, "fields": fields}, failed


def _section(field: str) -> int:
    return SECTIONS.index(field.partition(".")[0])


def _recipes(root: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    for path in sorted((root / "megatron" / "bridge" / "recipes").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        for function, value in vars(module).items():
            own = getattr(value, "__module__", "") == name and callable(value)
            if own and function.endswith("_config") and not function.startswith("_") and ".utils" not in name:
                yield function, value


def _fields(config: Any, precisions: Any) -> Iterator[tuple[str, Any]]:
    for section in SECTIONS:
        part = vars(config).get(section)
        if section == "mixed_precision" and isinstance(part, str):
            part = precisions.get_mixed_precision_config(part)
        if isinstance(part, Recorded):
            yield from ((f"{section}.{name}", value) for name, value in part._set.items() if name[0] != "_")


def _text(value: object) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _from_hub(models: Path) -> Mapping[str, int]:
    """Fields that converters set: pairs of their tables of names, and what they assign to a provider."""
    converters: dict[str, set[str]] = defaultdict(set)
    for path in sorted(models.rglob("*bridge.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for field in _set_by(node):
                converters[field].add(path.stem)
    return {field: len(names) for field, names in sorted(converters.items(), key=lambda each: (-len(each[1]), each[0]))}


def _set_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "provider":
                yield target.attr
            if getattr(target, "id", "").endswith("_MAPPING") and isinstance(node.value, ast.List):
                pairs = [ast.literal_eval(each) for each in node.value.elts if isinstance(each, ast.Tuple)]
                yield from (pair[1] for pair in pairs)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Provider"):
        yield from (keyword.arg for keyword in node.keywords if keyword.arg)


if __name__ == "__main__":
    sys.exit(main())
