"""Many runs that differ in some flags: `python sweeps/grid.py --algo NAME --dataset NAME -n 10 20 50 -e 1 3 5`; `--help` says the rest."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fedbench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))
