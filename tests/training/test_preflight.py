"""Preflight: problems before an engine is opened, and the start summary."""

import json
from pathlib import Path

import pytest

from ds_pretrain.commands import check
from ds_pretrain.commands.check import format_interval
from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.config.schema import WsdSection
from ds_pretrain.core.errors import InputError
from ds_pretrain.training.compatibility import claim_run
from ds_pretrain.training.preflight import find_problems, format_summary, open_inputs
from ds_pretrain.training.record import note_saved
from tests.scenario import LLAMA, deepspeed_json, make_run, write_corpus


def lines_of(plan: Plan, world_size: int | None = None) -> list[str]:
    return list(format_summary(plan, open_inputs(plan), world_size))


def problems_of(plan: Plan, world_size: int | None = None) -> list[str]:
    return find_problems(plan, open_inputs(plan), world_size, "a test")


@pytest.mark.parametrize("world_size", [None, 1, 2, 4])
def test_a_sound_run_has_no_problem_and_nothing_is_written(tmp_path: Path, world_size: int | None) -> None:
    plan = load_plan(make_run(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    assert problems_of(plan, world_size) == []
    lines_of(plan, world_size)
    assert sorted(tmp_path.rglob("*")) == before


def test_p12_the_first_line_is_the_resolved_schedule(tmp_path: Path) -> None:
    overrides = [
        "schedule.length=50_000 steps",
        "schedule.peak_lr=3e-4",
        "schedule.warmup=2000 steps",
        "schedule.decay=10%",
        "schedule.decay_shape=linear",
    ]
    first = lines_of(load_plan(make_run(tmp_path), overrides))[0]
    assert first == (
        "lr         start 0: 0, warmup end 2,000: 0.0003, middle 23,500: 0.0003, decay start 45,000: "
        "0.0003, last 49,999: 6e-08"
    )


def test_p14_the_stable_stretch_is_derived_and_its_boundaries_are_printed(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path, steps=100), ["schedule.warmup=10%", "schedule.decay=20 steps"])
    assert isinstance(plan.schedule, WsdSection)
    assert (plan.schedule.warmup.steps, plan.schedule.decay_start, plan.last_step) == (10, 80, 100)
    first = lines_of(plan)[0]
    assert all(corner in first for corner in ("warmup end 10:", "decay start 80:", "last 99:"))


def test_p14_warmup_and_decay_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exceed schedule"):
        load_plan(make_run(tmp_path, steps=100), ["schedule.warmup=90 steps", "schedule.decay=11 steps"])


def test_p14_no_step_past_the_end_of_the_decay_has_a_rate_or_data(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path, steps=100))
    with pytest.raises(ValueError, match="the schedule covers steps 0 to 100"):
        plan.schedule.lr(101)
    with pytest.raises(ValueError, match="step 100 lies outside the run's 100 steps"):
        plan.timeline.at(100)


def test_the_summary_says_what_the_run_resolves_to(tmp_path: Path) -> None:
    text = "\n".join(lines_of(load_plan(make_run(tmp_path)), 2))
    for fact in (
        "main: steps 0 to 12, 8 sequences of 16 = 128 tokens a step, 1,536 tokens at its end",
        "2 ranks x 2 sequences x accumulation 2 = 8 sequences",
        "ZeRO-3, fp32",
        "llama: ",
        "QK-norm, z-loss 0.0001",
        "source     text: ",
        "source     code: ",
        "validation held_out: ",
        "EOS per 1M tokens",
    ):
        assert fact in text


def test_how_often_documents_end_is_told_beside_the_name_of_the_source_and_warnings_come_after(
    tmp_path: Path,
) -> None:
    plan = load_plan(make_run(tmp_path))
    (tmp_path / "code.json").unlink(missing_ok=True)
    lines = lines_of(plan, 2)
    rates = [line for line in lines if "EOS per 1M" in line or line.startswith("data       ")]
    names = [line.split(":")[0] for line in rates]
    assert names == ["data       text", "data       code", "validation held_out"]
    assert rates[1] == "data       code: not counted"
    after = lines[lines.index(rates[-1]) + 1 :]
    assert any(line.startswith("warning    ") and "nothing says which id is EOS" in line for line in after)


