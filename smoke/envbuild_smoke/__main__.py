"""`python -m envbuild_smoke`."""

import sys

if __name__ == "__main__":
    from envbuild_smoke.cli import close_streams, main

    status = main()
    close_streams()
    sys.exit(status)
