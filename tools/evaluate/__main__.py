"""The entrance of ``python -m afore.tools.evaluate``."""

from afore.tools.ending import end_with
from afore.tools.evaluate.command import main

if __name__ == "__main__":
    end_with(main)
