"""The run file: TOML in, a frozen tree out, with every problem in one report.

The run file owns what an experiment varies (model, data, length, peak_lr, batch). The DeepSpeed JSON owns
precision, clipping, ZeRO and the optimizer. Nothing here imports torch, and nothing derived is stored:
`Plan` (plan.py) computes it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from ds_pretrain.config.loader import Fraction01, Positive, Section, to_tuple, to_tuple_of_one_or_more
from ds_pretrain.config.schedule import DecayShape, LrScaling, cosine_fraction, wsd_fraction
from ds_pretrain.config.timeline import (
    Duration,
    Timeline,
    Unit,
    is_passed,
    parse_batch_tokens,
    parse_duration,
    steps,
)
from ds_pretrain.core.jsonl import show_value


def check_path(value: str) -> str:
    """A file or folder of this host. Raises ValueError for what no file system can mean by it."""
    if not value.strip() or "\0" in value or value.startswith("~") or "://" in value:
        raise ValueError(
            f"{show_value(value)} is not a path on this host; write one like data/web or /data/web (only a "
            "shell replaces ~)"
        )
    return value


def check_location(value: str) -> str:
    """A folder, or a URL like s3://bucket/folder. Raises ValueError, which shows no URL.

    The run file is kept in every checkpoint, so a URL with a credential is refused.
    """
    if not re.match(r"[a-z][a-z0-9+.-]+:/|.*://", value):
        return check_path(value)
    try:
        parts = urlsplit(value)
        is_place = "://" in value and bool(parts.netloc or parts.path.strip("/"))
    except ValueError:
        is_place = False
    if not is_place or parts.scheme in ("", "file"):
        raise ValueError(
            "it is not a URL of a location; write one like s3://bucket/folder, or a folder as a path"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"the {parts.scheme} URL holds a user, a password or a query (not shown here); the run file "
            f"is kept in every checkpoint: leave them to the environment or to the store's own "
            f"configuration files, and write only the location, like s3://bucket/folder"
        )
    return value


def _duration_validator(*units: Unit, may_be_zero: bool = False) -> PlainValidator:
    """A validator that reads a duration in one of `units`."""

    return PlainValidator(lambda value: _read_duration(value, units, may_be_zero))


def _read_duration(value: Any, units: Sequence[Unit], may_be_zero: bool) -> Duration:
    duration = value if isinstance(value, Duration) else parse_duration(_require_text(value))
    if duration.unit not in units:
        raise ValueError(f'"{duration}" is in {duration.unit}; expected {" or ".join(units)}')
    if duration.amount == 0 and not may_be_zero:
        raise ValueError(f'"{duration}" is zero; expected more')
    return duration


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f'{show_value(value)} has no unit; write it as text with one, like "2000 steps"')
    return value


def _parse_optional_weight(value: Any) -> Any:
    return None if value in (0, False, "off", "none") else value


def _parse_lr_scaling(value: Any) -> Any:
    return "none" if value is None else value  # what an override's `none` is read as


_START = replace(steps(0), text="0")


def _parse_ramp(value: Any) -> tuple[tuple[Duration, int], ...]:
    """{ "0" = "1M", "10B tokens" = "2M" }: from when on, and how many tokens a step."""
    if not isinstance(value, dict) or not value:
        raise ValueError(f'{show_value(value)} is not a ramp; expected {{ "0" = "1M", "10B tokens" = "2M" }}')
    sizes = [
        (_START if start.strip() == "0" else parse_duration(start), parse_batch_tokens(tokens))
        for start, tokens in value.items()
    ]
    if wrong := [start for start, _ in sizes if start.unit not in ("steps", "tokens")]:
        raise ValueError(f'"{wrong[0]}" is in {wrong[0].unit}; expected steps or tokens')
    if sizes[0][0].amount != 0:
        raise ValueError(f'a ramp begins with "0"; its first key is "{sizes[0][0]}"')
    return tuple(sizes)


def _format_ramp(ramp: Any) -> Any:
    return ramp and {str(start): tokens for start, tokens in ramp}


Ramp = Annotated[tuple[tuple[Duration, int], ...], PlainValidator(_parse_ramp), PlainSerializer(_format_ramp)]
Length = Annotated[Duration, _duration_validator("steps", "tokens"), PlainSerializer(str)]
Share = Annotated[
    Duration, _duration_validator("steps", "tokens", "percent", may_be_zero=True), PlainSerializer(str)
]
ShareOfRun = Annotated[
    Duration, _duration_validator("steps", "tokens", may_be_zero=True), PlainSerializer(str)
]
Trigger = Annotated[Duration, _duration_validator("steps", "tokens", "seconds"), PlainSerializer(str)]
Triggers = Annotated[tuple[Trigger, ...], BeforeValidator(to_tuple_of_one_or_more)]


def _parse_share_or_phase(value: Any) -> Duration | str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", value):
        return value
    return _read_duration(value, ("steps", "tokens", "percent"), may_be_zero=True)


ShareOrPhase = Annotated[Duration | str, PlainValidator(_parse_share_or_phase), PlainSerializer(str)]
BatchTokens = Annotated[int, BeforeValidator(parse_batch_tokens)]
Interval = Annotated[Duration, _duration_validator("seconds"), PlainSerializer(str)]
FilePath = Annotated[str, AfterValidator(check_path)]  # from the folder of the start, if it is not absolute
Location = Annotated[str, AfterValidator(check_location)]  # a folder, or a URL
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
LrScalingRule = Annotated[LrScaling, BeforeValidator(_parse_lr_scaling)]
OptionalWeight = Annotated[Positive | None, BeforeValidator(_parse_optional_weight)]  # 0, false, "off": None
Count = Annotated[int, Field(gt=0, le=10**12)]
Weight = Annotated[float, Field(gt=0, le=1e12)]  # so that a sum of them is finite


class ModelSection(Section):
    """The model, and what is added to it."""

    renamed: ClassVar[Mapping[str, str]] = {"recompute": "activation_checkpointing", "from": "pretrained"}
    config: FilePath
    """Hugging Face `config.json` of a decoder-only model (path); not needed with `pretrained`."""
    pretrained: FilePath | None = None
    """Hugging Face model folder whose weights the run starts from (path); its `config.json` must agree
    with `config`."""
    qk_norm: bool = False
    """RMSNorm of each head's queries and keys before RoPE; families that have it natively use theirs."""
    z_loss: OptionalWeight = None
    """Weight of the auxiliary loss `mean(logsumexp(logits)^2)`, like 1e-4; `0`, `false` and `"off"` mean
    none."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    mask_documents: bool = False
    """Keep attention inside a document, restart positions with each, and ignore labels across boundaries.
    Not with sequence parallelism."""
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Attention kernel: `"eager"`, `"sdpa"` or `"flash_attention_2"`; none: the best that the family has."""
    decay_embeddings: bool = False
    """Apply weight decay to embeddings; norms and biases never have it."""

    @model_validator(mode="before")
    @classmethod
    def _config_of_pretrained(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("pretrained"), str) or data.get("config"):
            return data
        return {**data, "config": f"{data['pretrained'].rstrip('/')}/config.json"}


