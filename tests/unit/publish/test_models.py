"""Publications: their JSON, read strictly, and when one counts as certified."""

import json

import pytest
from helpers.publications import MOMENT, make_publication
from pydantic import ValidationError

from envbuild.core.errors import CheckRefusedError
from envbuild.publish.models import Revocation, read_publication


def test_a_publication_is_read_back_as_it_was_written():
    publication = make_publication(gpus=("90",), revoked=Revocation(reason="a wrong base", at=MOMENT))
    assert read_publication(publication.canonical(), "the index") == publication


def test_the_json_is_one_line_with_sorted_keys():
    text = make_publication().canonical().decode()
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert "\n" not in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"schema": "envbuild.publication/3"}, "schema"),
        ({"colour": "red"}, "colour is unknown"),
        ({"oci_digest": "sha256:12"}, "oci_digest"),
        ({"size_bytes": "12"}, "size_bytes"),
        ({"tag": "no/slash"}, "tag"),
        ({"published_at": "2026-13-01T00:00:00Z"}, "published_at"),
        ({"keyid": None}, "all there"),
    ],
)
def test_another_form_is_refused_with_its_key(change, named):
    fields = json.loads(make_publication().canonical()) | change
    with pytest.raises(CheckRefusedError) as caught:
        read_publication(json.dumps(fields).encode(), "the index of oci://host/repository")
    assert "the index of oci://host/repository" in caught.value.what
    assert named in caught.value.why


@pytest.mark.parametrize("data", [b"", b"{", b'{"stack": "a", "stack": "b"}'])
def test_what_is_not_json_is_refused(data):
    with pytest.raises(CheckRefusedError):
        read_publication(data, "the index")


def test_certified_means_with_a_certificate_and_not_revoked():
    nothing = {"certificate_digest": None, "keyid": None, "certified_at": None, "measured_at": None}
    assert make_publication().certified
    assert not make_publication(**nothing).certified
    assert not make_publication(revoked=Revocation(reason="wrong", at=MOMENT)).certified
    with pytest.raises(ValidationError):
        make_publication(certificate_digest=None)
