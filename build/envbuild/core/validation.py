"""What a file is not, in words: pydantic's findings about JSON that another envbuild, or nobody, wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

NAMED = 3


def in_words(error: ValidationError) -> str:
    """The first findings, each with the key that it is about."""
    found = error.errors(include_url=False)
    told = [_words(item) for item in found[:NAMED]]
    more = len(found) - NAMED
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _words(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    value = item["input"]
    match item["type"]:
        case "json_invalid":
            return "it is no JSON, or is cut off"
        case "missing":
            return f"it has no {key}"
        case "extra_forbidden":
            return f"its {key} is not known here (another version of envbuild may have written it)"
        case "value_error":
            return f"{key}: {item['ctx']['error']}" if key else str(item["ctx"]["error"])
        case _:
            shown = f" ({value!r:.60})" if not isinstance(value, dict | list) else ""
            return f"its {key} is not what it should be{shown}" if key else f"it is not what it should be{shown}"