def test_one_of_a_thing_is_told_as_one(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path, batch_tokens=16, micro_batch_size=1))
    text = "\n".join(lines_of(plan, 1))
    assert "1 sequence of 16 = 16 tokens a step" in text
    assert "batch      1 rank x 1 sequence x accumulation 1 = 1 sequence" in text


def test_p30_the_worlds_that_divide_the_batch_are_printed_while_the_world_is_unknown(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path))
    assert "batch      micro-batches of 2; world sizes that divide it: 1, 2, 4" in lines_of(plan)


def test_p30_a_world_that_does_not_divide_the_batch_is_named_with_where_it_came_from(tmp_path: Path) -> None:
    (problem,) = problems_of(load_plan(make_run(tmp_path)), 3)
    assert "world size 3 (from a test) do not multiply out; world sizes that do: 1, 2, 4" in problem


def test_the_epochs_of_a_source_follow_from_its_share(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path, steps=4096))  # 8 sequences a step: 32,768 draws, 8 whole blocks
    inputs = open_inputs(plan)
    share = round(0.7 * 4096) * 8
    epochs = share / inputs.sources["text"].num_samples(16)
    (line,) = [line for line in format_summary(plan, inputs, None) if line.startswith("source     text: ")]
    assert line.endswith(f"70.0% of the draws, {share * 16:,} tokens, {epochs:.2f} epochs")


