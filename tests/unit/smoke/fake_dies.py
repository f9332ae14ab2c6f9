"""A module whose import kills the process, as an extension built for another library does."""

import os

os.abort()
