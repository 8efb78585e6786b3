"""``python -m headrace``: the same as the ``headrace`` command."""

import sys

from headrace.cli import main

if __name__ == "__main__":
    sys.exit(main())
