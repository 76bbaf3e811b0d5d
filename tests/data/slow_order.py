"""The order of a run's data the slow way, and random small runs to compare it with.

Written from what is promised, without a formula for a position: every draw is dealt from a deck in turn.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

import numpy as np

from ds_pretrain.config.timeline import Segment, Timeline
from ds_pretrain.core.state import Skip, SkipLedger
from ds_pretrain.data import chunks as module
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.mixture import locate_samples, make_mixture
from ds_pretrain.data.permutation import derive_keys, make_key, permute
from ds_pretrain.data.sampler import Sampler, make_sampler
from tests.data.in_memory import source_of

Drawn = tuple[str, int, int]  # source, epoch, sample
Phase = tuple[str, int, list[tuple[int, int]]]  # name, seq_len, (steps, sequences) of each segment
Weights = Mapping[str, Mapping[str, float]]


def timeline(phases: list[Phase]) -> Timeline:
    """Phases one after another, each with the batches of its ramp."""
    segments: list[Segment] = []
    step = sample = token = 0
    for name, seq_len, ramp in phases:
        draw = 0
        for steps, sequences in ramp:
            segments.append(Segment(name, step, step + steps, seq_len, sequences, sample, token, draw))
            step, draw, sample = step + steps, draw + steps * sequences, sample + steps * sequences
            token += steps * sequences * seq_len
    return Timeline(tuple(segments))


@dataclass
class SlowSource:
    """A source that deals its samples from a deck: the next window of chunks, shuffled."""

    name: str
    num_tokens: int
    chunk_tokens: int
    seed: int
    seq_len: int = 0
    chunk: int = 0  # over all epochs, the next to be taken
    deck: deque[Drawn] = field(default_factory=deque)
    left_out_tokens: int = 0  # dealt to nobody, as another length was asked for

    def draw(self, seq_len: int) -> Drawn:
        if seq_len != self.seq_len:
            self.left_out_tokens += len(self.deck) * self.seq_len
            self.deck, self.seq_len = deque(), seq_len
        if not self.deck:
            self._take_window()
        return self.deck.popleft()

    @property
    def chunks_passed(self) -> float:
        """Of all epochs."""
        return self.chunk - len(self.deck) * self.seq_len / self.chunk_tokens

    def _take_window(self) -> None:
        num_chunks = (self.num_tokens - 1) // self.chunk_tokens
        key = make_key(self.seed, "samples", self.name, self.chunk_tokens)
        pieces = self.chunk_tokens // self.seq_len
        window = min(module.WINDOW_CHUNKS, -(-num_chunks // module.EPOCH_WINDOWS)) if pieces > 1 else 1
        first = self.chunk
        while self.chunk < first + window and (self.chunk == first or self.chunk % num_chunks):
            self.chunk += 1
        epochs, chunks = locate_samples(np.arange(first, self.chunk), num_chunks, key)
        dealt = [
            (self.name, epoch, chunk * pieces + piece)
            for epoch, chunk in zip(epochs.tolist(), chunks.tolist(), strict=True)
            for piece in range(pieces)
        ]
        if pieces > 1:
            window_key = derive_keys(make_key(key, "window", self.seq_len), np.array([first]))[0]
            order = permute(np.arange(len(dealt)), len(dealt), int(window_key)).tolist()
            dealt = [dealt[place] for place in order]
        self.deck.extend(dealt)


@dataclass
class Walk:
    """What a run reads, found by walking through it: for each draw of each phase, and by step."""

    drawn: dict[str, list[Drawn]]  # by phase, skipped ones too
    steps: list[list[Drawn]]  # the trained ones
    passed: dict[str, dict[str, float]]  # by phase, chunks of each source at its end
    left_out: dict[str, dict[str, int]]  # by phase, tokens of each source in all


def walk(
    line: Timeline,
    weights: Weights,
    sources: Mapping[str, TokenSource],
    ledger: SkipLedger,
    chunk_tokens: Mapping[str, int],
    seed: int = 7,
) -> Walk:
    """The slow way: one draw after another from the start of the run."""
    slow = {
        name: SlowSource(name, source.num_tokens, chunk_tokens.get(name, 0), seed)
        for name, source in sources.items()
    }
    drawn: dict[str, list[Drawn]] = {}
    steps: list[list[Drawn]] = []
    passed: dict[str, dict[str, float]] = {}
    left_out: dict[str, dict[str, int]] = {}
    for phase in dict.fromkeys(segment.phase for segment in line.segments):
        mixture = make_mixture(weights[phase], make_key(seed, "mixture", phase))
        names = [mixture.names[index] for index in mixture.locate(np.arange(2000))[0].tolist()]
        skipped = {d for s in ledger.skips if s.phase == phase for d in range(s.start, s.stop)}
        drawn[phase] = []
        for segment in (segment for segment in line.segments if segment.phase == phase):

            def deal(seq_len: int = segment.seq_len) -> Drawn:
                drawn[phase].append(slow[names[len(drawn[phase])]].draw(seq_len))  # noqa: B023
                return drawn[phase][-1]  # noqa: B023

            for _ in range(segment.end_step - segment.first_step):
                batch: list[Drawn] = []
                while len(batch) < segment.sequences:
                    is_skipped = len(drawn[phase]) in skipped
                    sample = deal()
                    batch += [] if is_skipped else [sample]
                steps.append(batch)
        while len(drawn[phase]) in skipped:  # what is skipped is not read by the next phase either
            deal()
        passed[phase] = {name: source.chunks_passed for name, source in slow.items() if source.chunk}
        left_out[phase] = {name: source.left_out_tokens for name, source in slow.items()}
    return Walk(drawn, steps, passed, left_out)


@dataclass
class Case:
    """A random small run."""

    line: Timeline
    weights: Weights
    sources: dict[str, TokenSource]
    ledger: SkipLedger
    chunk_tokens: dict[str, int]

    @cached_property
    def sampler(self) -> Sampler:
        return make_sampler(7, self.line, self.weights, self.sources, self.chunk_tokens)

    def walked(self) -> Walk:
        return walk(self.line, self.weights, self.sources, self.ledger, self.sampler_chunks())

    def sampler_chunks(self) -> dict[str, int]:
        return {name: chunks.chunk_tokens for name, chunks in self.sampler.chunks.items()}


def cases(seeds: range) -> Iterator[Case]:
    """Two to four phases, sources of 1 to 200 chunks, ramps, skips anywhere, declared chunks now and then."""
    for seed in seeds:
        random = Random(seed)
        sources = {name: source_of(random.choice([16, 40, 150, 800]), n) for n, name in enumerate("abc")}
        phases: list[Phase] = []
        weights = {}
        for name in [f"p{n}" for n in range(random.randint(2, 4))]:
            ramp = [(random.randint(1, 12), random.choice([4, 8, 24])) for _ in range(random.randint(1, 2))]
            phases.append((name, random.choice([2, 4, 4, 8, 32]), ramp))
            names = random.sample("abc", random.randint(1, 3))
            weights[name] = {source: random.uniform(0.1, 1) for source in names}
        skips = []
        for _ in range(random.choice([0, 1, 4])):
            start = random.randint(0, 150)
            skips.append(Skip(random.choice(phases)[0], start, start + random.randint(1, 90), "spike", 1, 1))
        declared = {"a": 64} if random.random() < 0.3 else {}
        yield Case(timeline(phases), weights, sources, SkipLedger(tuple(skips)), declared)
