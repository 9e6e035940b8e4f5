"""The entrance of ``python -m afore.tools.calibrate``."""

from afore.tools.calibrate.command import main
from afore.tools.ending import end_with

if __name__ == "__main__":
    end_with(main)
