"""Write envs/knowledge/recipes.toml: what each recipe of Megatron-Bridge sets, and what its converters take from a
Hugging Face config.

    python benchmarks/recipe_knowledge.py MEGATRON_BRIDGE.git --ref v0.6.0

Recipes are called as recipe_fields.py calls them. Converters are read, not run: a value that is not a constant or a key
of the config file is `computed`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import recipe_fields

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "envs" / "knowledge" / "recipes.toml"
SHARED = "CONFIG_MAPPING"
# The converter's other tables, by the table of the config file that their keys are in.
SCALING = ("YARN_ROPE_SCALING_MAPPING", "MLA_ROPE_SCALING_MAPPING")


@dataclass
class Set:
    """What a converter sets."""

    fixed: dict[str, str] = field(default_factory=dict)
    mapped: dict[str, str] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("repository", type=Path)
    parser.add_argument("--ref", default="v0.6.0")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        recipe_fields._extract(options.repository, options.ref, root / "megatron" / "bridge")
        models = root / "megatron" / "bridge" / "models"
        shared, converters = read_converters(models)
        recipes, hubs, fields = call_recipes(root)
    lines = [
        "# Written by benchmarks/recipe_knowledge.py.",
        f'summary = "what recipes of Megatron-Bridge {options.ref} set, and what its converters take from a config"',
        f'release = "{options.ref}"',
        f"recipes = {json.dumps(recipes)}",
        f'from_hub = "{ranges(hubs)}"',
        "\n[shared]",
        *(f"{json.dumps(name)} = {json.dumps(key)}" for name, key in sorted(shared.items())),
        "\n[fields]",
    ]
    for name, by_value in sorted(fields.items()):
        lines.append(f"{json.dumps(name)} = {_table({value: ranges(places) for value, places in by_value.items()})}")
    for name, found in sorted(converters.items()):
        lines += [
            f"\n[converters.{name}]",
            f"fixed = {_table(dict(sorted(found.fixed.items())))}",
            f"mapped = {_table(dict(sorted(found.mapped.items())))}",
            f"computed = {json.dumps(sorted(found.computed))}",
        ]
    FILE.write_text("\n".join(lines) + "\n")
    print(f"{FILE}: {len(recipes)} recipes, {len(fields)} fields, {len(converters)} converters")


def ranges(places: Sequence[int]) -> str:
    """Sorted numbers as text: `0-3 5`."""
    parts: list[list[int]] = []
    for place in places:
        if parts and place == parts[-1][-1] + 1:
            parts[-1][1:] = [place]
        else:
            parts.append([place])
    return " ".join("-".join(map(str, part)) for part in parts)


def _table(values: Mapping[str, object]) -> str:
    return "{ " + ", ".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items()) + " }"


def call_recipes(root: Path) -> tuple[list[str], list[int], dict[str, dict[str, list[int]]]]:
    """Call each recipe; return names, places of those with a hub's model, and places by field and value."""
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, recipe_fields._Stubs(root))
    precisions = importlib.import_module(recipe_fields.MIXED_PRECISION)
    precisions.MixedPrecisionConfig = recipe_fields._Stub(  # type: ignore[attr-defined]
        "MixedPrecisionConfig", (recipe_fields.Recorded,), {}
    )
    names: list[str] = []
    hubs: list[int] = []
    fields: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, recipe in sorted(recipe_fields._recipes(root), key=lambda pair: pair[0]):
        try:
            config = recipe()
        except NotImplementedError:
            continue
        place = len(names)
        names.append(name)
        if "to_megatron_provider" in repr(config.model):
            hubs.append(place)
        for path, value in recipe_fields._fields(config, precisions):
            if path.partition(".")[0] in ("model", "optimizer", "scheduler", "ddp", "mixed_precision"):
                fields[path][_text(value)].append(place)
    return names, hubs, fields


def _text(value: object) -> str:
    """A value as the driver writes it: strings and enumerations without their quotes and their class."""
    if isinstance(value, str):
        return value[:80]
    text = str(getattr(value, "__name__", None) or repr(value))[:80]
    last = text.rpartition(".")[2]
    return last if text.replace("_", "").replace(".", "").isalnum() and not last[:1].isdigit() else text


def read_converters(models: Path) -> tuple[dict[str, str], dict[str, Set]]:
    """What all converters take from a config file, and what each sets by its architecture."""
    base = ast.parse((models / "conversion" / "model_bridge.py").read_text())
    shared = {}
    for name, pairs in _tables(base):
        prefix = "rope_scaling." if name in SCALING else ""
        if name == SHARED or name in SCALING:
            for key, target in pairs:
                shared[f"model.{target}"] = "|".join(
                    filter(None, [shared.get(f"model.{target}", ""), f"{prefix}{key}"])
                )
    converters: dict[str, Set] = {}
    for path in sorted(models.rglob("*bridge.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (architecture := _architecture(node)):
                converters[architecture] = _set_in(node)
    return shared, converters


def _tables(tree: ast.AST) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for node in ast.walk(tree):
        # A converter of one family adds its own to those of all: OTHERS + [...].
        parts = [node.value] if isinstance(node, ast.Assign) else []
        parts += [parts[0].left, parts[0].right] if parts and isinstance(parts[0], ast.BinOp) else []
        for value in (part for part in parts if isinstance(part, ast.List)):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.endswith("_MAPPING"):
                    yield target.id, [ast.literal_eval(pair) for pair in value.elts if isinstance(pair, ast.Tuple)]


def _architecture(node: ast.ClassDef) -> str:
    for call in node.decorator_list:
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            if keyword.arg == "source":
                value = keyword.value
                return value.value if isinstance(value, ast.Constant) else getattr(value, "id", "")
    return ""


def _set_in(node: ast.ClassDef) -> Set:
    """What the class' provider_bridge assigns to its provider; in a branch, a value is computed."""
    found = Set()
    for name, pairs in _tables(node):
        if name.endswith("CONFIG_MAPPING"):
            found.mapped.update({f"model.{target}": key for key, target in pairs})
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "provider_bridge":
            for statement in ast.walk(method):
                if isinstance(statement, ast.Assign):
                    for target in statement.targets:
                        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "provider":
                            _add(found, f"model.{target.attr}", statement.value, certain=statement in method.body)
    return found


def _add(found: Set, name: str, value: ast.expr, *, certain: bool) -> None:
    if certain and isinstance(value, ast.Constant):
        found.fixed[name] = value.value if isinstance(value.value, str) else repr(value.value)
    elif certain and (key := _key_of(value)):
        found.mapped[name] = key
    elif certain and isinstance(value, ast.Attribute) and ast.unparse(value).startswith("torch."):
        found.fixed[name] = value.attr
    else:
        found.fixed.pop(name, None)
        found.mapped.pop(name, None)
        found.computed.add(name)


def _key_of(value: ast.expr) -> str:
    """The key of a config file that an expression reads; empty where it is more than that."""
    if isinstance(value, ast.Attribute) and getattr(value.value, "id", "") in ("hf_config", "config", "text_config"):
        return value.attr
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "getattr" and len(value.args) == 2:
        owner, key = value.args
        if getattr(owner, "id", "") in ("hf_config", "config", "text_config") and isinstance(key, ast.Constant):
            return str(key.value)
    return ""


if __name__ == "__main__":
    main()
