"""ds_pretrain: pretraining of language models on DeepSpeed, built to lose nothing on the way."""

__version__ = "0.1.0"
