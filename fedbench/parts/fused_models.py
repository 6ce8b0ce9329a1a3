"""Models that a fused kernel knows: what `Algorithm.fused` and `fused_score` return to say that the kernel does what they wrote."""

from fedbench.kernels.fused import TINY, BiasedBCE, BiasedMSE, DotBCE, ElasticBCE, NeuMFBCE, train_pool

__all__ = ["TINY", "BiasedBCE", "BiasedMSE", "DotBCE", "ElasticBCE", "NeuMFBCE", "train_pool"]
