"""The real command line with the fake rank program, for tests that send signals to it."""

from dataclasses import replace

from envbuild_smoke import cli, runner
from envbuild_smoke.nodes import canary
from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.run import sweep

canary.LIMIT_SECONDS = 5.0
sweep.LIMIT_SECONDS = 4.0
FAKE = RankProgram(tasks="fake_ranks")
real_run_plan = runner.run_plan


def run_plan(*arguments, options, **more):  # type: ignore[no-untyped-def]
    return real_run_plan(*arguments, options=replace(options, program=FAKE), **more)


if __name__ == "__main__":
    runner.run_plan = run_plan
    cli.run_and_exit()
