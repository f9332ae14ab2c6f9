"""Entry of the zipapp (`python -m zipapp smoke`) and of `python smoke`, the two ways smoke is started."""

import sys

# Worker processes that torch or megatron-core start may import this file again: without the guard they
# would run the plan a second time.
if __name__ == "__main__":
    # What comes next cannot be parsed by older ones.
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.stderr.write("envbuild-smoke needs Python 3.10 or newer: start it with that of the environment\n")
        sys.exit(3)
    from envbuild_smoke.cli import run_and_exit

    run_and_exit()
