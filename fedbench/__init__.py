"""fedbench: personalised federated recommendation, benchmarked honestly and fast."""

__version__ = "0.1.0"
