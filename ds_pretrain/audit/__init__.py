"""Which samples a run was trained on: proved from what it wrote down, and shown as text."""
