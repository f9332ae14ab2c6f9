"""Entry of the zipapp (`python -m zipapp smoke`) and of `python smoke`, the two ways smoke is started."""

# Worker processes that torch or megatron-core start may import this file again: without the guard they
# would run the plan a second time.
if __name__ == "__main__":
    from envbuild_smoke.cli import run_and_exit

    run_and_exit()
