"""What the content of a file shows: credentials and paths of the building machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Files of which more is not read at once: credentials are text, and short.
SCANNED_BYTES = 2 << 20

# By what a hit is called: how it begins, as its issuer writes it, and what follows. It begins no word within another.
_TOKENS: tuple[tuple[str, bytes, bytes], ...] = (
    ("a private key", b"-----BEGIN ", rb"(?:[A-Z0-9]+ )*PRIVATE KEY-----[\r\n\\n]+[\w+/=:,\s-]{40}"),
    ("an AWS access key", b"AKIA", rb"(?!IOSFODNN7EXAMPLE)[A-Z2-7]{16}(?![A-Za-z0-9+/=_])"),
    *(("a GitHub token", b"gh%c_" % kind, rb"[A-Za-z0-9]{36,255}(?![A-Za-z0-9])") for kind in b"pousr"),
    ("a GitHub token", b"github_pat_", rb"[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"),
    ("a GitLab token", b"glpat-", rb"[A-Za-z0-9_-]{20,}"),
    ("a Hugging Face token", b"hf_", rb"[A-Za-z0-9]{34}(?![A-Za-z0-9_])"),
    ("an NGC key", b"nvapi-", rb"[A-Za-z0-9_-]{60,}"),
    ("a PyPI token", b"pypi-AgE", rb"[A-Za-z0-9_-]{50,}"),
    *(("a Slack token", b"xox%c-" % kind, rb"[0-9]{8,}-[A-Za-z0-9-]{10,}") for kind in b"abprs"),
    ("a Google API key", b"AIza", rb"[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
    ("a Google OAuth token", b"ya29.", rb"[A-Za-z0-9_-]{60,}"),
)
_PATTERNS = [(what, begins, re.compile(follows)) for what, begins, follows in _TOKENS]
_WITHIN_A_WORD = re.compile(rb"[A-Za-z0-9_+/=]")
# Fewer distinct letters and digits are an example in documentation.
_DISTINCT = 8

# Files that programs read credentials from, by name or by the end of the path; and what makes them hold some.
_URL = re.compile(rb"[a-z][a-z0-9+.-]*://[^/\s:@\"']*:[^/\s@\"'$]+@[^/\s\"']")
_FILES: tuple[tuple[re.Pattern[str], re.Pattern[bytes]], ...] = (
    (re.compile(r"(^|/)[._]netrc$|(^|/)etc/apt/auth\.conf(\.d/.*)?$"), re.compile(rb"\bpassword\s+\S+")),
    (re.compile(r"(^|/)\.pypirc$"), re.compile(rb"(?m)^\s*password\s*[:=]\s*\S+")),
    (re.compile(r"(^|/)(pip\.conf|uv\.toml|direct_url\.json|\.gitconfig|\.condarc|\.npmrc|sources\.list)$"), _URL),
    (re.compile(r"(^|/)etc/apt/sources\.list\.d/[^/]+$|(^|/)etc/(environment|gitconfig|profile\.d/.*)$"), _URL),
    (re.compile(r"(^|/)\.git-credentials$|(^|/)\.git/config$"), _URL),
    (re.compile(r"(^|/)\.npmrc$"), re.compile(rb"_(authToken|password)\s*=\s*[^\s$]")),
    (
        re.compile(r"(^|/)(\.docker/config\.json|\.dockercfg)$"),
        re.compile(rb"\"(auth|identitytoken)\"\s*:\s*\"[^\"]+\""),
    ),
    (re.compile(r"(^|/)\.aws/credentials$"), re.compile(rb"aws_secret_access_key\s*=\s*\S+")),
    (re.compile(r"(^|/)application_default_credentials\.json$"), re.compile(rb"\"(refresh_token|private_key)\"")),
    (re.compile(r"(^|/)\.ssh/id_[a-z0-9]+$"), re.compile(rb"PRIVATE KEY")),
    (re.compile(r"(^|/)(\.cache/huggingface|\.huggingface)/token$"), re.compile(rb"\S")),
)
_SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|PRIVATE_KEY)(_|$)")


def secrets(path: str, content: bytes) -> list[str]:
    """The kinds of credentials in a file, never the credentials themselves."""
    kinds = [what for what, begins, follows in _PATTERNS if _has_token(content, begins, follows)]
    if not kinds and any(name.search(path) and password.search(content) for name, password in _FILES):
        return ["a password"]
    return list(dict.fromkeys(kinds))


def _has_token(content: bytes, begins: bytes, follows: re.Pattern[bytes]) -> bool:
    # Finding the fixed beginning is many times faster than a pattern over everything.
    at = content.find(begins)
    while at >= 0:
        match = follows.match(content, at + len(begins))
        inside = at > 0 and _WITHIN_A_WORD.match(content, at - 1) and not begins.startswith(b"-")
        if match and not inside and len(set(match[0])) > _DISTINCT:
            return True
        at = content.find(begins, at + 1)
    return False


def secret_variables(values: Mapping[str, str]) -> list[str]:
    """The variables (or labels) that hold a credential, by name."""
    return [name for name, value in sorted(values.items()) if value and _is_secret(name, value.encode())]


def _is_secret(name: str, value: bytes) -> bool:
    return bool(_SECRET_VARIABLE.search(name.upper()) or _URL.search(value) or secrets(name, value))


class PathSearch:
    """Searches a stream of content for paths of the building machine, piece by piece."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._wanted = [path.encode() for path in paths]
        self._overlap = max((len(path) for path in self._wanted), default=1)
        self._before = b""
        self.paths: set[str] = set()

    def feed(self, piece: bytes) -> None:
        data = self._before + piece
        for path in self._wanted:
            if _names(path, data):
                self.paths.add(path.decode())
        # The end is kept: a path may lie across two pieces.
        self._before = data[-self._overlap :]

    def end(self) -> None:
        """After the last piece."""
        self.paths |= {path.decode() for path in self._wanted if self._before.endswith(path)}


def _names(path: bytes, data: bytes) -> bool:
    """Whether ``data`` names a path, and not only the beginning of a longer one; at its end that is not known."""
    at = data.find(path)
    while at >= 0:
        after = data[at + len(path) : at + len(path) + 1]
        if after and not (after.isalnum() or after in (b"_", b"-")):
            return True
        at = data.find(path, at + 1)
    return False
