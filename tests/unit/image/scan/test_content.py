"""Credentials are found by what their issuers begin them with; what only looks like one is left alone."""

import pytest
from helpers.scans import AWS_KEY, HF_TOKEN, PRIVATE_KEY

from envbuild.image.scan.content import PathSearch, secret_variables, secrets

WORD = b"aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA2bC4dE6f"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"key = " + AWS_KEY + b"\n", "an AWS access key"),
        (b"x" + PRIVATE_KEY, "a private key"),
        (b'{"k": "' + PRIVATE_KEY.replace(b"\n", b"\\n") + b'"}', "a private key"),
        (b"token: " + HF_TOKEN, "a Hugging Face token"),
        (b"gh" + b"p_" + WORD, "a GitHub token"),
        (b"github" + b"_pat_" + WORD[:22] + b"_" + WORD + WORD[:19], "a GitHub token"),
        (b"gl" + b"pat-" + WORD[:20], "a GitLab token"),
        (b"nv" + b"api-" + WORD + WORD, "an NGC key"),
        (b"pypi" + b"-AgE" + WORD + WORD, "a PyPI token"),
        (b"xox" + b"b-123456789012-" + WORD[:20], "a Slack token"),
        (b"AI" + b"za" + WORD[:35] + b" ", "a Google API key"),
        (b"ya" + b"29." + WORD + WORD, "a Google OAuth token"),
    ],
)
def test_token_is_found(content, what):
    assert secrets("srv/notes.txt", content) == [what]


@pytest.mark.parametrize(
    "content",
    [
        b"AKIA" + b"IOSFODNN7EXAMPLE",
        b"AKIA" + b"A" * 16,
        b"x" + AWS_KEY,
        b"aa" + b"AAAA" + AWS_KEY + b"BBBB",
        b"def hf_hub_download_with_a_long_name_of_a_function():",
        b"-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
        b"'-----BEGIN RSA PRIVATE KEY-----' in text",
        b"ghp_" + b"x" * 36,
        b"https://user:password@host/ in the docs",
        b"",
    ],
)
def test_what_looks_like_one_is_left_alone(content):
    assert secrets("usr/share/doc/readme.txt", content) == []


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("root/.netrc", b"machine x login y password z\n"),
        ("root/.pypirc", b"[pypi]\nusername = u\npassword = p\n"),
        ("etc/pip.conf", b"[global]\nindex-url = https://u:p@index.invalid/simple\n"),
        ("root/.config/uv/uv.toml", b'index-url = "https://u:p@index.invalid/simple"\n'),
        ("opt/v/x-1.dist-info/direct_url.json", b'{"url": "https://u:p@index.invalid/x.whl"}'),
        ("root/.docker/config.json", b'{"auths": {"r": {"auth": "dTpw"}}}'),
        ("home/u/.aws/credentials", b"[default]\naws_secret_access_key = x/y\n"),
        ("root/.git-credentials", b"https://u:p@git.invalid\n"),
        ("etc/apt/auth.conf.d/x.conf", b"machine x login y password z\n"),
        ("root/.npmrc", b"//registry.invalid/:_authToken=abc\n"),
        ("root/.cache/huggingface/token", b"anything"),
    ],
)
def test_file_that_programs_take_passwords_from(path, content):
    assert secrets(path, content) == ["a password"]
    assert secrets("usr/share/doc/example.txt", content) == []


def test_such_a_file_without_a_password_is_fine():
    assert secrets("etc/pip.conf", b"[global]\nindex-url = https://index.invalid/simple\n") == []
    assert secrets("etc/pip.conf", b"[global]\nindex-url = https://u:${TOKEN}@index.invalid/simple\n") == []


def test_variables_that_hold_credentials_by_name_or_by_value():
    values = {
        "PATH": "/bin",
        "HF_TOKEN": "x",
        "EMPTY_TOKEN": "",
        "UV_INDEX": "https://u:p@h/s",
        "TOKENIZERS_PARALLELISM": "1",
    }
    values |= {"MY_API_KEY": "k", "NOTE": AWS_KEY.decode()}
    assert secret_variables(values) == ["HF_TOKEN", "MY_API_KEY", "NOTE", "UV_INDEX"]


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        ([b"x /data/store/y"], {"/data/store"}),
        ([b"x /data/st", b"ore/y"], {"/data/store"}),
        ([b"/data/store"], {"/data/store"}),
        ([b"/data/storeroom /data/store-2 /data/store_3"], set()),
        ([b"/data/storeroom", b" /data/store\0"], {"/data/store"}),
    ],
)
def test_places_are_whole_paths_also_across_pieces(pieces, found):
    looker = PathSearch(["/data/store", "/elsewhere"])
    for piece in pieces:
        looker.feed(piece)
    looker.end()
    assert looker.paths == found
