"""Drafter heads on the compiled kernels compute what their modules compute."""

from collections.abc import Callable

import pytest
import torch
from head_cases import tiny_target

from secondguess.core import Draft, Row
from secondguess.drafters.eagle import EagleDrafter
from secondguess.heads import native
from secondguess.heads.base import DraftVocabulary, TargetModel
from secondguess.heads.eagle import Eagle1Head, EagleConfig, EagleHead
from secondguess.heads.feature import FeatureHead
from secondguess.heads.layer import LayerConfig
from secondguess.heads.mtp import MtpHead
from secondguess.heads.native import NativeFeatureRuntime, feature_runtime
from secondguess.heads.runtime import TorchFeatureRuntime
from secondguess.runtime.fused import fuse
from secondguess.runtime.native import library
from secondguess.runtime.native.decoder import NativeDecoder
from secondguess.runtime.native.runtime import NativeRuntime
from secondguess.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(not library.units(), reason="no compiled kernels on this machine")

VOCAB_SIZE = 50


def eagle(target: TargetModel, *, num_draft_tokens: int | None = None, **fields: object) -> EagleHead:
    layer = LayerConfig(target.width, 4, 2, 8, 3 * target.width + 5)
    vocabulary = None
    if num_draft_tokens is not None:
        vocabulary = DraftVocabulary(VOCAB_SIZE, torch.arange(0, 2 * num_draft_tokens, 2))
    has_embeddings = bool(fields.pop("has_embeddings", False))
    return EagleHead(EagleConfig(layer, (0, 1, 2), **fields), target, vocabulary, has_embeddings)


def mtp(target: TargetModel, **options: bool) -> MtpHead:
    return MtpHead(LayerConfig(target.width, 4, 4, 8, 40, has_qk_norm=True), target, **options)


def eagle1(target: TargetModel, **options: bool) -> Eagle1Head:
    return Eagle1Head(LayerConfig(target.width, 2, 1, 16, 40, attention_bias=True), target, **options)


HEADS: dict[str, Callable[[TargetModel], FeatureHead]] = {
    "eagle": eagle,
    "eagle, normalised residual": lambda target: eagle(target, norm_before_residual=True, fc_norm=True),
    "eagle, two layers": lambda target: eagle(target, num_layers=2, norm_output=True, norm_before_fc=True),
    "eagle, own words": lambda target: eagle(target, num_draft_tokens=17, has_embeddings=True),
    "eagle 1": eagle1,
    "eagle 1 with bias": lambda target: eagle1(target, has_bias=True),
    "mtp": mtp,
    "mtp with everything": lambda target: mtp(
        target, has_embeddings=True, has_head=True, norm_output=True, has_bias=True
    ),
}


def native_target() -> NativeRuntime:
    return NativeRuntime(NativeDecoder(fuse(tiny_target(VOCAB_SIZE).bfloat16(), packed=False)))


def random_head(name: str, target: NativeRuntime) -> FeatureHead:
    model = TargetModel.of(target)
    head = HEADS[name](model)
    torch.manual_seed(4)
    for parameter in head.parameters():
        spread = 0.2 if parameter.dim() > 1 else 1.0
        torch.nn.init.normal_(parameter, std=spread)
        parameter.data = parameter.data.bfloat16().to(model.dtype)
    return head.eval().requires_grad_(False)


@pytest.mark.parametrize("name", HEADS)
def test_native_heads_compute_the_logits_and_features_of_the_module(name: str) -> None:
    target = native_target()
    head = random_head(name, target)
    runtime = feature_runtime(head, target)
    assert isinstance(runtime, NativeFeatureRuntime)
    plain = TorchFeatureRuntime(head, target.context_length, target.device)
    tokens, width = torch.randint(VOCAB_SIZE, (3, 9)), head.shape.width
    features = torch.randn(3, 9, width).bfloat16()
    with torch.inference_mode():
        expected = plain.read_with(tokens, features.to(head.target.dtype))
        found = runtime.read_with(tokens, features)
    covered = expected.logits.isfinite()
    assert torch.equal(covered, found.logits.isfinite())
    for exact, rounded in (
        (expected.logits[covered], found.logits[covered]),
        (expected.hidden[0], found.hidden[0]),
    ):
        assert (exact.float() - rounded.float()).norm() < 0.03 * exact.float().norm()
    states = {layer: torch.randn(5, width, dtype=head.target.dtype) for layer in head.hidden_layers}
    exact, rounded = head.features(states), runtime.features(states)
    assert (exact - rounded).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name: str) -> None:
    target = native_target()
    head = random_head(name, target)
    tokens, features = torch.randint(VOCAB_SIZE, (2, 6)), torch.randn(2, 6, head.shape.width).bfloat16()

    def step(indices: list[int], sizes: list[int]) -> torch.Tensor:
        """Return the logits after the last of `sizes` tokens of each row, run in two steps."""
        runtime = feature_runtime(head, target)
        rows = [
            Row(tokens[i, :size].tolist(), SamplingParams()) for i, size in zip(indices, sizes, strict=True)
        ]
        runtime.admit(rows)
        for row, i in zip(rows, indices, strict=True):
            runtime.set_features(row, 0, features[i])
        runtime.prefill(rows)
        return runtime.score(rows, Draft.empty(len(rows), target.device)).logits

    together = step([0, 1], [6, 4])
    assert torch.equal(together[:1], step([0], [6]))
    assert torch.equal(together[1:], step([1], [4]))


def test_a_head_that_the_kernels_do_not_reproduce_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    target = native_target()
    original = native.PackedFeatureHead._norm

    def doubled(self: native.PackedFeatureHead, norm: torch.nn.Module) -> library.Norm:
        norm.weight.data = 2 * norm.weight.data + 1
        return original(self, norm)

    monkeypatch.setattr(native.PackedFeatureHead, "_norm", doubled)
    head = random_head("mtp", target)
    copied = random_head("mtp", target)
    monkeypatch.setattr(native, "TorchFeatureRuntime", lambda _, *rest: TorchFeatureRuntime(copied, *rest))
    assert isinstance(feature_runtime(head, target), TorchFeatureRuntime)


def test_built_drafters_use_the_kernels_of_their_target() -> None:
    target = native_target()
    drafter = EagleDrafter(random_head("eagle", target), target, "eagle")
    assert isinstance(drafter.runtime, NativeFeatureRuntime)
