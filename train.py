"""One run: `python train.py --algo NAME --dataset NAME`; `--help` says the rest."""

import sys

from fedbench.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
