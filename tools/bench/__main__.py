"""The entrance of ``python -m afore.tools.bench``."""

from afore.tools.bench.command import main
from afore.tools.ending import end_with

if __name__ == "__main__":
    end_with(main)
