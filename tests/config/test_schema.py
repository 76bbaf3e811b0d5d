"""The run file: what it reads, and what it says about what it cannot read."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter

from ds_pretrain.config.loader import find_section_models
from ds_pretrain.config.plan import parse_run
from ds_pretrain.config.schema import CosineSection, ModelSection, Run, SourceSection, WsdSection
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import read_text

MINIMAL = """
name = "tiny"
out = "runs/tiny"
deepspeed = "ds.json"
[model]
config = "model.json"
[schedule]
kind = "wsd"
length = "2_000 steps"
peak_lr = 3e-4
warmup = "100 steps"
decay = "10%"
[batch]
tokens = "4M"
micro_batch_size = 4
[sources]
web = "data/web"
[[phases]]
name = "main"
seq_len = 4096
mixture = { web = 1.0 }
"""


def problems_of(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(InputError) as raised:
        parse_run(text, overrides, "run.toml")
    return raised.value.problems


def test_a_minimal_run_file_gives_a_frozen_tree_with_the_documented_defaults() -> None:
    run = parse_run(MINIMAL)
    assert isinstance(run.schedule, WsdSection)
    assert (run.schedule.decay_shape, run.schedule.min_lr_ratio, str(run.schedule.length)) == (
        "1-sqrt",
        0.0,
        "2_000 steps",
    )
    assert run.batch.tokens == 4 * 2**20
    assert run.sources == {"web": SourceSection(path="data/web")}
    assert (run.seed, run.validation, run.monitor.wandb, run.checkpoint.keep_last) == (0, None, "off", 3)
    assert [str(trigger) for trigger in run.checkpoint.every] == ["1000 steps"]
    assert run.model == ModelSection(config="model.json")
    assert (run.model.qk_norm, run.model.z_loss, run.model.activation_checkpointing) == (False, None, False)
    with pytest.raises(ValueError, match="frozen"):
        run.seed = 3  # type: ignore[misc]


def test_a_cosine_needs_no_decay() -> None:
    text = MINIMAL.replace('kind = "wsd"', 'kind = "cosine"').replace('decay = "10%"', "")
    schedule = parse_run(text).schedule
    assert isinstance(schedule, CosineSection)
    assert schedule.min_lr_ratio == 0.1


@pytest.mark.parametrize("spelling", ["0", "0.0", "false", '"off"', '"none"'])
def test_every_spelling_of_no_z_loss_is_none(spelling: str) -> None:
    assert parse_run(MINIMAL, [f"model.z_loss={spelling}"]).model.z_loss is None
    assert parse_run(MINIMAL, ["model.z_loss=1e-4"]).model.z_loss == 1e-4


def test_triggers_may_be_one_or_several() -> None:
    several = parse_run(MINIMAL, ['checkpoint.every=["1000 steps", "10 min", "1B tokens"]'])
    assert [trigger.unit for trigger in several.checkpoint.every] == ["steps", "seconds", "tokens"]
    assert [str(t) for t in parse_run(MINIMAL, ["checkpoint.every=10 min"]).checkpoint.every] == ["10 min"]


OVERRIDES: dict[str, tuple[tuple[str, ...], Any]] = {
    "schedule.peak_lr=2e-4": (("schedule", "peak_lr"), 2e-4),
    "schedule.peak_lr = 1": (("schedule", "peak_lr"), 1.0),
    "name=other": (("name",), "other"),
    "batch.tokens=512K": (("batch", "tokens"), 2**19),
    "batch.tokens=524_288": (("batch", "tokens"), 2**19),
    "model.qk_norm=true": (("model", "qk_norm"), True),
    "monitor.log_every=5": (("monitor", "log_every"), 5),
    "out=a=b": (("out",), "a=b"),
}


@pytest.mark.parametrize(("override", "expected"), OVERRIDES.items(), ids=OVERRIDES)
def test_an_override_replaces_one_value(override: str, expected: tuple[tuple[str, ...], Any]) -> None:
    path, value = expected
    node: Any = parse_run(MINIMAL, [override])
    for key in path:
        node = getattr(node, key)
    assert node == value


def test_an_override_reaches_into_phases_and_sources() -> None:
    run = parse_run(MINIMAL, ["phases.0.seq_len=512", "sources.code=data/code", "phases.0.mixture.code=0.5"])
    assert run.phases[0].seq_len == 512
    assert run.sources["code"].path == "data/code"
    assert run.phases[0].mixture == {"web": 1.0, "code": 0.5}


def test_an_override_reaches_into_a_source_that_is_a_path_and_a_path_keeps_what_is_said_of_it() -> None:
    run = parse_run(MINIMAL, ["sources.web.max_epochs=2", "sources.web=moved", "sources.code.path=code"])
    assert (run.sources["web"].path, run.sources["web"].max_epochs) == ("moved", 2)
    held_out = [*VALIDATION, "validation.sources.held_out.max_document_tokens=9"]
    section = parse_run(MINIMAL, held_out).validation
    assert section is not None
    assert section.sources["held_out"].path == "data/held_out"
    assert section.sources["held_out"].max_document_tokens == 9


VALIDATION = ["validation.every=5 steps", "validation.tokens=64", "validation.sources.held_out=data/held_out"]


def test_held_out_text_has_no_epochs_and_no_order_that_could_be_set() -> None:
    problems = problems_of(MINIMAL, *VALIDATION, "validation.sources.held_out.max_epochs=2")
    assert [problem.partition(";")[0] for problem in problems] == [
        "override of validation.sources.held_out.max_epochs: unknown key "
        "`validation.sources.held_out.max_epochs`"
    ]


def test_what_an_override_made_wrong_names_it_and_what_was_wrong_before_names_the_file() -> None:
    wrong = MINIMAL.replace("seed", "sede") if "seed" in MINIMAL else f"sede = 3\n{MINIMAL}"
    problems = problems_of(wrong, "seed=1", "seed=-1", "sources.code.max_epochs=2", "phases.0.seq_len=none")
    assert sorted(problems) == [
        "override of phases.0.seq_len: `phases.0.seq_len` = null: expected a valid integer",
        "override of seed: `seed` = -1: expected greater than or equal to 0",
        "override of sources.code.max_epochs: `sources.code.path` is missing",
        "run.toml: unknown key `sede`; did you mean `seed`?",
    ]


def test_a_later_override_wins() -> None:
    assert parse_run(MINIMAL, ["seed=1", "seed=2"]).seed == 2


def test_an_override_can_take_back_what_may_be_left_out_and_nothing_else() -> None:
    run = parse_run(MINIMAL, ["checkpoint.local_dir=/nvme", "checkpoint.local_dir=none", "validation=none"])
    assert (run.checkpoint.local_dir, run.validation) == (None, None)
    assert problems_of(MINIMAL, "name=none") == ("override of name: `name` = null: expected a valid string",)
    assert "did you mean `local_dir`" in problems_of(MINIMAL, "checkpoint.lokal_dir=none")[0]


BAD_OVERRIDES = {
    "schedule.peak_lr": "is not of the form section.key=value, like schedule.peak_lr=2e-4",
    "=3": "is not of the form section.key=value",
    "schedule..peak_lr=3": "is not of the form section.key=value",
    "name.first=x": "'name' is not a section of the run file",
    "phases.seq_len=512": "name a key of the list's item, like phases.0.seq_len=512",
    "phases.7.seq_len=512": "'7' is not a section of the run file",
}


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES.items(), ids=BAD_OVERRIDES)
def test_an_override_that_cannot_be_applied_is_named(override: str, message: str) -> None:
    (problem,) = problems_of(MINIMAL, override)
    assert problem.startswith(f"override {override!r}")
    assert message in problem


# An override that makes the run file wrong, and the one message about it.
WRONG = {
    "sched=1": "unknown key `sched`; did you mean `schedule`?",
    "zzz=1": "unknown key `zzz`; known here: name, out, seed,",
    "schedule.warmpu=10%": "unknown key `schedule.warmpu`; did you mean `warmup`?",
    "model.qknorm=true": "unknown key `model.qknorm`; did you mean `qk_norm`?",
    "phases.0.seqlen=5": "unknown key `phases.0.seqlen`; did you mean `seq_len`?",
    "sources.code={ file = 'x', path = 'y' }": "unknown key `sources.code.file`; known here: path",
    "checkpoint.keep_lest=3": "unknown key `checkpoint.keep_lest`; did you mean `keep_last`?",
    "seed=-1": "`seed` = -1: expected greater than or equal to 0",
    "seed=1.5": "`seed` = 1.5: expected a valid integer",
    "seed=true": "`seed` = true: expected a valid integer",
    'seed="7"': '`seed` = "7": expected a valid integer',
    "seed=9223372036854775808": "`seed` = 9223372036854775808: expected less than 9223372036854775808",
    "model.qk_norm=1": "`model.qk_norm` = 1: expected a valid boolean",
    "model.attention=fast": '`model.attention` = "fast": expected "eager", "sdpa" or "flash_attention_2"',
    "model.z_loss=-1": "`model.z_loss` = -1: expected greater than 0",
    "schedule.peak_lr=0": "`schedule.peak_lr` = 0: expected greater than 0",
    "watchdog.skip_update_sigmas=0": "`watchdog.skip_update_sigmas` = 0: expected greater than 0",
    "schedule.peak_lr=inf": "`schedule.peak_lr` = inf: expected a finite number",
    "schedule.min_lr_ratio=1.5": "`schedule.min_lr_ratio` = 1.5: expected less than or equal to 1",
    "schedule.decay_shape=square": '`schedule.decay_shape` = "square": expected "linear", "cosine", '
    '"1-sqrt" or "exp',
    "schedule.kind=linear": '`schedule` = {"kind": "linear", "length"',
    "schedule={ peak_lr = 1.0 }": '`schedule` = {"peak_lr": 1.0}: expected a `kind`',
    "schedule.length=2000": '`schedule.length`: 2000 has no unit; write it as text with one, like "2000',
    "schedule.length=10 min": '`schedule.length`: "10 min" is in seconds; expected steps or tokens',
    "schedule.length=10%": '`schedule.length`: "10%" is in percent; expected steps or tokens',
    "schedule.length=0 steps": '`schedule.length`: "0 steps" is zero; expected more',
    "schedule.warmup=soon": '`schedule.warmup`: "soon" is not a duration; write a number with its unit',
    "schedule.decay=5 min": '`schedule.decay`: "5 min" is in seconds; expected steps or tokens or percent',
    "checkpoint.every=0 min": '`checkpoint.every.0`: "0 min" is zero; expected more',
    "checkpoint.every=10%": '`checkpoint.every.0`: "10%" is in percent; expected steps or tokens or seconds',
    "batch.tokens=4MB": '`batch.tokens`: "4MB" is not a batch size in tokens; write it like 524_288',
    "batch.micro_batch_size=0": "`batch.micro_batch_size` = 0: expected greater than 0",
    "phases=[]": "`phases` = []: expected one or more",
    "phases.0.mixture.web=-1": "`phases.0.mixture.web` = -1: expected greater than 0",
    'sources={ "my web" = "x", web = "y" }': '`sources.my web` = "my web": String should match pattern',
    "name=a/b": '`name` = "a/b": String should match pattern',
    "monitor.wandb=on": '`monitor.wandb` = "on": expected "off", "offline" or "online"',
    # No message speaks of what only a reader of the code knows: tuples, dictionaries, instances, None.
    "model=llama": '`model` = "llama": expected a section with keys',
    "schedule=3": "`schedule` = 3: expected a section with keys",
    "accept_changes=schedule": '`accept_changes` = "schedule": expected a list, like [...]',
    "accept_changes=[3]": "`accept_changes.0` = 3: expected a valid string",
    "checkpoint.every=3": '`checkpoint.every.0`: 3 has no unit; write it as text with one, like "2000 steps"',
    "phases=3": "`phases` = 3: expected a list, like [...]",
    "phases.0.mixture=web": '`phases.0.mixture` = "web": expected a section with keys',
    "phases.0.mixture.web=all": '`phases.0.mixture.web` = "all": expected a valid number',
    "phases.0.mixture.web=1e308": "`phases.0.mixture.web` = 1e+308: expected less than or equal to",
    "sources.shake=3": "`sources.shake` = 3: expected a section with keys",
    "sources={}": "`sources` = {}: expected one or more",
    "validation={ every = '1 step', tokens = 1, sources = {} }": "`validation.sources` = {}: expected",
    "name=3": "`name` = 3: expected a valid string",
    "monitor.log_every=1e0": "`monitor.log_every` = 1.0: expected a valid integer",
    "monitor.log_every=1000000000001": "`monitor.log_every` = 1000000000001: expected less than or equal to",
    'monitor.wandb_project=""': '`monitor.wandb_project` = "": String should have at least 1 character',
    "batch.tokens=1e13": "`batch.tokens`: 10000000000000.0 is more than 1,000,000,000,000",
    'batch.tokens="1e13"': '`batch.tokens`: "1e13" is more than 1,000,000,000,000 tokens; write a',
    "schedule.length=1e99 steps": '`schedule.length`: "1e99 steps" is more than 1,000,000,000 steps; write a',
    "schedule.length=1e19 tokens": '"1e19 tokens" is more than 1,000,000,000,000,000,000 tokens',
    "checkpoint.every=1e99 h": '"1e99 h" is more than 1,000,000,000 seconds; write a shorter duration',
    "out=": '`out`: "" is not a path on this host; write one like',
    'out=" "': '`out`: " " is not a path on this host; write one like',
    "out=~/x": '`out`: "~/x" is not a path on this host; write one like data/web or /data/web (only a shell',
    "deepspeed=~/x": '`deepspeed`: "~/x" is not a path on this host',
    "model.config=~/x": '`model.config`: "~/x" is not a path on this host',
    "sources.web=~/x": '`sources.web.path`: "~/x" is not a path on this host',
    "checkpoint.local_dir=s3://vault/run": '`checkpoint.local_dir`: "s3://vault/run" is not a path on '
    "this host",
    'deepspeed="a\\u0000b"': '`deepspeed`: "a\\u0000b" is not a path on this host',
    'out="a\\u0000b"': '`out`: "a\\u0000b" is not a path on this host',
    "sources.web=": '`sources.web.path`: "" is not a path on this host; write one like',
}


@pytest.mark.parametrize(("override", "message"), WRONG.items(), ids=WRONG)
def test_a_wrong_value_gives_one_message_with_its_place(override: str, message: str) -> None:
    problems = problems_of(MINIMAL, override)
    assert len(problems) == 1, problems
    place = f"override of {override.partition('=')[0]}: "
    assert problems[0].startswith(f"{place}`" if message[0] == '"' else f"{place}{message}")
    assert message in problems[0]
    for word in ("tuple", "dictionary", "instance", "None", "True", "Input should"):
        assert word not in problems[0]


@pytest.mark.parametrize(
    "key", ["name", "out", "deepspeed", "model.config", "schedule.peak_lr", "schedule.decay"]
)
def test_a_missing_key_is_named(key: str) -> None:
    last = key.split(".")[-1]
    lines = [line for line in MINIMAL.splitlines() if not line.startswith(f"{last} = ")]
    if key == "name":
        lines.insert(lines.index("[[phases]]") + 1, 'name = "main"')
    assert problems_of("\n".join(lines)) == (f"run.toml: `{key}` is missing",)


def test_all_problems_come_in_one_report() -> None:
    overrides = ["schedule.peak_lr=-1", "zzz=1", "batch.tokens=no", "bad"]
    assert len(problems_of(MINIMAL, *overrides)) == 4


def test_text_that_is_no_toml_is_refused_with_its_line() -> None:
    (problem,) = problems_of("name = \n")
    assert problem.startswith("run.toml is not valid TOML: ")
    assert "line 1" in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 100_000, "run.toml is not valid TOML: nested too deeply; expected a few levels"),
        ("a = " + "9" * 5000, "run.toml is not valid TOML: Exceeds the limit"),
    ],
    ids=["deep", "long"],
)
def test_toml_that_the_parser_gives_up_on_is_refused(text: str, message: str) -> None:
    (problem,) = problems_of(text)
    assert problem.startswith(message)
    assert "expected a valid integer" in problems_of(MINIMAL, f"seed={text.removeprefix('a = ')}")[0]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert read_text(tmp_path / "run.toml", "run file") == MINIMAL


def test_a_path_that_no_system_call_takes_is_refused() -> None:
    with pytest.raises(InputError, match=r'run file: "a\\u0000b" is not a path .* check the path'):
        read_text("a\0b", "run file")


def test_a_file_that_cannot_be_read_names_the_setting_that_asked_for_it(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        read_text(tmp_path / "missing.json", "run.toml: deepspeed")
    message = str(raised.value)
    assert message.startswith(f"run.toml: deepspeed: cannot read {tmp_path / 'missing.json'} (No such file")
    assert str(Path.cwd()) in message
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    with pytest.raises(InputError, match=r"is not UTF-8 text \(invalid start byte at byte 2\)"):
        read_text(tmp_path / "binary", "run file")


def test_a_run_survives_the_way_to_plain_types_and_back() -> None:
    run = parse_run(MINIMAL, ["checkpoint.every=10 min"])
    assert Run.model_validate(run.model_dump(mode="json")) == run


def test_the_minimal_run_file_is_toml() -> None:
    assert "phases" in tomllib.loads(MINIMAL)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3://key:very-secret@vault/run", "holds a user, a password or a query"),
        ("abfs://vault/run?sig=very-secret", "holds a user, a password or a query"),
        ("s3://", "is not a URL of a location; write one like s3://bucket/folder"),
        ("S3 x://vault", "is not a URL of a location"),
        ("", "is not a path on this host"),
        ("s3:/vault/run", "is not a URL of a location"),
        ("file:///vault/run", "or a folder as a path"),
    ],
)
def test_a_place_to_ship_to_never_holds_or_shows_a_credential(place: str, words: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_run(MINIMAL, [f'checkpoint.upload_to="{place}"'])
    assert words in str(raised.value)
    assert "checkpoint.upload_to" in str(raised.value)
    assert "very-secret" not in str(raised.value)


def test_places_to_ship_to_are_folders_and_urls() -> None:
    for place in ("/vault/run", "vault", "s3://vault/run", "gs://vault"):
        assert parse_run(MINIMAL, [f'checkpoint.upload_to="{place}"']).checkpoint.upload_to == place


def test_none_as_an_override_is_the_value_none_of_an_enumeration_and_else_takes_a_key_back() -> None:
    """In each section: where null is not allowed and "none" is a value, it is that value."""
    parsed = parse_run(MINIMAL, ["batch.lr_scaling=none", "model.z_loss=none", "checkpoint.local_dir=none"])
    assert (parsed.batch.lr_scaling, parsed.model.z_loss, parsed.checkpoint.local_dir) == ("none", None, None)
    found = []
    for section in _all_sections(Run):
        for name, field in section.model_fields.items():
            if "none" in get_args(field.annotation):
                found.append(f"{section.__name__}.{name}")
                assert (
                    TypeAdapter(Annotated[field.annotation, *field.metadata]).validate_python(None) == "none"
                )
    assert found == ["BatchSection.lr_scaling"]


def _all_sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [s for field in section.model_fields.values() for s in find_section_models(field.annotation)]
    return [section, *(each for one in inner for each in _all_sections(one))]


def test_bounds_that_no_document_keeps_are_told_as_such() -> None:
    view = "{ path = 'data/web', min_document_tokens = 5000, max_document_tokens = 100 }"
    [problem] = problems_of(MINIMAL, f"sources.web={view}")
    assert problem == (
        "override of sources.web: `sources.web`: min_document_tokens = 5,000 is more than max_document_"
        "tokens = 100, and no document is both; exchange them, or leave one out"
    )
