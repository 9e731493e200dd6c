"""What can be seen in the first batch to be wrong, said before time is spent on it."""

from __future__ import annotations

from torch import Tensor, nn

from .._errors import MemtrainError


def check_loss(loss: Tensor, model: nn.Module) -> None:
    """Raises MemtrainError when no backward pass can start from ``loss``."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise MemtrainError(
            f"The family's loss must be a tensor with one element; it returned {shape}. Reduce it, "
            "for example with .mean()."
        )
    if not loss.requires_grad:
        raise MemtrainError(
            "No parameter will receive a gradient: the loss of the first batch has no graph. The "
            "family's loss was computed under torch.no_grad(), from detached tensors, or without "
            f"any of the {sum(1 for _ in model.parameters())} parameters."
        )


def check_gradients_arrive(model: nn.Module) -> list[str]:
    """Looks at the gradients of the first batch; returns what the user should know.

    Raises:
        MemtrainError: No parameter received a gradient.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    without = [name for name, p in trained if p.grad is None]
    if len(without) == len(trained):
        raise MemtrainError(
            f"None of the {len(trained)} parameters received a gradient in the first batch: the "
            "loss depends on tensors that are not the model's, or passes through a detach()."
        )
    if not without:
        return []
    names = ", ".join(without[:3]) + (", ..." if len(without) > 3 else "")
    return [
        f"{len(without)} of {len(trained)} parameters received no gradient in the first batch "
        f"and will not be trained by it: {names}"
    ]
