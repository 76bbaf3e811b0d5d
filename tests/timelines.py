"""Timelines, phases and schedules for tests of what does not look at a run file."""

from ds_pretrain.config.plan import make_timeline
from ds_pretrain.config.schedule import DecayShape
from ds_pretrain.config.schema import CosineSection, PhaseSection, WsdSection
from ds_pretrain.config.timeline import Duration, Timeline, steps


def single_phase(name: str, seq_len: int, sequences: int, length: Duration) -> Timeline:
    """The timeline of a run with one phase and one batch size."""
    return make_timeline([phase(name, seq_len)], [(steps(0), seq_len * sequences)], length)


def phase(name: str, seq_len: int, start: Duration | None = None) -> PhaseSection:
    """A phase of a run file."""
    return PhaseSection(name=name, seq_len=seq_len, mixture={"text": 1.0}, start=start)


def cosine(peak: float, length: int, warmup: int, floor: float) -> CosineSection:
    """A cosine in steps."""
    return CosineSection(
        kind="cosine", length=steps(length), peak_lr=peak, warmup=steps(warmup), min_lr_ratio=floor
    )


def wsd(peak: float, length: int, warmup: int, decay: int, shape: DecayShape, floor: float) -> WsdSection:
    """A schedule with a decay, in steps."""
    return WsdSection(
        kind="wsd",
        length=steps(length),
        peak_lr=peak,
        warmup=steps(warmup),
        decay=steps(decay),
        decay_shape=shape,
        min_lr_ratio=floor,
    )
