"""Exceptions as one line of text."""

import traceback


def error_line(error: BaseException) -> str:
    """Return "Type: message" in one line: the first of the message, since hints come after the cause."""
    text = "".join(traceback.format_exception_only(type(error), error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        # The place comes before.
        lines = [line for line in lines if line.startswith(type(error).__name__)] or lines[-1:]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__
