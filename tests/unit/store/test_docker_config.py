"""Where registries' credentials are found, and that they are shown to nobody."""

import base64
import json
import os

import pytest
from helpers.stores import write_docker_config, write_helper

from envbuild.core.errors import MachineError
from envbuild.store.docker_config import NOTHING, Credentials, credentials_for

HOST = "registry.example.org:5000"


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    """The variables of a user who is logged in nowhere."""
    return {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}


def found(environ, host=HOST, repository="") -> tuple[str, str] | None:
    credentials = credentials_for(host, environ, repository)
    return None if credentials is None else (credentials.user, credentials.secret)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"auth": encoded("ali:open:sesame")}, ("ali", "open:sesame")),
        ({"username": "ali", "password": "sesame"}, ("ali", "sesame")),
        ({"auth": encoded("ali:sesame\0\0")}, ("ali", "sesame")),
        ({"identitytoken": "t"}, ("<token>", "t")),
        ({"auth": encoded("00000000:x"), "identitytoken": "t"}, ("<token>", "t")),
        ({}, None),
        ({"auth": ""}, None),
    ],
)
def test_forms_of_an_entry(environ, tmp_path, entry, expected):
    environ |= write_docker_config(tmp_path / "docker", {"auths": {HOST: entry}})
    assert found(environ) == expected


@pytest.mark.parametrize("name", [HOST, f"https://{HOST}", f"http://{HOST}", f"https://{HOST}/v1/"])
def test_names_of_a_registry(environ, tmp_path, name):
    environ |= write_docker_config(tmp_path / "docker", {"auths": {name: {"auth": encoded("a:b")}}})
    assert found(environ) == ("a", "b")
    assert found(environ, "registry.example.org") is None


@pytest.mark.parametrize(
    ("repository", "user"),
    [
        ("team/images/nemo", "image"),
        ("team/images/mcore", "folder"),
        ("team", "team"),
        ("team/imagesets", "team"),
        ("teams/images", "host"),
    ],
)
def test_the_nearest_repository_counts(environ, tmp_path, repository, user):
    keys = {"": "host", "/team": "team", "/team/images": "folder", "/team/images/nemo": "image"}
    auths = {HOST + key: {"auth": encoded(f"{name}:x")} for key, name in keys.items()}
    environ |= write_docker_config(tmp_path / "docker", {"auths": auths})
    assert found(environ, HOST, repository) == (user, "x")


@pytest.mark.parametrize(("repository", "user"), [("team/images", "c"), ("other", "a")])
def test_docker_hub_has_a_name_of_its_own(environ, tmp_path, repository, user):
    auths = {"https://index.docker.io/v1/": {"auth": encoded("a:b")}, "docker.io/team": {"auth": encoded("c:b")}}
    environ |= write_docker_config(tmp_path / "docker", {"auths": auths})
    for host in ("docker.io", "registry-1.docker.io"):
        assert found(environ, host, repository) == (user, "b")


def test_places_in_order(environ, tmp_path):
    """From the last one to the first: each has another user."""
    places = {
        ".docker/config.json": {},
        ".config/containers/auth.json": {},
        "own/containers/auth.json": {"XDG_CONFIG_HOME": "own"},
        "run/containers/auth.json": {"XDG_RUNTIME_DIR": "run"},
        "named/config.json": {"DOCKER_CONFIG": "named"},
        "file.json": {"REGISTRY_AUTH_FILE": "file.json"},
    }
    for place, variables in places.items():
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"auths": {HOST: {"auth": encoded(f"{place}:x")}}}))
        environ |= {name: str(tmp_path / value) for name, value in variables.items()}
        assert found(environ) == (place, "x")


def test_another_users_runtime_directory_is_passed_over(environ, tmp_path, monkeypatch):
    """Root may enter every directory, so the system's answer is given here."""
    environ |= write_docker_config(tmp_path / "docker", {"auths": {HOST: {"auth": encoded("own:x")}}})
    environ["HOME"] = str(tmp_path)
    (tmp_path / "docker").rename(tmp_path / ".docker")
    del environ["DOCKER_CONFIG"]
    theirs = tmp_path / "run/containers/auth.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(json.dumps({"auths": {HOST: {"auth": encoded("theirs:x")}}}))
    environ["XDG_RUNTIME_DIR"] = str(tmp_path / "run")
    assert found(environ) == ("theirs", "x")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert found(environ) == ("own", "x")


@pytest.mark.parametrize("key", ["credsStore", "credHelpers"])
def test_helper_gives_the_credentials(environ, tmp_path, key):
    environ["PATH"] = write_helper(
        tmp_path / "bin", "safe", f'cat >{tmp_path}/asked; echo \'{{"Username": "ali", "Secret": "sesame"}}\''
    )
    value = "safe" if key == "credsStore" else {HOST: "safe"}
    environ |= write_docker_config(tmp_path / "docker", {key: value, "auths": {HOST: {}}})
    credentials = credentials_for(HOST, environ)
    assert credentials == Credentials(user="ali", secret="sesame", source="the helper docker-credential-safe")
    assert (tmp_path / "asked").read_text() == HOST
    assert "sesame" not in repr(credentials)


def test_helper_without_credentials_gives_none(environ, tmp_path):
    environ["PATH"] = write_helper(tmp_path / "bin", "safe", f"echo '{NOTHING}'; exit 1")
    environ |= write_docker_config(tmp_path / "docker", {"credsStore": "safe"})
    assert found(environ) is None


@pytest.mark.parametrize("body", ["echo sesame-open; exit 1", "echo sesame-open", 'echo \'{"Secret": "sesame-open"}\''])
def test_helper_that_fails_is_an_error_without_its_output(environ, tmp_path, body):
    environ["PATH"] = write_helper(tmp_path / "bin", "safe", body)
    environ |= write_docker_config(tmp_path / "docker", {"credHelpers": {HOST: "safe"}})
    with pytest.raises(MachineError, match="docker-credential-safe has no credentials") as refused:
        credentials_for(HOST, environ)
    assert "sesame-open" not in str(refused.value.as_json())


def test_a_helper_that_is_not_there_is_named(environ, tmp_path):
    environ |= write_docker_config(tmp_path / "docker", {"credHelpers": {HOST: "absent"}})
    with pytest.raises(MachineError, match="docker-credential-absent is not installed"):
        credentials_for(HOST, environ)


@pytest.mark.parametrize("text", ["{", "\xff"])
def test_a_file_that_is_no_json_is_named(environ, tmp_path, text):
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text(text, encoding="latin-1")
    with pytest.raises(MachineError, match=r"\.docker/config\.json cannot be read"):
        credentials_for(HOST, environ)


def test_an_auth_that_is_no_base64_is_named(environ, tmp_path):
    environ |= write_docker_config(tmp_path / "docker", {"auths": {HOST: {"auth": "a"}}})
    with pytest.raises(MachineError, match="cannot be read"):
        credentials_for(HOST, environ)
