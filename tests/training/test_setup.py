"""A model is put into the phase of a step, and a person is told which that is."""

from pathlib import Path

import pytest
from torch import nn

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.training.setup import PhaseSwitch
from tests.scenario import LLAMA, make_run

LONG = "[[phases]]\nname = 'long'\nstart = '8 steps'\nseq_len = 32\nmixture = { text = 1.0 }\n[validation]"


def test_where_a_start_goes_on_within_a_phase_both_its_step_and_that_of_the_phase_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = make_run(tmp_path)
    run_file.write_text(run_file.read_text().replace("[validation]", LONG))
    models = {"main": LLAMA, "long": LLAMA}
    monkeypatch.setattr("ds_pretrain.training.setup.apply_rope", lambda module, model: 1)
    monkeypatch.setattr("ds_pretrain.training.setup.set_recompute", lambda module, recompute: None)
    for steps, told in (((10, 11), "long at step 10, begun at step 8: "), ((7, 8), "long from step 8: ")):
        stages = PhaseSwitch(load_plan(run_file), nn.Identity(), models, World())
        for step in steps:
            stages.enter(step)
        *_, line = capsys.readouterr().out.splitlines()
        assert line.startswith(f"phase      {told}")
