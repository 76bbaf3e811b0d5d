"""Timelines for tests of what does not look at phases."""

from ds_pretrain.config.timeline import Duration, Stage, Timeline, make_timeline, parse_duration


def single_phase(phase: str, seq_len: int, sequences: int, length: Duration) -> Timeline:
    """The timeline of a run with one phase and one batch size."""
    return make_timeline([Stage(phase, seq_len)], [(parse_duration("0 steps"), seq_len * sequences)], length)
