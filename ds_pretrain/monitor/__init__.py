"""Monitoring: what an operator sees of a run. Nothing here can stop training."""
