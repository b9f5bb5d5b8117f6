"""One product in place of several over the same input: the weights of the layers are rows of one matrix.

The layers hold views of it and nobody else holds anything: their names in a state dict stay, a layer that is moved or
given another tensor simply no longer lies beside the others, which is looked at before every use, and the memory goes
back when the last of them lets go of it. A copy or a pickle of the layers is not fused. Used by self-attention for q, k
and v.
"""

import torch
from torch import nn


def fuse_rows(*layers: nn.Linear) -> None:
    """Copy weights and biases of the layers, equally wide, into one matrix and one vector, of which they become views.

    Holds both copies for a moment.
    """
    for name in ("weight", "bias"):
        fused = torch.cat([getattr(layer, name).detach() for layer in layers])
        for layer, rows in zip(layers, fused.chunk(len(layers)), strict=True):
            old = getattr(layer, name)
            setattr(layer, name, nn.Parameter(rows, requires_grad=old.requires_grad))


def fused_rows(*layers: nn.Linear) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The matrix [sum of rows, columns] and the vector behind the layers; None if they do not lie beside each other, or
    if calling a layer would do more than its product: an adapter, a hook, another forward."""
    if not all(map(_is_plain, layers)):
        return None
    weight, bias = (_joined([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    return None if weight is None or bias is None else (weight, bias)


def _is_plain(layer: nn.Module) -> bool:
    is_changed = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return type(layer) is nn.Linear and not is_changed


def _joined(parts: list[torch.Tensor]) -> torch.Tensor | None:
    first, end = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage or not _alike(part, first):
            return None
        end += part.numel() * part.element_size()
    num_rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((num_rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _alike(part: torch.Tensor, first: torch.Tensor) -> bool:
    return (
        part.is_contiguous()
        and part.dtype == first.dtype
        and part.device == first.device
        and part.shape[1:] == first.shape[1:]
        and not (torch.is_grad_enabled() and part.requires_grad)  # a view of the matrix would not reach the layers
    )
