"""Monitoring: what a person sees of a run. Nothing here can stop training."""
