"""The list of shipped conflicts has those of envs/conflicts/ that excuse cases, and no other."""

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.shipped_conflicts import SHIPPED, excuse_digest


def test_list_has_the_digest_of_each_shipped_conflict():
    conflicts = Catalog.shipped().conflicts.items()
    excusing = {name: excuse_digest(entry) for name, entry in conflicts if entry.cases}
    assert {name: digest for name, digest in excusing.items() if digest not in SHIPPED} == {}
    assert set(excusing.values()) >= SHIPPED


def test_digest_is_of_versions_and_cases_alone():
    entry = Catalog.shipped().conflicts["gathered-logits"]
    assert excuse_digest(entry.model_copy(update={"summary": "x", "evidence": "x", "fix": "x"})) in SHIPPED
    for changed in ({"cases": ({"tensor": ">1"},)}, {"packages": {"megatron-core": ">=0"}}):
        assert excuse_digest(entry.model_copy(update=changed)) not in SHIPPED
