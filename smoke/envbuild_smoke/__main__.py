"""`python -m envbuild_smoke`."""

if __name__ == "__main__":
    from envbuild_smoke.cli import run_and_exit

    run_and_exit()
