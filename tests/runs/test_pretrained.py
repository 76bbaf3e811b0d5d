"""A run that begins with the weights of a public model computes what that model computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_FINISHED
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.core.state import RunState
from ds_pretrain.data.loader import BatchLoader
from ds_pretrain.data.tokenizer import load_tokenizer
from ds_pretrain.engine.engine import initialize_distributed
from ds_pretrain.models.param_groups import iterate_parameters
from ds_pretrain.training.curriculum import open_sampler
from ds_pretrain.training.preflight import open_inputs
from ds_pretrain.training.setup import open_run_engine
from tests.harness import Record, start
from tests.ranks import run_ranks
from tests.runs.results import trace
from tests.scenario import deepspeed_json, make_run, write_corpus
from tests.tiers import slow

SMALL = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "tie_word_embeddings": False, "rope_theta": 5e5},
    "mixtral": {**SMALL, "tie_word_embeddings": False, "num_local_experts": 4},
    "qwen3": {**SMALL, "tie_word_embeddings": True, "head_dim": 8},
    "gpt2": {
        "vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": 256,
    },
}  # fmt: skip


def make_base(folder: Path, family: str, **options: Any) -> Any:
    """A model of random weights, larger than initial ones, saved as public ones are; it, too."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **BASES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **options)
    return model.eval()


def make_run_from(folder: Path, base: Path, more: str = "") -> Path:
    """A run file whose [model] is the base's."""
    run_file = make_run(folder, steps=4, batch_tokens=128)
    text = run_file.read_text().replace(
        f'config = "{folder}/model.json"\nqk_norm = true', f'pretrained = "{base}"{more}'
    )
    run_file.write_text(text)
    return run_file


def _logits(world: World, run_file: str, ids: list[list[int]]) -> Any:
    """Of the engine as a start opens it, and the share of the weights that this rank holds."""
    initialize_distributed(world)
    plan = load_plan(run_file)
    engine = open_run_engine(plan, world, open_inputs(plan).pretrained)
    tensors = torch.tensor(ids)
    with engine.evaluation_mode(), torch.no_grad():
        logits = engine.logits(tensors, None)
    weights: list[Any] = [weight for _, _, weight in iterate_parameters(engine.module)]
    large = [weight for weight in weights if weight.ds_numel > 1024]
    held, whole = sum(w.ds_tensor.numel() for w in large), sum(w.ds_numel for w in large)
    return logits.tolist(), held / whole


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {"max_shard_size": "20KB"}), slow("qwen3", {}), slow("gpt2", {})]
)
def test_the_first_loss_is_that_of_the_model_in_plain_transformers(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    model = make_base(tmp_path / "base", family, **options)
    run_file = make_run_from(tmp_path, tmp_path / "base")
    ids = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
    for logits, _ in run_ranks(_logits, 2, str(run_file), ids.tolist()):
        torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-5, rtol=1e-4)

    ranks = run_ranks(start, 2, str(run_file), ("schedule.warmup=0 steps",))
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2, ranks[0].stderr
    assert f"kinds loaded from {tmp_path}/base (fingerprint " in ranks[0].stdout
    assert "drawn" not in ranks[0].stdout
    first = trace(tmp_path / "out")[0]
    assert first["loss"] == pytest.approx(_first_loss(load_plan(run_file), model), abs=1e-5)
    identity = json.loads((tmp_path / "out" / "run.json").read_text())["identity"]["model"]
    base = open_inputs(load_plan(run_file)).pretrained
    assert base is not None
    assert identity["pretrained"] == base.fingerprint
    assert next(r["event"] for r in read_metrics(tmp_path / "out/metrics.jsonl")) == "start"
    [again] = run_ranks(start, 1, str(run_file), ("schedule.warmup=0 steps",))
    assert "all 4 steps done" in again.stdout
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    model.save_pretrained(tmp_path / "base", **options)
    [again] = run_ranks(start, 1, str(run_file), ("schedule.warmup=0 steps",))
    assert f'but the run in {tmp_path}/out was started with "{base.fingerprint}"' in again.stderr


