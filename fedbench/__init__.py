"""fedbench: personalised federated recommendation, benchmarked honestly and fast."""

import os

# Threads that wait should sleep, not spin: on a machine with other work, spinning costs several times the work itself.
# Must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
