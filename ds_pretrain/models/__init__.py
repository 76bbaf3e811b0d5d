"""Models: building, initialization, QK-norm and losses. Knows nothing of data, checkpoints or DeepSpeed."""
