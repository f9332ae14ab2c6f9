"""The referrers API before a registry that lacks it, as the OCI distribution-spec 1.1 has it ("Listing Referrers").

No registry with this API can be had from Debian, PyPI or npm; docker's registry behind this is the next best.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helpers.fault_proxy import FaultProxy

from envbuild.core.digests import sha256_bytes


@dataclass
class ReferrersApi:
    """Keeps what was pushed with a subject; pages of two entries.

    Attributes:
        referrers: descriptors by the digest of their subject.
    """

    referrers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def put_before(self, proxy: FaultProxy) -> None:
        proxy.own, proxy.seen = self.own, self.seen

    def own(self, method: str, path: str) -> bytes | None:
        if method != "GET" or "/referrers/" not in path:
            return None
        entries = self.referrers.get(path.rpartition("/")[2].partition("?")[0], [])
        return json.dumps(
            {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": entries}
        ).encode()

    def seen(self, method: str, path: str, body: bytes, status: int) -> Mapping[str, str]:
        if method == "DELETE" and status == 202:
            gone = path.rpartition("/")[2]
            for known in self.referrers.values():
                known[:] = [entry for entry in known if entry["digest"] != gone]
        if method != "PUT" or "/manifests/" not in path or status != 201:
            return {}
        manifest = json.loads(body)
        if "subject" not in manifest:
            return {}
        subject = manifest["subject"]["digest"]
        entry = {
            "mediaType": manifest["mediaType"],
            "digest": sha256_bytes(body),
            "size": len(body),
            "artifactType": manifest.get("artifactType") or manifest["config"]["mediaType"],
            "annotations": manifest.get("annotations", {}),
        }
        known = self.referrers.setdefault(subject, [])
        if entry not in known:
            known.append(entry)
        return {"OCI-Subject": subject}