def test_every_source_that_cannot_be_opened_is_reported_with_its_setting(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    (tmp_path / "code.bin").unlink()
    (tmp_path / "held_out.idx").unlink()
    with pytest.raises(InputError) as raised:
        open_inputs(load_plan(run_file))
    first, second = raised.value.problems
    assert first.startswith(f"{run_file}: sources.code: {tmp_path / 'code.bin'}: no such file;")
    assert second.startswith(
        f"{run_file}: validation.sources.held_out: {tmp_path / 'held_out.idx'}: no such file;"
    )


def test_a_sequence_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    plan = load_plan(run_file, ["phases.0.seq_len=256", "batch.tokens=1024"])
    (problem,) = problems_of(plan)
    assert problem.startswith(
        f"{run_file}: phases.main.seq_len = 256 is longer than max_position_embeddings = 128 in {tmp_path}"
    )
    assert problem.endswith(
        "raise the one or lower the other, or extend the model with phases.main.rope (a theta, or a kind "
        "with a factor)"
    )


def test_a_source_too_rare_to_be_drawn_is_refused(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    (problem,) = problems_of(load_plan(run_file, ["phases.0.mixture.code=1e-6"]))
    assert problem.startswith(f"{run_file}: phases.main: mixture weight of 'code' is 1e-06")


def test_a_source_that_no_mixture_uses_is_warned_of(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    warning = "warning    sources.code is in no mixture, so nothing of it is trained on"
    plan = load_plan(run_file, ["phases.0.mixture={ text = 1.0 }"])
    assert problems_of(plan) == []
    assert warning in lines_of(plan)
    assert warning not in lines_of(load_plan(run_file))


def test_problems_of_the_model_name_its_file(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, model={**LLAMA, "hidden_act": "nope", "hiden_size": 3})
    first, second = problems_of(load_plan(run_file))
    assert first.startswith(f'{tmp_path / "model.json"}: "hidden_act" = "nope"; expected one of gelu, ')
    assert (
        second
        == f'{tmp_path / "model.json"}: LlamaConfig has no key "hiden_size"; did you mean "hidden_size"?'
    )


def test_sources_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    for name, digest in (("text", "aa"), ("code", "bb")):
        write_corpus(tmp_path / name, 0, sidecar={"tokenizer_hash": digest})
    (problem,) = problems_of(load_plan(run_file))
    assert problem.startswith("the sources were prepared with 2 different tokenizers: ")
    assert f"{tmp_path / 'text'} / {tmp_path / 'code'}; prepare them with one" in problem


def test_problems_of_all_parts_come_in_one_list(tmp_path: Path) -> None:
    json_with_partition = deepspeed_json()
    json_with_partition["zero_optimization"]["zero_hpz_partition_size"] = 2
    model = {**LLAMA, "num_attention_heads": 3, "vocab_size": 200}
    problems = problems_of(load_plan(make_run(tmp_path, model=model, deepspeed=json_with_partition)), 3)
    for piece in (
        '"num_attention_heads" = 3',
        "vocab_size",
        "do not multiply out",
        "does not divide 3 ranks",
    ):
        assert any(piece in problem for problem in problems), piece
    assert len(problems) == len(set(problems))


def _measured(out: Path, *records: dict[str, object]) -> None:
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


STEP = {"event": "step", "step": 4, "step_seconds": 2.0}
SAVE = {"event": "checkpoint", "stall_seconds": 0.5, "total_seconds": 8.0}


def test_how_often_to_save_is_said_from_what_was_measured(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path, save_every="100 steps"), ["checkpoint.mtbf=8 h"])
    _measured(plan.out, STEP, SAVE, {"event": "resume", "restore_seconds": 40.0})
    assert list(format_interval(plan)) == [
        "saves      measured: a save blocks training for 0.5 s, a checkpoint is complete after 8 s, a "
        "restore takes 40 s",
        "           a save every 2.8 min loses least: 0.76% of the time is expected to be lost (Daly 2006; "
        "Young 1974 says 2.8 min)",
        "           checkpoint.every is about 3.3 min at present: 0.76% is expected to be lost",
    ]


def test_the_newest_measurements_count_and_torn_lines_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_NEWEST", 3)
    plan = load_plan(make_run(tmp_path, save_every="100 steps"), ["checkpoint.mtbf=8 h"])
    saves = [{**SAVE, "stall_seconds": seconds} for seconds in (9.0, 0.6, 0.5, 0.7)]
    _measured(plan.out, STEP, *saves, {"event": "resume"}, {"event": "resume", "restore_seconds": "nan"})
    with (plan.out / "metrics.jsonl").open("a") as torn:
        torn.write('{"event": "checkpoint", "stall_sec')
    first, *_ = format_interval(plan)
    assert "blocks training for 0.6 s" in first
    assert "a restore takes an unknown time" in first


def test_of_several_triggers_the_first_to_come_is_the_interval(tmp_path: Path) -> None:
    every = 'checkpoint.every=["100 steps", "4_000 tokens", "10 min"]'  # 200 s, 32 steps = 64 s, 600 s
    plan = load_plan(make_run(tmp_path), [every, "checkpoint.mtbf=8 h"])
    _measured(plan.out, STEP, SAVE)
    lines = list(format_interval(plan))
    assert "a restore takes an unknown time" in lines[0]
    assert "about 64 s at present" in lines[2]


def test_an_interval_in_tokens_counts_the_batch_of_where_the_run_stands(tmp_path: Path) -> None:
    """A batch twice as large since step 4: so half as many steps, of 2 s each."""
    ramp = 'batch.ramp={"0" = "64", "4 steps" = "128"}'
    every = 'checkpoint.every=["2_560 tokens"]'
    plan = load_plan(make_run(tmp_path), [ramp, every, "checkpoint.mtbf=8 h"])
    _measured(plan.out, STEP, SAVE)
    assert "about 80 s at present" in list(format_interval(plan))[2]
    (plan.out / "metrics.jsonl").unlink()
    plan.out.rmdir()
    _measured(plan.out, STEP, SAVE, {**STEP, "step": 5})
    assert "about 40 s at present" in list(format_interval(plan))[2]


def test_a_stall_above_its_share_is_a_warning(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path, save_every="4 steps"), ["checkpoint.mtbf=8 h"])
    _measured(plan.out, STEP, SAVE)
    assert list(format_interval(plan))[-1].startswith("warning    saves block training for 0.5 s each, 6.2%")
    allowed = load_plan(plan.run_path, ["checkpoint.mtbf=8 h", "checkpoint.max_stall_fraction=0.1"])
    assert not any(line.startswith("warning") for line in format_interval(allowed))


def test_what_the_advice_needs_is_one_line(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path))
    mtbf = 'checkpoint.mtbf, the mean time between failures here (like "8 h")'
    save = "a first save of this run, to be measured"
    assert list(format_interval(plan)) == [f"saves      advice on checkpoint.every needs {mtbf} and {save}"]
    assert list(format_interval(load_plan(plan.run_path, ["checkpoint.mtbf=8 h"]))) == [
        f"saves      advice on checkpoint.every needs {save}"
    ]
    _measured(plan.out, SAVE)
    assert list(format_interval(plan)) == [f"saves      advice on checkpoint.every needs {mtbf}"]


