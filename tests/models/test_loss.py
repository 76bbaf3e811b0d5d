"""Cross-entropy and z-loss: fp64 agreement, masking, and independence of how a batch is split."""

import math

import pytest
import torch
from torch import Tensor

from ds_pretrain.models.loss import cross_entropy_and_z, token_losses


def _reference(logits: Tensor, labels: Tensor, z: float) -> tuple[Tensor, Tensor]:
    """The definition, in fp64 through autograd."""
    valid = labels != -100
    kept, targets = logits.double()[valid], labels[valid]
    lse = torch.logsumexp(kept, -1)
    nll = (lse - kept.gather(-1, targets[:, None])[:, 0]).sum()
    return nll, z * lse.square().sum()


def _batch(
    rows: int, vocabulary: int, scale: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (scale * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[::2] = -100
    return logits, labels


@pytest.mark.parametrize("chunk_rows", [None, 1, 3])
def test_values_and_gradients_are_those_of_the_definition(chunk_rows: int | None) -> None:
    logits, labels = _batch(10, 33, 3.0)
    ours, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    nll, z = cross_entropy_and_z(ours, labels, 1e-2, chunk_rows=chunk_rows)
    nll_reference, z_reference = _reference(reference, labels, 1e-2)
    assert nll.item() == pytest.approx(nll_reference.item(), rel=1e-6)
    assert z.item() == pytest.approx(z_reference.item(), rel=1e-6)
    (2.0 * nll + 3.0 * z).backward()  # each sum has a factor of its own
    (2.0 * nll_reference + 3.0 * z_reference).backward()
    torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=1e-5, atol=1e-7)


def test_only_one_of_the_sums_may_be_used() -> None:
    logits, labels = _batch(10, 33, 3.0)
    for index in (0, 1):
        ours, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
        cross_entropy_and_z(ours, labels, 1e-2)[index].backward()
        _reference(reference, labels, 1e-2)[index].backward()
        torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=1e-5, atol=1e-7)


def test_p31_the_loss_does_not_depend_on_how_the_batch_is_split() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 16, 50, generator=generator)  # [B, T, V]
    labels = torch.randint(0, 50, (8, 16), generator=generator)  # [B, T]
    for sequence in range(8):
        labels[sequence, sequence + 1 :] = -100  # 1 to 8 valid tokens
    num_valid = 36
    results = []
    for num_parts in (1, 2, 4, 8):
        leaf = logits.clone().requires_grad_()
        total = 0.0
        for part, targets in zip(leaf.chunk(num_parts), labels.chunk(num_parts), strict=True):
            nll, z = cross_entropy_and_z(part, targets, 1e-3)
            loss = (nll + z) / num_valid
            loss.backward()
            total += loss.item()
        results.append((total, leaf.grad))
    for total, gradient in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-6, atol=1e-9)


def test_p32_a_batch_without_valid_labels_gives_zero_with_zero_gradients() -> None:
    logits = torch.randn(4, 16)
    logits[1, 3] = math.inf  # even where an ignored position holds nonsense
    logits[2, 3] = math.nan
    logits.requires_grad_()
    nll, z = cross_entropy_and_z(logits, torch.full((4,), -100), 1e-3)
    assert (nll.item(), z.item()) == (0.0, 0.0)
    ((nll + z) / 10).backward()
    assert torch.equal(logits.grad, torch.zeros(4, 16))


def test_p33_bf16_logits_agree_with_fp64_in_value_and_gradient() -> None:
    logits, labels = _batch(4, 16, 100.0, torch.bfloat16)
    ours, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    nll, z = cross_entropy_and_z(ours, labels, 1e-4)
    nll_reference, z_reference = _reference(reference, labels, 1e-4)
    assert nll.item() == pytest.approx(nll_reference.item(), rel=1e-3)
    assert z.item() == pytest.approx(z_reference.item(), rel=1e-3)
    (nll + z).backward()
    (nll_reference + z_reference).backward()
    # bf16 itself rounds by up to 2^-9: beyond that rounding, nothing is lost.
    torch.testing.assert_close(ours.grad, reference.grad.bfloat16(), rtol=0.0, atol=0.0)
    wide = logits.float().requires_grad_()
    sum(cross_entropy_and_z(wide, labels, 1e-4)).backward()
    torch.testing.assert_close(wide.grad.double(), reference.grad, rtol=1e-3, atol=1e-9)


def test_z_loss_is_exactly_absent_when_off() -> None:
    logits, labels = _batch(10, 33, 3.0, torch.bfloat16)
    gradients = []
    for z_loss in (None, 1e-300):  # the second runs the z path with nothing in it
        leaf = logits.clone().requires_grad_()
        nll, z = cross_entropy_and_z(leaf, labels, z_loss)
        (nll + z).backward()
        gradients.append((nll.item(), leaf.grad))
        assert z.item() == 0.0
    assert gradients[0][0] == gradients[1][0]
    assert torch.equal(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize("label", [-1, -101, 16, 1000])
def test_a_label_outside_the_vocabulary_is_an_error(label: int) -> None:
    labels = torch.tensor([0, label, 3])
    with pytest.raises(ValueError, match=rf"label {label} at position 1 is outside the vocabulary \[0, 16\)"):
        cross_entropy_and_z(torch.randn(3, 16), labels, None)


def test_logits_and_labels_must_have_one_shape() -> None:
    with pytest.raises(ValueError, match=r"need labels of \(2, 3\)"):
        cross_entropy_and_z(torch.randn(2, 3, 16), torch.zeros(2, 4, dtype=torch.long), None)


def test_no_fp32_copy_of_all_logits_is_made() -> None:
    """Every tensor that the loss makes, but the gradient itself, is of one chunk at most."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        largest_wide = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float32:
                Sizes.largest_wide = max(Sizes.largest_wide, result.numel())
            return result

    logits, labels = _batch(64, 128, 3.0, torch.bfloat16)
    logits.requires_grad_()
    with Sizes():
        sum(cross_entropy_and_z(logits, labels, 1e-4, chunk_rows=4)).backward()
    assert Sizes.largest_wide == 4 * 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [None, 3])
def test_the_losses_of_tokens_are_those_whose_sum_training_takes(
    dtype: torch.dtype, chunk_rows: int | None
) -> None:
    logits, labels = _batch(10, 33, 3.0, dtype)
    losses = token_losses(logits.view(2, 5, 33), labels.view(2, 5), chunk_rows=chunk_rows)
    assert (losses.shape, losses.dtype) == ((2, 5), torch.float32)
    expected = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none", ignore_index=-100)
    assert losses.flatten().tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert (losses.flatten()[::2] == 0).all()
    nll, _ = cross_entropy_and_z(logits, labels, None)
    assert losses.sum(dtype=torch.float64).float().item() == nll.item()


def test_the_losses_of_tokens_refuse_what_the_sum_refuses() -> None:
    logits, labels = _batch(10, 33, 3.0)
    with pytest.raises(ValueError, match=r"outside the vocabulary \[0, 33\)"):
        token_losses(logits, labels.clamp(min=0) + 33)
    with pytest.raises(ValueError, match="need labels of"):
        token_losses(logits, labels[1:])
