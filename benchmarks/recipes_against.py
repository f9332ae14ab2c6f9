"""Which fields recipes set that no case covers: `envbuild certify --against` for results that a runner left.

    python benchmarks/recipes_against.py RUN --matrix certify-full --release 0.19.2 --record FILE RECIPE[=CONFIG]...

RUN has `plan.json` and `out/results.jsonl`. CONFIG is the config.json of the recipe's model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cpu_matrix import ROOT

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.expansion import expand
from envbuild.certify.fields.account import FieldAccount, account_of
from envbuild.certify.fields.against import STATES, against
from envbuild.certify.fields.knowledge import library_field, recipes, tried_fields
from envbuild.certify.judge.judge import judge
from envbuild.certify.judge.results import read_results
from envbuild_smoke.plan.reader import parse_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", type=Path)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--matrix", default="certify-full")
    parser.add_argument("--release", required=True, help="of megatron-core")
    parser.add_argument("--record", type=Path, required=True)
    given = parser.parse_args()
    account = account_in(given.run, given.matrix, given.release)
    of_recipes = {field for name in recipes().fields if (field := library_field(name, account))}
    hub = recipes().hub_fields() & set(_names(account))
    model = {name for name in of_recipes | hub if name.startswith("model.")}
    blind = model & account.blind.keys()
    record = {
        "megatron-core": given.release,
        "matrix": given.matrix,
        "fields": {kind: len(getattr(account, kind)) for kind in FieldAccount.model_fields},
        "model_fields_that_recipes_set": len(model),
        "of_them_blind": sorted(blind),
        "against": {},
    }
    for words in given.recipes:
        name, _, config = words.partition("=")
        compared = against(account, name, recipes(), Path(config) if config else None, tried_fields())
        record["against"][name] = {  # type: ignore[index]
            state: [str(field) for field in compared.in_state(state)] for state in STATES
        }
        print(f"{name}: {', '.join(f'{len(compared.in_state(state))} {state}' for state in STATES)}")
    print(f"blind: {len(blind)} of {len(model)} fields of the model that recipes set ({len(blind) / len(model):.0%})")
    given.record.write_text(json.dumps(record, indent=1) + "\n")


def account_in(run: Path, matrix_name: str, release: str) -> FieldAccount:
    """The account of the cases that passed in a run."""
    plan = parse_plan((run / "plan.json").read_bytes())
    matrix = Catalog.open(ROOT).matrix(matrix_name)
    planned = {case.id for case in plan.cases}
    expanded = expand(matrix, matrix_name, Capabilities(device=Device.CPU))
    cases = tuple(case for case in expanded if case.id in planned)
    verdicts = judge(cases, matrix, read_results(run / "out" / "results.jsonl", plan), plan)
    account = account_of([each for each in verdicts if each.passed], release, recipes(), tried_fields())
    assert account is not None, "the results have no configuration"
    return account


def _names(account: FieldAccount) -> list[str]:
    return [name for kind in FieldAccount.model_fields for name in getattr(account, kind)]


if __name__ == "__main__":
    main()