class CosineSection(Section):
    """Warmup and cosine. Rates are those of a section `in_steps`."""

    renamed: ClassVar[Mapping[str, str]] = {"peak": "peak_lr", "floor": "min_lr_ratio"}
    kind: Literal["cosine"]
    """`"cosine"`: linear warmup, then half a cosine."""
    length: Length
    """Length of the whole run, in steps or tokens."""
    peak_lr: Positive
    """Highest learning rate."""
    warmup: Share
    """Linear warmup from 0, in steps, tokens or percent."""
    min_lr_ratio: Fraction01 = 0.1
    """Lowest learning rate, as a fraction of `peak_lr`."""

    def in_steps(self, timeline: Timeline) -> Self:
        """The same with each duration in steps of this timeline."""
        length, warmup = timeline.last_step, timeline.steps_of(self.warmup)
        return self.model_copy(update={"length": steps(length), "warmup": steps(warmup)})

    def lr(self, step: int) -> float:
        """The learning rate of the update after `step` finished steps."""
        return self.peak_lr * cosine_fraction(step, self.length.steps, self.warmup.steps, self.min_lr_ratio)

    def corners(self) -> dict[str, int]:
        """The steps at which the schedule changes its nature, by name, in order."""
        length, warmup = self.length.steps, self.warmup.steps
        return {"start": 0, "warmup end": warmup, "middle": (warmup + length) // 2, "last": length - 1}


class WsdSection(Section):
    """Warmup, stable, decay. Rates are those of a section `in_steps`."""

    renamed: ClassVar[Mapping[str, str]] = {
        "peak": "peak_lr",
        "floor": "min_lr_ratio",
        "shape": "decay_shape",
    }
    kind: Literal["wsd"]
    """`"wsd"`: linear warmup, stable, decay."""
    length: Length
    """Length of the whole run, in steps or tokens."""
    peak_lr: Positive
    """Highest learning rate."""
    warmup: Share
    """Linear warmup from 0, in steps, tokens or percent."""
    decay: ShareOrPhase
    """Decay at the end, in steps, tokens or percent; or a phase: from its start to the end of the run."""
    decay_shape: DecayShape = "1-sqrt"
    """Shape of the decay: `"linear"`, `"cosine"`, `"1-sqrt"` or `"exponential"`."""
    min_lr_ratio: Fraction01 = 0.0
    """Lowest learning rate, as a fraction of `peak_lr`."""

    def in_steps(self, timeline: Timeline) -> Self:
        """The same with each duration in steps of this timeline."""
        length, warmup, decay = timeline.last_step, timeline.steps_of(self.warmup), self.decay
        if isinstance(decay, str):
            first = timeline.phase_start(decay)
        elif decay.unit == "tokens":
            before = timeline.total_tokens - decay.amount
            first = timeline.step_at(before)
            first -= timeline.tokens_before(first) > before  # no fewer tokens
        else:
            first = length - timeline.steps_of(decay)
        durations = {"length": steps(length), "warmup": steps(warmup), "decay": steps(length - first)}
        return self.model_copy(update=durations)

    @property
    def decay_start(self) -> int:
        """The first step of the decay; the stable interval is derived, never given."""
        assert isinstance(self.decay, Duration)
        return self.length.steps - self.decay.steps

    def lr(self, step: int) -> float:
        """The learning rate of the update after `step` finished steps."""
        length, warmup = self.length.steps, self.warmup.steps
        decay = length - self.decay_start
        return self.peak_lr * wsd_fraction(step, length, warmup, decay, self.decay_shape, self.min_lr_ratio)

    def corners(self) -> dict[str, int]:
        """The steps at which the schedule changes its nature, by name, in order."""
        length, warmup, decay_start = self.length.steps, self.warmup.steps, self.decay_start
        return {
            "start": 0,
            "warmup end": warmup,
            "middle": (warmup + decay_start) // 2,
            "decay start": decay_start,
            "last": length - 1,
        }


class BatchSection(Section):
    """The global batch, and how one rank takes it. Accumulation follows from both and the number of ranks."""

    renamed: ClassVar[Mapping[str, str]] = {
        "micro_sequences": "micro_batch_size",
        "accumulation": "gradient_accumulation_steps",
        "rate_rule": "lr_scaling",
        "rate_tokens": "lr_reference_tokens",
    }
    tokens: BatchTokens
    """Tokens of the global batch: an integer, or text with binary K and M, so `"4M"` is 1,024 sequences of
    4,096."""
    micro_batch_size: Count
    """Sequences of a micro-batch on one rank."""
    gradient_accumulation_steps: Count | None = None
    """Micro-batches of a step on one rank. It follows from the other keys; set it only to insist on a
    number."""
    ramp: Ramp | None = None
    """Batch sizes before `tokens` is reached: `{ "0" = "1M", "10B tokens" = "2M", "50B tokens" = "4M" }`,
    keyed by steps or tokens."""
    lr_scaling: LrScalingRule = "none"
    """Scaling of the learning rate with the batch size relative to `lr_reference_tokens`: `"none"`,
    `"linear"` or `"sqrt"`."""
    lr_reference_tokens: BatchTokens | None = None
    """Batch size that `schedule.peak_lr` is meant for; default: `tokens`. Keep the old `tokens` here when
    a ramp is extended during a run."""

    @property
    def sizes(self) -> Ramp:
        """The batch size in tokens from each point of the run on."""
        return self.ramp or ((steps(0), self.tokens),)


class HeldOutSection(Section):
    """A `.bin`/`.idx` pair, named by their common prefix, or a view of its longer or shorter documents."""

    path: FilePath
    """Common prefix of a `.bin`/`.idx` pair (path)."""
    min_document_tokens: Count | None = None
    """Ignore documents with fewer tokens; the files stay as they are."""
    max_document_tokens: Count | None = None
    """Ignore documents with more tokens."""

    @model_validator(mode="after")
    def _some_length_is_both(self) -> Self:
        least, most = self.min_document_tokens, self.max_document_tokens
        if least is not None and most is not None and least > most:
            raise ValueError(
                f"min_document_tokens = {least:,} is more than max_document_tokens = {most:,}, and no "
                "document is both; exchange them, or leave one out"
            )
        return self


class SourceSection(HeldOutSection):
    """A training source."""

    max_epochs: Positive | None = None
    """Epochs that the whole run may read; more is an error at the start."""
    chunk_tokens: Count | None = None
    """Tokens of the unit that is shuffled: sequences are cut from it, and a later phase continues in it. A
    multiple of each `seq_len` that reads the source; none: the longest. Set it before the first start if
    you may lengthen sequences later."""


def _parse_source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Sources = Annotated[dict[Name, Annotated[SourceSection, BeforeValidator(_parse_source)]], Field(min_length=1)]
HeldOut = Annotated[
    dict[Name, Annotated[HeldOutSection, BeforeValidator(_parse_source)]], Field(min_length=1)
]


class RopeSection(Section):
    """Rotary positions from here on; what is not named stays as it is.

    YaRN: Peng et al., arXiv:2309.00071. Llama 3: Llama Team, arXiv:2407.21783.
    """

    renamed: ClassVar[Mapping[str, str]] = {"original_length": "original_max_position_embeddings"}
    kind: Literal["default", "yarn", "llama3"] | None = None
    """RoPE scaling: `"default"`, `"yarn"` or `"llama3"`; none: as in the phase before."""
    theta: Positive | None = None
    """Base of the frequencies, 2 to 1e30; none: as in the phase before."""
    factor: Annotated[float, Field(ge=1)] | None = None
    """Length multiplier of the scaling, 1 to 1e6 (`yarn`, `llama3`)."""
    original_max_position_embeddings: Count | None = None
    """Positions that the model was trained on before (`yarn`, `llama3`); none: from the model config."""
    low_freq_factor: Positive | None = None
    """Parameter of `llama3`; none: 1."""
    high_freq_factor: Positive | None = None
    """Parameter of `llama3`; none: 4."""


class PhaseSection(Section):
    """A part of the run with one sequence length, one mixture and one rotary base."""

    renamed: ClassVar[Mapping[str, str]] = {
        "micro_sequences": "micro_batch_size",
        "recompute": "activation_checkpointing",
    }
    name: Name
    """Name of the phase."""
    seq_len: Count
    """Tokens of a sequence."""
    mixture: dict[str, Weight]
    """Weight of each source, normalized; each block of 4,096 draws has exactly the rounded proportions."""
    start: Share | None = None
    """Start of the phase in steps, tokens or percent; every phase but the first has one."""
    micro_batch_size: Count | None = None
    """Sequences of a micro-batch in this phase; none: `batch.micro_batch_size`."""
    activation_checkpointing: bool | None = None
    """Activation checkpointing in this phase; none: `model.activation_checkpointing`."""
    rope: RopeSection | None = None
    """RoPE from this phase on; none: as in the phase before."""


class ValidationSection(Section):
    """Fixed batches, the same at every validation."""

    every: Length
    """Interval in steps or tokens; validation also runs after the last step."""
    sources: HeldOut
    """Validation sources, as `[sources]`."""
    tokens: BatchTokens
    """Tokens read from each source: samples spread evenly over it, the same each time."""
    retrieval: bool = False
    """Also hide keys in the text at five depths and every length up to `seq_len`, and score how well they
    are found."""

    def is_due(self, step: int, timeline: Timeline) -> bool:
        """True if it is time to validate after `step` finished steps."""
        return is_passed(self.every, step, timeline)


class CheckpointSection(Section):
    """When and where to save, and what to keep. The first and the last step are always saved."""

    renamed: ClassVar[Mapping[str, str]] = {
        "keep": "keep_last",
        "failures": "max_consecutive_failures",
        "local": "local_dir",
        "ship_to": "upload_to",
        "stall_share": "max_stall_fraction",
    }
    every: Triggers = (parse_duration("1000 steps"),)
    """Save interval: a duration or a list of them (steps, tokens, wall-clock), whichever comes first. The
    first and the last step are always saved."""
    keep_last: Count = 3
    """Number of newest checkpoints to keep; pinned ones and the newest known-good one stay too."""
    keep_every: Length | None = None
    """Keep the first checkpoint at or after each multiple, in steps or tokens."""
    max_consecutive_failures: Count = 3
    """Consecutive failed saves after which the run stops with exit code 5."""
    local_dir: FilePath | None = None
    """Fast folder on each host to save to (path); checkpoints are then uploaded to `upload_to`."""
    upload_to: Location | None = None
    """Location that each published checkpoint is uploaded to: a shared folder or an `fsspec` URL (`s3://`,
    `gs://`, ...), without credentials; with `local_dir` the default is `OUT/checkpoints`."""
    verify: Literal["full", "sizes"] = "full"
    """Check of each file at a restore: `"full"` (size and SHA-256) or `"sizes"` (damage is not seen, and
    pickles are loaded unchecked)."""
    mtbf: Interval | None = None
    """Mean time between failures of the cluster (s, min, h), for advice on the save interval."""
    max_stall_fraction: Fraction01 = 0.05
    """Fraction of the save interval that saves may block training; more is a warning."""

    def is_due(self, step: int, timeline: Timeline) -> bool:
        """True if it is time to save after `step` finished steps, apart from what a clock says."""
        return any(is_passed(every, step, timeline) for every in self.every if every.unit != "seconds")


class WatchdogSection(Section):
    """The thresholds and the policy of the watchdog."""

    renamed: ClassVar[Mapping[str, str]] = {
        "respond": "policy",
        "rollbacks": "max_rollbacks",
        "stretch": "rollback_window",
        "non_finite": "max_non_finite_steps",
        "drop_sigmas": "skip_update_sigmas",
        "drift": "drift_threshold",
    }
    window: Annotated[int, Field(ge=2, le=10_000)] = 200
    """Accepted values in the rolling statistics. Judging starts after a quarter of them; in a later phase
    from its sixth step on."""
    loss_sigmas: Positive = 6.0
    """Sigmas above the expected loss that open a spike; it has healed after two consecutive steps below half
    of that."""
    norm_sigmas: Positive = 8.0
    """Sigmas above the median log gradient norm that are watched; no rollback follows from the norm alone."""
    patience: Count = 30
    """Steps that a spike may take to heal, from the first high loss on. A spike that heals and recurs is
    rolled back when 1.5 times as many steps of a window were high."""
    drift_threshold: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Rise of the smoothed loss above its lowest level, as a fraction of it, that leads to a rollback."""
    skip_update_sigmas: Positive | None = None
    """Skip an update whose gradient norm is this many sigmas above the median; at least `norm_sigmas`; not
    in mode `"observe"`."""
    max_non_finite_steps: Count = 20
    """Steps with a non-finite loss or norm within a window before a rollback."""
    policy: Annotated[tuple[Literal["replay", "skip"], ...], BeforeValidator(to_tuple)] = ("replay", "skip")
    """Responses to the first, second, ... rollback at one onset: `"replay"` the same data, or `"skip"` it;
    then the run stops for its operator."""
    skip_before: ShareOfRun = parse_duration("50 steps")
    """Length of a skip before the onset, in steps or tokens."""
    skip_after: ShareOfRun = parse_duration("150 steps")
    """Length of a skip after the onset, in steps or tokens."""
    max_rollbacks: Count = 5
    """Rollbacks within `rollback_window` before the run stops for its operator."""
    rollback_window: Length = parse_duration("5000 steps")
    """Window of `max_rollbacks`, in steps or tokens."""
    mode: Literal["act", "observe", "off"] = "act"
    """`"act"`, `"observe"` (report what it would do) or `"off"`."""


class MonitorSection(Section):
    """The metrics that operators see."""

    renamed: ClassVar[Mapping[str, str]] = {"every": "log_every"}
    log_every: Count = 10
    """Steps between lines on the terminal and points in W&B; `metrics.jsonl` has every step."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: `"off"`, `"offline"` or `"online"`."""
    wandb_project: Text = "ds_pretrain"
    """W&B project."""


class Run(Section):
    """The whole run file."""

    name: Name
    """Name of the run: letters, digits, `.`, `_`, `-`."""
    out: FilePath
    """Run directory (path); one run each."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of weights, data order and dropout."""
    deepspeed: FilePath
    """DeepSpeed JSON (path): precision, clipping, ZeRO, optimizer."""
    accept_changes: Annotated[tuple[str, ...], BeforeValidator(to_tuple)] = ()
    """Settings of past steps that may differ at this start: `schedule`, `sources`, `model.z_loss`,
    `model.activation_checkpointing`, `model.attention`, `model.decay_embeddings` or a key below one;
    `probe` accepts another probe loss."""
    resume_from: FilePath | None = None
    """Checkpoint to start from while the run has none of its own (path): ours, or a universal one, also
    one written by plain DeepSpeed."""
    accept_missing: Annotated[tuple[Literal["run_state", "rng"], ...], BeforeValidator(to_tuple)] = ()
    """Parts that the checkpoint at `resume_from` may lack: `run_state` (the step is then DeepSpeed's
    count), `rng` (random streams are then derived from the seed)."""
    model: ModelSection
    schedule: Annotated[CosineSection | WsdSection, Field(discriminator="kind")]
    batch: BatchSection
    sources: Sources
    phases: Annotated[tuple[PhaseSection, ...], BeforeValidator(to_tuple), Field(min_length=1)]
    validation: ValidationSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    watchdog: WatchdogSection = WatchdogSection()
    monitor: MonitorSection = MonitorSection()

    def phase(self, name: str) -> PhaseSection:
        """The phase of that name. There must be one."""
        return next(phase for phase in self.phases if phase.name == name)

    def micro_batch_size(self, phase: str) -> int:
        """Sequences of a micro-batch in a phase."""
        return self.phase(phase).micro_batch_size or self.batch.micro_batch_size
