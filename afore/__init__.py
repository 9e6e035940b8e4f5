"""AFORE: attention-FFN disaggregated serving of Mixture-of-Experts models, with expert replicas moved just in time."""

__version__ = "0.1.0"
