"""Parameters are born in the type that the DeepSpeed JSON asks for."""

import deepspeed
import pytest
from torch import nn

from ds_pretrain.core.distributed import World
from ds_pretrain.engine.start import dtype_of, partition
from tests.ranks import run_ranks
from tests.scenario import deepspeed_json


def _type_at_birth(world: World, bf16: bool, has_fp16: bool) -> bool:
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: has_fp16
    config = {**deepspeed_json(bf16=bf16), "train_micro_batch_size_per_gpu": 1}
    with partition(config)():
        linear = nn.Linear(4, 4)
    return linear.weight.ds_tensor.dtype == dtype_of(config)


@pytest.mark.parametrize("has_fp16", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_sharded_parameters_have_the_type_of_the_json_on_any_hardware(bf16: bool, has_fp16: bool) -> None:
    assert run_ranks(_type_at_birth, 1, bf16, has_fp16) == [True]