def _first_loss(plan: Any, model: Any) -> float:
    """Of the first batch, by plain Transformers."""
    inputs = open_inputs(plan)
    with BatchLoader(open_sampler(plan, inputs.sources), inputs.sources, World(), {"main": 2}, False) as feed:
        batch = feed.at(RunState())
        total, count = 0.0, 0
        for micro in batch.micro_batches:
            with torch.no_grad():
                logits = model(micro.input_ids).logits.float()
            valid = micro.labels >= 0
            total += torch.nn.functional.cross_entropy(
                logits[valid], micro.labels[valid], reduction="sum"
            ).item()
            count += int(valid.sum())
    return total / count


def test_a_body_without_the_heads_prefix_and_with_computed_buffers_is_taken(tmp_path: Path) -> None:
    """As openai-community/gpt2 is laid out."""
    model = make_base(tmp_path / "base", "gpt2")
    file = tmp_path / "base" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, file)
    run_file = make_run_from(tmp_path, tmp_path / "base")
    ids = [[1, 2, 3, 4]]
    [(logits, _)] = run_ranks(_logits, 1, str(run_file), ids)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.tensor(logits), model(torch.tensor(ids)).logits, atol=1e-5, rtol=1e-4
        )


def test_the_weights_are_never_whole_on_a_rank(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "llama")
    run_file = make_run_from(tmp_path, tmp_path / "base")
    settings = json.loads((tmp_path / "deepspeed.json").read_text())
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (tmp_path / "deepspeed.json").write_text(json.dumps(settings))
    for _, held in run_ranks(_logits, 2, str(run_file), [[1, 2]]):
        assert held <= 0.51


@pytest.mark.parametrize(("stage", "bf16"), [slow(1, False), slow(2, True), (3, True)])
def test_it_is_the_same_in_each_stage_and_rounded_once_in_bf16(
    tmp_path: Path, stage: int, bf16: bool
) -> None:
    model = make_base(tmp_path / "base", "llama")
    run_file = make_run_from(tmp_path, tmp_path / "base")
    (tmp_path / "deepspeed.json").write_text(json.dumps(deepspeed_json(stage, bf16)))
    ranks = run_ranks(start, 2, str(run_file), ("schedule.warmup=0 steps",))
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2, ranks[0].stderr
    expected = _first_loss(load_plan(run_file), model)
    assert trace(tmp_path / "out")[0]["loss"] == pytest.approx(expected, abs=2e-3 if bf16 else 1e-5)


def test_a_family_whose_files_have_another_layout_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Mixtral's experts are stored one by one, and computed fused."""
    make_base(tmp_path / "base", "mixtral")
    [ended] = run_ranks(start, 1, str(make_run_from(tmp_path, tmp_path / "base")))
    assert ended.code == EXIT_BAD_INPUT
    assert "model.layers.0.mlp.experts.gate_up_proj [4, 128, 32]" in ended.stderr
    assert "names have to be those of the model's own code in the installed Transformers" in ended.stderr


def test_weights_that_do_not_fit_are_named_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_base(tmp_path / "base", "qwen3")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 32)
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(64, 32)
    save_file(tensors, file)
    run_file = make_run_from(tmp_path, tmp_path / "base")
    ranks = run_ranks(start, 2, str(run_file))
    assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
    said = ranks[0].stderr
    assert "lacks 1 of the model's tensors: model.layers.1.mlp.up_proj.weight [64, 32]" in said
    assert (
        "in another shape 1 of the model's tensors: model.layers.0.mlp.up_proj.weight [3, 32], expected [64"
        in said
    )
    assert "has 1 tensor that the model of its config.json does not have: model.layers.7" in said
    assert not (tmp_path / "out" / "run.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_pretrain.models.config_check._can_import", lambda: False)
        assert main(["check", str(run_file)]) == 0
    assert (
        f"how the model is built, and whether the tensors of {tmp_path}/base fit it"
        in capsys.readouterr().out
    )
    assert refusal(capsys, run_file).replace("ds-pretrain: ", "ds_pretrain: ") == said

    save_file(load_file(file) | {"lm_head.weight": torch.zeros(257, 32)}, file)
    make_base(tmp_path / "tied", "qwen3")
    tied = load_file(tmp_path / "tied" / "model.safetensors") | {"lm_head.weight": torch.zeros(257, 32)}
    save_file(tied, tmp_path / "tied" / "model.safetensors")
    run_file = make_run_from(tmp_path, tmp_path / "tied")
    [ended] = run_ranks(start, 1, str(run_file))
    assert "and lm_head.weight with different values, and its config ties them" in ended.stderr


