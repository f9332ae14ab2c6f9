"""Lets ``python -m envbuild`` do what the console script does."""

from envbuild.cli.main import main

if __name__ == "__main__":
    main()
