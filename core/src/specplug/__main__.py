"""``python -m specplug``: the same as the ``specplug`` command."""

import sys

from specplug.cli import main

if __name__ == "__main__":
    sys.exit(main())