def test_a_tied_head_that_is_sick_like_its_embedding_is_told_as_sick(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "qwen3")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][3, 3] = float("nan")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    [ended] = run_ranks(start, 1, str(make_run_from(tmp_path, tmp_path / "base")))
    assert ended.code == EXIT_BAD_INPUT
    assert "model.embed_tokens.weight has 1 of 8,224 values that are NaN or infinite" in ended.stderr


@pytest.mark.parametrize("stage", [slow(1), 3])
def test_values_that_are_no_numbers_are_refused_on_every_rank_with_their_tensors(
    tmp_path: Path, stage: int
) -> None:
    make_base(tmp_path / "base", "llama")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    tensors["model.layers.1.mlp.up_proj.weight"][1] = float("inf")
    save_file(tensors, file)
    run_file = make_run_from(tmp_path, tmp_path / "base")
    (tmp_path / "deepspeed.json").write_text(json.dumps(deepspeed_json(stage)))
    ranks = run_ranks(start, 2, str(run_file))
    assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
    said = ranks[0].stderr
    for name, count in (("model.layers.0", 1), ("model.layers.1", 32)):
        assert (
            f"{file}: {name}.mlp.up_proj.weight has {count} of 2,048 values that are NaN or infinite" in said
        )
    assert ranks[1].stderr == ""


def test_a_tensor_that_cannot_be_read_ends_every_rank_alike(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "llama")
    run_file = make_run_from(tmp_path, tmp_path / "base")
    ranks = run_ranks(_start_on_a_sick_disk, 2, str(run_file))
    assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
    assert "model.norm.weight cannot be read (a sector is gone); look at that disk" in ranks[0].stderr


def _start_on_a_sick_disk(world: World, run_file: str) -> Record:
    import safetensors

    opened: Any = safetensors.safe_open

    class Sick:
        def __init__(self, *words: Any) -> None:
            self._file: Any = opened(*words)

        def __enter__(self) -> "Sick":
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_tensor(self, name: str) -> torch.Tensor:
            if name == "model.norm.weight":
                raise SafetensorError("a sector is gone")
            tensor: torch.Tensor = self._file.get_tensor(name)
            return tensor

    vars(safetensors)["safe_open"] = Sick  # in a process that ends with the test
    return start(world, run_file)


def refusal(capsys: pytest.CaptureFixture[str], run_file: Path, *overrides: str) -> str:
    capsys.readouterr()
    assert main(["check", str(run_file), *overrides]) == 2
    return capsys.readouterr().err


def test_a_folder_that_holds_no_usable_model_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_base(tmp_path / "base", "llama")
    run_file = make_run_from(tmp_path, tmp_path / "base")
    assert main(["check", str(run_file)]) == 0
    nowhere, config = f"model.pretrained={tmp_path}/no", f"model.config={tmp_path}/base/config.json"
    assert f"model.pretrained: cannot read {tmp_path}/no/config.json (No such" in refusal(
        capsys, run_file, nowhere
    )
    assert "is not a folder; name one with a config.json" in refusal(capsys, run_file, nowhere, config)
    file = tmp_path / "base" / "model.safetensors"
    whole = file.read_bytes()
    for cut, reason in (
        (len(whole) - 9, "bytes, its header says"),
        (50, "ends in its header"),
        (3, "ends in its"),
    ):
        file.write_bytes(whole[:cut])
        assert reason in refusal(capsys, run_file)
    file.write_bytes(b"\xff" * 100)
    assert "does not begin as a safetensors file does" in refusal(capsys, run_file)
    file.unlink()
    assert "model.safetensors or model.safetensors.index.json, and has neither" in refusal(capsys, run_file)
    (tmp_path / "base" / "pytorch_model.bin").touch()
    assert "has only pickles (pytorch_model.bin), which can run code; convert" in refusal(capsys, run_file)
    index = tmp_path / "base" / "model.safetensors.index.json"
    for text, reason in (
        ("[]", "must hold one JSON object, found a list"),
        ("{", "is not valid JSON"),
        (
            '{"metadata": {}}',
            'should have a "weight_map", which says in which file each tensor is; it has ["met',
        ),
        ('{"weight_map": {"a": 3}}', 'each tensor is; found {"a": 3}: download it again'),
        ('{"weight_map": {}}', "each tensor is; found {}: download it again"),
    ):
        index.write_text(text)
        said = refusal(capsys, run_file)
        assert f"model.pretrained: {index} " in said
        assert reason in said


