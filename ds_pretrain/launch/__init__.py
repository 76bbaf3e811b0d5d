"""Launching: composes and runs the `deepspeed` command. Runs on a machine without torch."""
