"""Connections to servers, kept open: with the proxy and the trust of this machine."""

from __future__ import annotations

import functools
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.store.transfer import CHUNK_BYTES

if TYPE_CHECKING:
    from urllib3 import PoolManager


class Pools:
    """A pool of connections for each proxy; threads may share it."""

    def __init__(self, ca_bundle: Path | None) -> None:
        self._ca_bundle = ca_bundle
        self._lock = threading.Lock()
        self._pools: dict[str, PoolManager] = {}

    def pool(self, url: str) -> PoolManager:
        """The pool for an address: there is one for each proxy that the environment names."""
        from urllib3 import PoolManager, ProxyManager

        parts = urllib.parse.urlsplit(url)
        # urllib3 does not read HTTPS_PROXY and NO_PROXY; the standard library does.
        proxy = "" if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme, "")
        with self._lock:
            if proxy not in self._pools:
                # What cannot be reached through TLS that is trusted, is not reached.
                trust = str(self._ca_bundle) if self._ca_bundle else None
                # blocksize: a file goes out in pieces of 16 kB otherwise, which takes twice the time on a fast network.
                make = functools.partial(ProxyManager, proxy) if proxy else PoolManager
                self._pools[proxy] = make(maxsize=8, ca_certs=trust, blocksize=CHUNK_BYTES)
            return self._pools[proxy]
