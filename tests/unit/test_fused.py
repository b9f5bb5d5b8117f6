"""One product for q, k and v: the layers keep their names, nobody else keeps their memory, and moving them is safe."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from usp.models.wan.config import TransformerConfig
from usp.models.wan.fused import fuse_rows, fused_rows
from usp.models.wan.transformer import WanTransformer

NO_GPU = not torch.cuda.is_available()


def three(dim: int = 24) -> list[nn.Linear]:
    return [nn.Linear(dim, dim).requires_grad_(False) for _ in "qkv"]


def test_layers_become_rows_of_one_matrix_with_the_values_they_had() -> None:
    layers = three()
    before = [(layer.weight.clone(), layer.bias.clone()) for layer in layers]
    assert fused_rows(*layers) is None
    fuse_rows(*layers)
    weight, bias = fused_rows(*layers)
    assert weight.shape == (72, 24) and bias.shape == (72,)
    assert torch.equal(weight, torch.cat([one for one, _ in before]))
    assert torch.equal(bias, torch.cat([one for _, one in before]))
    assert weight.data_ptr() == layers[0].weight.data_ptr()


def test_a_replaced_or_moved_layer_falls_back() -> None:
    for change in (
        lambda layers: setattr(layers[1], "weight", nn.Parameter(layers[1].weight.clone())),
        lambda layers: setattr(layers[2], "bias", nn.Parameter(layers[2].bias.clone())),
        lambda layers: layers[0].to(torch.float64),
        lambda layers: layers.reverse(),
        lambda layers: layers.__setitem__(2, layers[1]),
    ):
        layers = three()
        fuse_rows(*layers)
        assert fused_rows(*layers) is not None
        change(layers)
        assert fused_rows(*layers) is None


class Adapted(nn.Module):
    """A layer with something added to its result, which shows the layer's weights as its own, as adapters do."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 1


def test_a_layer_that_does_more_than_its_product_is_called() -> None:
    for change in (
        lambda layers: layers.__setitem__(1, Adapted(layers[1])),
        lambda layers: layers[0].register_forward_hook(lambda *_: None),
        lambda layers: layers[2].register_forward_pre_hook(lambda *_: None),
        lambda layers: setattr(layers[2], "forward", lambda x: x),
    ):
        layers = three()
        fuse_rows(*layers)
        change(layers)
        assert fused_rows(*layers) is None


def test_neighbours_of_different_storages_are_not_joined() -> None:
    """Two tensors may touch by chance; a view over both would keep neither alive."""
    memory = torch.zeros(2 * 4 * 4 + 8)
    layers = [nn.Linear(4, 4).requires_grad_(False) for _ in "ab"]
    for place, layer in enumerate(layers):
        alone = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=16, offset=64 * place)
        layer.weight = nn.Parameter(alone.view(4, 4), requires_grad=False)
    assert layers[0].weight.data_ptr() + 64 == layers[1].weight.data_ptr()
    assert fused_rows(*layers) is None


def test_nothing_but_the_layers_holds_the_matrix() -> None:
    layers = three()
    fuse_rows(*layers)
    held = StorageWeakRef(layers[0].weight.untyped_storage())
    fused_rows(*layers)
    assert not held.expired()
    for layer in layers:
        layer.to(torch.float64)
    assert held.expired()


def test_with_gradients_every_layer_gets_its_own() -> None:
    layers = [nn.Linear(24, 24) for _ in "qkv"]
    fuse_rows(*layers)
    assert fused_rows(*layers) is None and all(layer.weight.requires_grad for layer in layers)
    with torch.no_grad():
        assert fused_rows(*layers) is not None


def test_a_fused_model_keeps_its_state_dict() -> None:
    config = TransformerConfig(num_layers=2, num_heads=2, head_dim=8, ffn_dim=16, text_dim=8)
    model = WanTransformer(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.fuse()
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a GPU")
def test_moving_a_block_to_the_cpu_frees_every_byte() -> None:
    torch.empty(1, device="cuda")
    gc.collect()  # of other tests
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = WanTransformer(TransformerConfig(num_layers=1, num_heads=4, head_dim=128, ffn_dim=64, text_dim=8))
    model.fuse()
    assert torch.cuda.memory_allocated() > before
    model.to("cpu")
    assert torch.cuda.memory_allocated() == before