@pytest.mark.parametrize("entry", ["[]", "{}", '{"dtype": 3, "shape": [1], "data_offsets": [0, 4]}'])
def test_a_header_that_is_none_of_safetensors_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: str
) -> None:
    make_base(tmp_path / "base", "llama")
    run_file = make_run_from(tmp_path, tmp_path / "base")
    header = f'{{"a": {entry}}}'.encode()
    file = tmp_path / "base" / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert f"{file} cannot be used (its header is not one of safetensors); download" in refusal(
        capsys, run_file
    )


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_weights_that_are_codes_are_refused_by_their_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype, kind: str
) -> None:
    make_base(tmp_path / "base", "llama")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, file)
    run_file = make_run_from(tmp_path, tmp_path / "base")
    said = refusal(capsys, run_file)
    assert (
        f"has 1 of the model's tensors as numbers that no weights are trained as: {name} ({kind}); " in said
    )
    assert "expected F32, BF16, F16, F64: take the model from before it was quantized" in said
    [ended] = run_ranks(start, 1, str(run_file))
    assert (ended.code, ended.stderr) == (EXIT_BAD_INPUT, said.replace("ds-pretrain: ", "ds_pretrain: "))
    for taken in (torch.float16, torch.bfloat16, torch.float64):
        save_file({key: tensor.to(taken) for key, tensor in tensors.items()}, file)
        assert main(["check", str(run_file)]) == 0


def test_what_does_not_go_with_the_learned_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_base(tmp_path / "base", "llama")
    run_file = make_run_from(tmp_path, tmp_path / "base", "\nqk_norm = true")
    said = refusal(capsys, run_file)
    assert "model.qk_norm = true adds norms to a model that was trained without them" in said
    own = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**own, "num_hidden_layers": 3}))
    said = refusal(capsys, run_file, f"model.config={tmp_path}/model.json")
    assert f"model.json says num_hidden_layers = 3, and {tmp_path}/base/config.json says 2; leave" in said
    aside = {"transformers_version": "4.1", "use_cache": False, "dtype": "bfloat16", "architectures": []}
    (tmp_path / "model.json").write_text(json.dumps(own | aside))
    assert main(["check", str(run_file), f"model.config={tmp_path}/model.json", "model.qk_norm=false"]) == 0
    assert "unknown key `model.base`" in refusal(capsys, run_file, f"model.base={tmp_path}")


def test_p41_the_tokenizer_of_the_model_has_to_be_that_of_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_base(tmp_path / "base", "llama")
    run_file = make_run_from(tmp_path, tmp_path / "base")
    vocabulary = {f"t{i}": i for i in range(256)} | {"<eos>": 256}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(tmp_path / "base" / "tokenizer.json"))
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    right = load_tokenizer(str(tmp_path / "base"))
    names = ("text", "code", "held_out")
    for digest, code in ((right.hash, 0), ("f" * 64, 2)):
        for seed, name in enumerate(names):
            sidecar = {"tokenizer": "elsewhere", "tokenizer_hash": digest, "eos_token": "<eos>"}
            write_corpus(tmp_path / name, seed, sidecar=sidecar)
        capsys.readouterr()
        assert main(["check", str(run_file)]) == code
    said = capsys.readouterr().err
    assert "was prepared with the tokenizer 'elsewhere' (hash ffffffffffffffff), and the model in" in said
    assert f"the same ids mean other text; prepare it with --tokenizer {tmp_path}/base" in said


def test_a_tokenizer_that_could_not_be_compared_is_told_and_a_broken_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_base(tmp_path / "base", "llama")
    run_file = make_run_from(tmp_path, tmp_path / "base")
    assert main(["check", str(run_file)]) == 0
    said = capsys.readouterr().out
    assert f"warning    {tmp_path}/base has no tokenizer.json, so the sources' tokenizer could not be" in said
    file = tmp_path / "base" / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(file))
    assert main(["check", str(run_file)]) == 0
    silent = ", ".join(f"{tmp_path}/{name}" for name in ("text", "code", "held_out"))
    assert f"warning    nothing says which tokenizer wrote {silent}, so it" in capsys.readouterr().out
    file.write_bytes(file.read_bytes()[:-40])
    said = refusal(capsys, run_file)
    assert f"tokenizer {tmp_path}/base: its tokenizer.json cannot be read" in said
    assert said.count("tokenizer.json") == 1
