"""Brings an environment into its final state at the end of a RUN step: what the native builder does outside of it.

Run inside a base with the base's own Python, before and after what a step installs:

    python -S -s settle.py winners SITE_PACKAGES STEP
        prints the packages of the step that are to be installed again, over files that others bring under one name
    python -S -s settle.py environment VENV PYTHON_VERSION EPOCH STEP
        says which commits packages are of, removes what uv leaves, makes modes 755 or 644, compiles to bytecode, and
        sets every time to EPOCH
    python -S -s settle.py check SITE_PACKAGES PACKAGES
        compares the installed distributions with the JSON file PACKAGES (version by name)
    python -S -s settle.py restore REFERENCE
        gives directories that REFERENCE (the base) has too the times that they have there

STEP is a JSON file: the step's packages, those of commits, and the files that may differ. Beside this program lie
compile_tree.py and records.py, which the native builder uses too. Needs Python 3.10 or newer.
"""

import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import stat
import subprocess
import sys

import records

HERE = pathlib.Path(__file__).parent


def step_of(file):
    """What is known of a step."""
    return json.loads(pathlib.Path(file).read_text(encoding="utf-8"))


def winners(site_packages, file):
    """Uv installs many packages at once, and leaves to chance whose file of a name is there."""
    step = step_of(file)
    listed = {
        name: records.rows(info) for name, info in records.infos(pathlib.Path(site_packages), step["packages"]).items()
    }
    found = set()
    for path, names in records.conflicts(listed):
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in step["overlaps"]):
            found.add(names[-1])
        elif not any(name in step["later"] for name in names):
            sys.exit(f"{' and '.join(names)} bring different files of one name: {path}")
    print(*sorted(found))


def environment(venv, python, epoch, file):
    """Settle the environment; what earlier steps settled is not touched, so that it is not in this layer again."""
    home, nanoseconds = pathlib.Path(venv), int(epoch) * 10**9
    site_packages = home / "lib" / f"python{python}" / "site-packages"
    commits = step_of(file)["commits"]
    for name, info in records.infos(site_packages, commits).items():
        records.from_commit(info, *commits[name])
    records.remove_leftovers(home, site_packages)
    top = home.parent
    for path in everything(top):
        plain_mode(path)
        if path.endswith(".py") and os.lstat(path).st_mtime_ns != nanoseconds:
            # Installed by this step, maybe over a file of an earlier one, of which there is bytecode.
            pathlib.Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
    command = [sys.executable, "-S", "-s", str(HERE / "compile_tree.py"), venv, str(os.cpu_count() or 1), epoch]
    subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, check=True)
    for path in everything(top):
        set_time(path, nanoseconds)


def everything(top):
    """Every path below ``top`` and itself; what is in a directory comes before the directory."""
    for folder, below, files in os.walk(top, topdown=False):
        for name in [*files, *below]:
            yield f"{folder}/{name}"
    yield str(top)


def plain_mode(path):
    """755 for directories and programs, 644 for all other files."""
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        return
    mode = 0o755 if stat.S_ISDIR(info.st_mode) or info.st_mode & stat.S_IXUSR else 0o644
    if stat.S_IMODE(info.st_mode) != mode:
        os.chmod(path, mode)


def set_time(path, nanoseconds):
    """Set the time of a path, unless it has that."""
    if os.lstat(path).st_mtime_ns != nanoseconds:
        os.utime(path, ns=(nanoseconds, nanoseconds), follow_symlinks=False)


def check(site_packages, packages):
    """End with status 1 where something else is installed than what is locked."""
    wanted = json.loads(pathlib.Path(packages).read_text(encoding="utf-8"))
    installed = {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): found.version
        for found in importlib.metadata.distributions(path=[site_packages])
    }
    differing = [
        f"{name}: locked {wanted.get(name, 'not')}, installed {installed.get(name, 'not')}"
        for name in sorted({*wanted, *installed})
        if wanted.get(name) != installed.get(name)
    ]
    if differing:
        sys.exit("the environment is not what was locked\n" + "\n".join(differing))


def restore(reference):
    """What was put into a directory of the base changed the directory's time."""
    for folder, below, _ in os.walk(reference):
        below[:] = [name for name in below if not os.path.ismount(here(folder, name, reference))]
        for name in below:
            place = here(folder, name, reference)
            if place.is_dir() and not place.is_symlink():
                set_time(place, os.lstat(f"{folder}/{name}").st_mtime_ns)


def here(folder, name, reference):
    """The path of a directory of the base, in this root file system."""
    return pathlib.Path("/", os.path.relpath(f"{folder}/{name}", reference))


{"winners": winners, "environment": environment, "check": check, "restore": restore}[sys.argv[1]](*sys.argv[2:])
