"""Slurm's accounting: slurmdbd, and the MariaDB that it writes to, on ports and folders of the tests."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from helpers.services import Service, library_folders, unpacked

DATABASE = ("mariadb-server-core", "mariadb-client-core", "libmariadb3", "libaio1", "liburing2")
PACKAGES = (*DATABASE, "slurmdbd", "slurm-wlm-mysql-plugin")
CONFIGURATION = """\
AuthType=auth/munge
AuthInfo=socket={munge}
DbdHost=localhost
DbdPort={port}
SlurmUser={user}
PidFile={folder}/slurmdbd.pid
PluginDir={plugins}:{own}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser={user}
StorageLoc=accounting
"""
# Of slurm.conf. Jobs are forgotten at once, and belong to an account.
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={munge}
AccountingStorageEnforce=associations
MinJobAge=2
"""


def accounting_programs(folder: Path) -> Path:
    """MariaDB and slurmdbd of Debian's packages."""
    return unpacked(folder, PACKAGES)


@contextlib.contextmanager
def accounting(
    programs: Path, folder: Path, munge: str, plugins: Path, environment: Mapping[str, str]
) -> Iterator[int]:
    """A running slurmdbd; its port.

    Args:
        munge: the socket of munge.
        plugins: the folder of Slurm's own plugins.
        environment: of Slurm's programs.
    """
    with contextlib.ExitStack() as bound:
        free = [bound.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, database = (each.getsockname()[1] for each in free)
    folder.mkdir()
    libraries = [library_folders(programs), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    path = f"{programs}/usr/bin:{programs}/usr/sbin:{environment['PATH']}"
    variables = {**environment, "LD_LIBRARY_PATH": ":".join(libraries), "PATH": path}
    user = getpass.getuser()
    own = ["--no-defaults", f"--basedir={programs}/usr", f"--datadir={folder}/data", f"--user={user}"]
    install = ["mariadb-install-db", *own, "--auth-root-authentication-method=normal", "--skip-test-db"]
    subprocess.run(install, env={**os.environ, **variables}, check=True, capture_output=True)
    # Its socket's name is one in its folder of data: paths of tests are too long.
    words = ["--skip-grant-tables", "--bind-address=127.0.0.1", f"--port={database}", "--socket=socket"]
    mariadbd = Service(["mariadbd", *own, *words], variables, folder / "mariadbd.log")
    (own_plugins,) = (programs / "usr/lib").glob("*/slurm-wlm")
    names = {"munge": munge, "port": port, "user": user, "folder": folder, "plugins": plugins, "own": own_plugins}
    configuration = Path(environment["SLURM_CONF"]).with_name("slurmdbd.conf")
    configuration.write_text(CONFIGURATION.format(database=database, **names))
    configuration.chmod(0o600)
    slurmdbd = Service(["slurmdbd", "-D"], variables, folder / "slurmdbd.log")
    with contextlib.ExitStack() as running:
        for service, listens in ((mariadbd, database), (slurmdbd, port)):
            service.start()
            running.callback(service.end)
            service.wait_until(lambda listens=listens: _answers(listens))
        yield port


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
