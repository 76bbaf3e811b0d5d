"""Checkpoints: what a run lives by. A folder is a checkpoint if and only if its manifest verifies."""
