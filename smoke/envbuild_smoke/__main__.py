"""`python -m envbuild_smoke`."""

import sys

if __name__ == "__main__":
    from envbuild_smoke.cli import main

    sys.exit(main())