def test_check_ends_with_the_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(make_run(tmp_path))]) == 0
    assert capsys.readouterr().out.splitlines()[-2].startswith("saves      advice on checkpoint.every needs")


def test_a_phase_whose_masks_take_much_memory_is_warned_of(tmp_path: Path) -> None:
    model = {**LLAMA, "max_position_embeddings": 1 << 16}
    run_file = make_run(tmp_path, batch_tokens=1 << 15, micro_batch_size=1, model=model)
    for name in ("text", "code", "held_out"):
        write_corpus(tmp_path / name, 0, num_documents=2000)
    long = ["phases.0.seq_len=32_768", "model.mask_documents=true"]
    [warning] = [line for line in lines_of(load_plan(run_file, long)) if "mask_documents" in line]
    assert "phases.main: model.mask_documents = true holds a mask of 1 x 1 x 32,768 x 32,768" in warning
    assert "in fp32, 4.0 GiB a micro-batch" in warning
    plain = load_plan(run_file, [long[0], "model.mask_documents=false"])
    assert not [line for line in lines_of(plain) if "mask_documents" in line]


def _with_config(config: dict[str, object], zero: dict[str, object]) -> dict[str, object]:
    base = deepspeed_json(3)
    return {**base, **config, "zero_optimization": {**base["zero_optimization"], **zero}}


@pytest.mark.parametrize(
    ("config", "zero", "needs"),
    [
        (
            {"bf16": {"enabled": True, "check_grad_overflow": False}},
            {"stage": 2},
            "`bf16.check_grad_overflow` = true in {json}: else it applies any update",
        ),
        (
            {},
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            'no offload to nvme in {json}: use "cpu" or none',
        ),
        ({"torch_autocast": {"enabled": True}}, {}, "`torch_autocast` off in {json}: use bf16"),
    ],
    ids=["no check", "nvme", "autocast"],
)
def test_updates_are_not_dropped_where_that_is_not_known_to_be_exact(
    tmp_path: Path, config: dict[str, object], zero: dict[str, object], needs: str
) -> None:
    run_file = make_run(tmp_path, deepspeed=_with_config(config, zero))
    assert problems_of(load_plan(run_file)) == []
    assert problems_of(load_plan(run_file, ["watchdog.skip_update_sigmas=20"])) == [
        f"{run_file}: watchdog.skip_update_sigmas needs {needs.format(json=tmp_path / 'deepspeed.json')}; "
        "or delete skip_update_sigmas"
    ]


def test_a_limit_within_the_usual_norms_is_refused(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    assert problems_of(load_plan(run_file, ["watchdog.skip_update_sigmas=8"])) == []
    assert problems_of(load_plan(run_file, ["watchdog.skip_update_sigmas=7.5"])) == [
        f"{run_file}: watchdog.skip_update_sigmas = 7.5 is below watchdog.norm_sigmas = 8, so updates "
        f"with normal norms would be skipped and the sigma would shrink with each; raise "
        f"skip_update_sigmas or lower norm_sigmas"
    ]


def test_rotary_values_of_the_model_config_are_looked_at(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 1.0}))
    plan = load_plan(run_file)
    assert any('"rope_theta" = 1: expected 2' in p for p in find_problems(plan, open_inputs(plan), 1, "here"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": "10k"}))
    plan = load_plan(plan.run_path)
    assert any('"rope_theta": "10k"' in p for p in find_problems(plan, open_inputs(plan), 1, "here"))


def test_checkpoints_that_are_gone_are_told_before_a_rank_wakes(tmp_path: Path) -> None:
    """Unless they may be fetched."""
    plan = load_plan(make_run(tmp_path))
    plan.out.mkdir()
    claim_run(plan, open_inputs(plan).data, None)
    assert problems_of(plan) == []
    note_saved(plan.out, 9)
    (problem,) = problems_of(plan)
    assert problem.startswith(f"{plan.out} had a checkpoint at step 9 and now has none;")
    shipped = [
        "checkpoint.local_dir=" + str(tmp_path / "local"),
        f"checkpoint.upload_to={tmp_path / 'vault'}",
    ]
    assert problems_of(load_plan(plan.run_path, shipped)) == []
