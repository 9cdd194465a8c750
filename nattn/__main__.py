"""``python -m nattn``; see `nattn.applications.command_line`."""

import sys

from .applications.command_line import main

if __name__ == "__main__":
    sys.exit(main())
