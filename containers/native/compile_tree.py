"""Compiles an environment to bytecode: the same bytes on every machine, whatever its number of processors.

Run inside a base with the base's own Python: python -S -s compile_tree.py DIRECTORY PROCESSES
with PYTHONHASHSEED=0 in the environment, which -I would ignore.

A .pyc depends on more than its source: marshal writes a reference where an object is shared, and what is shared
depends on which strings the compiling process has interned before. So every folder is compiled by a process forked
from this one, whose state is the same each time, and its files in the order of their names. Hash-based pycs that are
not checked again (PEP 552) do not depend on the files' times, and an image does not change.
"""

import os
import py_compile
import sys

MODE = py_compile.PycInvalidationMode.UNCHECKED_HASH


def compile_folder(folder, names):
    """Compile the sources of one folder; those that are not valid Python are left without bytecode."""
    for name in names:
        path = f"{folder}/{name}"
        try:
            py_compile.compile(path, dfile=path, doraise=True, invalidation_mode=MODE)
        except py_compile.PyCompileError:
            # Templates and test data for other versions of Python; pip and uv pass over them too.
            print(path, flush=True)


def folders_of(tree):
    """Every folder below ``tree`` with Python sources, and their names, in a fixed order; the largest first."""
    found = []
    for folder, below, files in os.walk(tree):
        below.sort()
        names = sorted(name for name in files if name.endswith(".py"))
        if names:
            size = sum(os.lstat(f"{folder}/{name}").st_size for name in names)
            found.append((-size, folder, names))
    found.sort()
    return [(folder, names) for _, folder, names in found]


def main():
    """Fork a process for each folder, as many at once as asked."""
    tree, limit = sys.argv[1], int(sys.argv[2])
    running, failed = set(), False
    pending = folders_of(tree)
    pending.reverse()
    while pending or running:
        if pending and len(running) < limit:
            folder, names = pending.pop()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    compile_folder(folder, names)
                    status = 0
                finally:
                    os._exit(status)
            running.add(child)
            continue
        child, status = os.wait()
        running.discard(child)
        failed = failed or status != 0
    sys.exit(1 if failed else 0)


main()
