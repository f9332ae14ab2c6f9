"""Every recipe of fp8 next to its measured bands, on two GPUs of SM 90; by hand.

mkdir -p envs/matrices && python benchmarks/fp8_recipes.py matrix > envs/matrices/fp8-recipes.toml   # in a project
envbuild certify --stack mcore --target h200 --matrix fp8-recipes --in venv --venv VENV --max-gpus 2 --fresh --json \
  | python benchmarks/fp8_recipes.py judged

`judged` prints of each case how far it is from what it is compared with, as a part of its band, and exits 1 where a
healthy case is refused. With delayed scales the driver computes the first step once before it trains.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

import tomlkit
from cpu_matrix import ROOT

# Delayed scales are shared by tensor- and data-parallel ranks; of values themselves each rank has its own.
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "delayed": [{}, {"data": 2}, {"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}],
    "tensorwise": [{}, {"data": 2}, {"pipeline": 2}],
    "blockwise": [{}, {"data": 2}, {"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}],
}


def matrix() -> str:
    """Return certify-full with these cases alone, of its model with Transformer Engine's layers."""
    document = tomlkit.parse((ROOT / "envs" / "matrices" / "certify-full.toml").read_text(encoding="utf-8")).unwrap()
    rows = [
        {"model": "te", "precision": "fp8", "fp8_recipe": recipe, "devices": ["cuda"], "compare_weights": True, **row}
        for recipe, layouts in LAYOUTS.items()
        for row in layouts
    ]
    kept = {name: value for name, value in document.items() if name != "bandwidth"}
    return tomlkit.dumps({**kept, "models": {"te": document["models"]["te"]}, "cases": rows})


def judged(document: dict[str, Any]) -> int:
    """Print the cases; return 1 where one did not pass."""
    cases = (document.get("error") or document)["cases"]
    for case in cases:
        print(f"{case['id']:36} {'passed' if case['passed'] else 'REFUSED'}")
        compared = [case["reference"]] if case["reference"] else [case]
        for numbers, name in product(compared, ("loss", "grad_norm", "activations", "gradients", "weights")):
            measured = numbers["largest_relative_difference"].get(name)
            allowed = numbers["tolerance"].get(name)
            if measured is not None and allowed:
                print(f"    {name:12} {measured:.2e} of {allowed:.2e}: {measured / allowed:.0%}")
        for problem in case["problems"]:
            print(f"    {problem['check']}: {problem['text']}")
    return int(not cases or not all(case["passed"] for case in cases))


if __name__ == "__main__":
    if sys.argv[1:] == ["matrix"]:
        print(matrix(), end="")
    elif sys.argv[1:] == ["judged"]:
        sys.exit(judged(json.load(sys.stdin)))
    else:
        sys.exit(__doc__)
