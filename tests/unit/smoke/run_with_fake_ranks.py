"""The real command line with the fake rank program, for tests that send signals to it."""

import sys
from functools import partial

from envbuild_smoke import cli
from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.run import runner

if __name__ == "__main__":
    program = RankProgram(entry="fake_ranks:main", compare="fake_ranks:compare", bandwidth="fake_ranks:bandwidth")
    runner.run_plan = partial(runner.run_plan, program=program)
    status = cli.main()
    cli.close_streams()
    sys.exit(status)
