"""Conflicts of a project's own: they may take cases away, and then no certificate calls its matrix whole."""

import shutil
from dataclasses import replace

import pytest
from helpers.certify_world import World, statement_of

from envbuild.catalog import catalog
from envbuild.catalog.catalog import Catalog, digest_without_summary
from envbuild.catalog.data import data_root

TP2 = "gpt-fp32-tp2"
MINE = """
summary = "ours"
packages = { megatron-core = ">=0.1" }
evidence = "seen"
fix = "Do not."
cases = [{ tensor = ">1" }]
shown_by = { matrix = "m", case = "c" }
"""


@pytest.fixture
def mine(world: World) -> World:
    """A project with a conflict about cases with tensor parallelism."""
    folder = world.project / "envs" / "conflicts"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(MINE)
    world.selection = replace(world.selection, catalog=Catalog.open(world.project))
    return world


def outcome(done):
    """Whether the matrix is whole, the cases, and the entry of the project with its cases that are excused."""
    predicate = done.statement.predicate
    (entry,) = [entry for entry in predicate.not_vouched if entry.name == "mine"]
    return predicate.whole_matrix, {case.id for case in predicate.cases}, entry


def test_case_that_a_projects_conflict_takes_away_makes_a_part(mine):
    whole, cases, entry = outcome(mine.certify(only=()))
    assert (whole, TP2 in cases) == (False, False)
    assert [(case.id, case.result) for case in entry.cases if case.id == TP2] == [(TP2, "not run")]
    assert entry.is_shipped is False
    shipped = [entry for entry in mine.certify(only=()).statement.predicate.not_vouched if entry.name != "mine"]
    assert shipped
    assert all(entry.is_shipped and entry.digest for entry in shipped)


def test_conflict_that_is_put_into_a_checkout_of_envbuild_is_not_shipped(mine, monkeypatch):
    """There the project's envs/ is the shipped one."""
    shutil.copytree(data_root() / "envs", mine.project / "envs", dirs_exist_ok=True)
    monkeypatch.setattr(catalog, "data_root", lambda: mine.project)
    mine.selection = replace(mine.selection, catalog=Catalog.open(mine.project))
    assert mine.selection.catalog.ships("conflicts", "mine")
    whole, cases, entry = outcome(mine.certify(only=()))
    assert (whole, TP2 in cases, entry.is_shipped) == (False, False, False)


@pytest.mark.parametrize(("scale", "whole"), [(1.1, False), (1.0, True)])
def test_case_that_runs_is_excused_by_no_conflict_of_a_project(mine, scale, whole):
    mine.faults = {"scale": {TP2: scale}}
    assert outcome(mine.certify(only=(), run_known_wrong=True))[0] is whole


def test_conflict_of_a_project_about_no_case_of_the_matrix_takes_nothing_away(mine):
    path = mine.project / "envs/conflicts/mine.toml"
    path.write_text(MINE.replace('tensor = ">1"', 'recompute = "full"'))
    whole, cases, entry = outcome(mine.certify(only=()))
    assert (whole, TP2 in cases, entry.cases) == (True, True, ())
    assert entry.digest == digest_without_summary(mine.selection.catalog.conflicts["mine"])


def test_certificate_binds_each_entry_and_names_the_projects_own(mine, command, capsys):
    assert command() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "a part of matrix certify-quick, which publishing wants whole" in lines
    assert "left out by the project's own envs/conflicts/: mine" in lines
    entries = statement_of(mine.certificates()[0])["predicate"]["not_vouched"]
    conflicts = mine.selection.catalog.conflicts
    assert [entry["digest"] for entry in entries] == [
        digest_without_summary(conflicts[entry["name"]]) for entry in entries
    ]
