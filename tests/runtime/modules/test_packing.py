"""Products with weights in the layout of oneDNN."""

import pytest
import torch

from secondguess.runtime.decoder.products import PackableLinear, can_pack

needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")),
    reason="this processor has no bfloat16 products in oneDNN",
)


@needs_packing
@pytest.mark.parametrize("num_outputs", [256, 1536])
@pytest.mark.parametrize("shape", [(33, 1), (8, 9), (5, 40), (1, 33), (1, 96)])
def test_a_row_of_many_equals_the_row_alone(shape, num_outputs):
    """Without splitting, products over more than 32 rows and 512 or more inputs sum in another order."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(num_outputs, 768, generator=generator).to(torch.bfloat16)
    values = torch.randn(*shape, 768, generator=generator).to(torch.bfloat16)
    product = PackableLinear(weight, None, packed=True)
    together = product(values)
    alone = torch.stack([product(row[None, None])[0, 0] for row in values.flatten(0, 1)])
    assert torch.equal(together.flatten(0, 1), alone)


def test_only_bfloat16_on_a_cpu_is_packed():
    assert not can_pack(torch.float32, torch.device("cpu"))
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
