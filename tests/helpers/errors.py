"""Errors that calls end with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

E = TypeVar("E", bound=BaseException)


def error_of(kind: type[E], call: Callable[..., Any], *arguments: Any, **options: Any) -> E:
    """The error that a call ends with; the test fails where it ends without one."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return caught.value
