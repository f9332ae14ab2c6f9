"""Describes pydantic's findings about JSON files that another version of envbuild, or another program, wrote."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import StringConstraints, ValidationError

from envbuild.core.digests import DIGEST_PATTERN

# image-spec, descriptor.md, "Registered algorithms", also has sha512; no builder or registry is known to write it.
Digest = Annotated[str, StringConstraints(pattern=rf"^{DIGEST_PATTERN}$")]
NAMED = 3


def describe_errors(error: ValidationError) -> str:
    """The first findings, each with the key that it is about."""
    problems = error.errors(include_url=False)
    described = [_describe(problem) for problem in problems[:NAMED]]
    more = len(problems) - NAMED
    return "; ".join(described) + (f"; and {more} more" if more > 0 else "")


def _describe(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    value = problem["input"]
    match problem["type"]:
        case "json_invalid":
            return "it is not JSON, or is truncated"
        case "missing":
            return f"{key} is missing"
        case "extra_forbidden":
            return f"the key {key} is unknown (another version of envbuild may have written it)"
        case "value_error":
            # The message itself has "Value error, " in front.
            return f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
        case _:
            shown = f" ({value!r:.60})" if not isinstance(value, dict | list) else ""
            return f"{key} has a wrong value{shown}" if key else f"it has a wrong value{shown}"
