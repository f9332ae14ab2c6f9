"""Surveys in the store: a layer is read once, however many images have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.digests import digest_of
from envbuild.core.files import write_atomic
from envbuild.core.progress import Reporter
from envbuild.image.layers import Layer
from envbuild.image.surveys.survey import FORMAT, Survey, survey
from envbuild.image.tars import damage_refused, read_members
from envbuild.store.local import LocalStore

KIND = "layer-surveys"
SURVEY_FILE = "survey.json"
LISTING_FILE = "entries.jsonl"


@dataclass(frozen=True, kw_only=True)
class KeptSurvey:
    """What is known about a layer, and the file with its entries."""

    layer: Layer
    survey: Survey
    listing: Path


def survey_layer(layer: Layer, places: Sequence[str], store: LocalStore, reporter: Reporter) -> KeptSurvey:
    """The survey of a layer; made when the store does not have it.

    Raises:
        CheckRefusedError: the layer is damaged.
    """
    key = digest_of({"format": FORMAT, "layer": layer.record.diff_id, "places": tuple(sorted(places))})

    def build(folder: Path) -> None:
        with reporter.step(f"read layer {layer.record.name}"), damage_refused(layer.file):
            found = survey(read_members(layer.file), folder / LISTING_FILE, places, folder.parent)
        write_atomic(folder / SURVEY_FILE, found.model_dump_json(indent=1) + "\n")

    entry = store.get_or_build(KIND, key, build)
    found = Survey.model_validate_json((entry.path / SURVEY_FILE).read_bytes())
    return KeptSurvey(layer=layer, survey=found, listing=entry.path / LISTING_FILE)
