"""The docs' list of axes is that of the table."""

from __future__ import annotations

import re
import textwrap
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from envbuild.catalog.data import data_root
from envbuild_smoke.plan.axes import TABLE, Axis, CaseAxes, Layout, Settings, Training

PAGE = "docs/reference/certify.md"
HINTS = {name: hint for kind in (Layout, CaseAxes, Training, Settings) for name, hint in get_type_hints(kind).items()}


def shown(axis: Axis) -> str:
    """The axis in the docs: its name, and the words that it has in IDs of cases."""
    kinds = [kind for kind in (HINTS[axis.name], *get_args(HINTS[axis.name])) if get_origin(kind) is Literal]
    values = [value for kind in kinds for value in get_args(kind) if value != axis.default] or [True, False]
    words = [re.sub(r"\{.*\}", "N", axis.word)] if isinstance(axis.word, str) and values == [True, False] else []
    words = words or [axis.word_for(value) for value in values]
    named = " or ".join(f"`{word}`" for word in words if word)
    return f"`{axis.name}` ({named})" if named else f"`{axis.name}`"


@pytest.mark.parametrize("own_baseline", [False, True])
def test_docs_list_each_axis_as_the_table_has_it(own_baseline: bool) -> None:
    listed = ", ".join(shown(axis) for axis in TABLE if axis.own_baseline is own_baseline)
    lines = textwrap.fill(listed, 120, break_on_hyphens=False, break_long_words=False)
    assert f"\n\n{lines}.\n\n" in (data_root() / PAGE).read_text(), f"{PAGE} needs:\n{lines}."
