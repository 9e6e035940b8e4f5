"""The entrance of ``python -m afore.tools.bench``."""

import sys

from afore.tools.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
