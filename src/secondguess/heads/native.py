"""Drafter heads on the compiled kernels, if these reproduce their logits.

Heads consist of the parts that dense decoders consist of, so the target's kernels run them, with
its embeddings and LM head where a head has none of its own. `feature_runtime` and its like return
the fastest computation of a head: the kernels are probed against torch, and if they pass, the
matrices of the module are released. Weights are rounded to bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secondguess.core import Row
from secondguess.heads.base import TargetModel
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.feature import FeatureHead
from secondguess.heads.layer import LayerConfig, RotaryPositions
from secondguess.heads.medusa import MedusaHead
from secondguess.heads.runtime import FEATURE_KEY, Block, BlockRuntime, FeatureRuntime
from secondguess.params import SamplingParams
from secondguess.runtime.base import ForwardOutput, HiddenStates, Runtime
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.decoder import ACTIVATIONS, NativeDecoder, PackedDecoder
from secondguess.runtime.cpu.forward import KernelForward, KernelInputs, even_layout, in_rows, kernel_step
from secondguess.runtime.cpu.runtime import KernelRuntime, NativeRuntime
from secondguess.runtime.decoder.fused import PROBE_WIDTH, probe_passes
from secondguess.runtime.decoder.rotary import Rotary
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.system.exclusive import exclusive
from secondguess.runtime.weight_format import BFLOAT16, PROBE_TOLERANCE

ComputationT = TypeVar("ComputationT")
MedusaLogits = Callable[[Tensor, int], Tensor]
"""Logits `[..., vocab]` of target states `[..., width]` at a depth, as `MedusaHead.logits`."""


def feature_runtime(head: FeatureHead, target: Runtime) -> FeatureRuntime:
    """Return the fastest runtime of an EAGLE head or an MTP module that reproduces its logits.

    The head is in evaluation mode, on the target's device and in its dtype; it is not to be used afterwards.
    """
    context_length = min(target.context_length, head.context_length or target.context_length)
    plain = FeatureRuntime(head, context_length, target.device)
    if not isinstance(target, NativeRuntime) or not head.layer_config.is_like_llama:
        return plain
    native = NativeFeatureRuntime(head, target.decoder, context_length)
    tokens, dtype = _probe_tokens(head.target), head.target.dtype
    features = _probe_states(*tokens.shape, head.layer_config.width)

    def logits(runtime: FeatureRuntime) -> Tensor:
        read = features if runtime is native else features.to(dtype)
        return runtime.probe_with_features(tokens, read).logits

    has_own = head.lm_head is not None
    return _faster("drafter head", plain, native, logits, head, target, has_own_lm_head=has_own)


def block_runtime(head: DsparkHead, target: Runtime) -> BlockRuntime:
    """Return the fastest runtime of a block drafter that reproduces its logits; see `feature_runtime`."""
    plain = BlockRuntime(head, target.device)
    if not isinstance(target, NativeRuntime) or not head.config.is_plain:
        return plain
    native = NativeBlockRuntime(head, target.decoder, target.context_length)
    tokens, width = _probe_tokens(head.target), head.config.layer.width
    states = {layer: _probe_states(*tokens.shape, width) for layer in head.hidden_layers}
    logits = partial(_probe_block, tokens=tokens, states=states, head=head)
    has_own = head.config.has_output
    packed = head.packed_parts()
    return _faster("block drafter", plain, native, logits, packed, target, has_own_lm_head=has_own)


def medusa_logits(head: MedusaHead, target: Runtime) -> MedusaLogits:
    """Return the fastest computation of the logits of Medusa heads that reproduces them; see `feature_runtime`."""
    if not isinstance(target, NativeRuntime):
        return head.logits
    forwards = [KernelForward(decoder, 0) for decoder in PackedMedusaHead(head, target.decoder).depths()]
    vocabulary = head.vocabulary

    def native(states: Tensor, depth: int) -> Tensor:
        return vocabulary.to_target(forwards[depth].unembed(states, is_normalised=False))

    states = _probe_states(PROBE_WIDTH, head.target.width)

    def probe(logits: MedusaLogits) -> Tensor:
        return torch.cat([logits(states, depth) for depth in range(head.config.num_heads)])

    has_own = bool(head.lm_heads)
    return _faster("Medusa heads", head.logits, native, probe, head, target, has_own_lm_head=has_own)


def exit_logits(head: EarlyExitHead | None, target: Runtime) -> Callable[[Tensor], Tensor]:
    """Return the fastest computation of an early exit's logits that reproduces them; see `feature_runtime`.

    Without a head, the states go through the target's last norm.
    """
    shared = target.embedding_and_head()
    finish = shared.normalise if head is None else head

    def plain(states: Tensor) -> Tensor:
        return shared.unembed(finish(states.to(shared.dtype)))

    if not isinstance(target, NativeRuntime):
        return plain
    forward = KernelForward(PackedExit(head, target.decoder), 0)
    native: Callable[[Tensor], Tensor] = partial(forward.unembed, is_normalised=False)
    states = _probe_states(PROBE_WIDTH, shared.width)
    return _faster("early exit", plain, native, lambda logits: logits(states), head, target)


def _faster(
    name: str,
    plain: ComputationT,
    native: ComputationT,
    probe: Callable[[ComputationT], Tensor],
    head: nn.Module | None,
    target: NativeRuntime,
    *,
    has_own_lm_head: bool = False,
) -> ComputationT:
    """Return the kernels' computation, if its probed logits are those of the module within rounding; else the module's."""
    weight_format = BFLOAT16 if has_own_lm_head else target.decoder.weight_format.head_format
    with torch.inference_mode():
        expected, found = probe(plain), probe(native)
    covered = expected.isfinite()  # the draft vocabulary
    tolerance = PROBE_TOLERANCE[weight_format]
    if not probe_passes(f"native ({name})", found[covered], expected[covered], tolerance):
        return plain
    if head is not None:
        release_matrices(head)
    return native


def _probe_tokens(target: TargetModel) -> Tensor:
    return torch.arange(2 * PROBE_WIDTH).remainder(target.vocab_size).reshape(2, PROBE_WIDTH)


def _probe_states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def _probe_block(runtime: BlockRuntime, *, tokens: Tensor, states: HiddenStates, head: DsparkHead) -> Tensor:
    """Return the logits of blocks after two texts of different lengths."""
    lengths = (tokens.shape[1], tokens.shape[1] // 2)
    rows = [
        Row(row_tokens[:length].tolist(), SamplingParams())
        for row_tokens, length in zip(tokens, lengths, strict=True)
    ]
    dtype = head.target.dtype
    received = [
        {layer: layer_states[index, : length - 1].to(dtype) for layer, layer_states in states.items()}
        for index, length in enumerate(lengths)
    ]
    runtime.append(rows, received)
    block, size = runtime.run(rows, head.config.num_drafted), head.config.block_size
    first = head.config.first_drafted
    logits = [runtime.logits(block, tokens[:, : position + 1]) for position in range(first, size)]
    runtime.forget()
    return torch.stack(logits, 1)


class NativeFeatureRuntime(KernelRuntime, FeatureRuntime):
    """Feature runtime over the compiled kernels; features are kept in bfloat16.

    It shares the embeddings and the LM head of the packed target.
    """

    def __init__(self, head: FeatureHead, target: NativeDecoder, context_length: int) -> None:
        super().__init__(head, context_length, target.embedding.device)
        self._vocabulary = head.vocabulary
        self._join_states = head.join_states
        self._fusion = None if head.fusion is None else PackedLinear(head.fusion, target)
        self._forward = KernelForward(PackedFeatureHead(head, target), self.context_length)

    def features(self, hidden: HiddenStates) -> Tensor:
        joined = self._join_states(hidden)
        return (joined if self._fusion is None else self._fusion(joined)).bfloat16()

    @exclusive
    def draft_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        if self._vocabulary.token_ids is not None or requests[0].vocab_size > self.vocab_size:
            return None
        return self._draw(rows, requests, decision)

    def _chain_features(self, counts: Sequence[int]) -> Tensor:
        rows = zip(self._forward_features, counts, strict=True)
        return torch.cat([features[:count] for features, count in rows])

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        last = (self.num_layers,) if with_hidden else ()
        layout = even_layout(*tokens.shape, num_logits)
        layers, features = range(self.num_layers), self._forward_features
        inputs = KernelInputs(tokens, layout, step, layers, last, features=features)
        output = in_rows(self._forward(self.cache, inputs), tokens)
        hidden = {FEATURE_KEY: output.hidden[self.num_layers].bfloat16()} if with_hidden else {}
        return ForwardOutput(self._vocabulary.to_target(output.logits), hidden)


class NativeBlockRuntime(BlockRuntime):
    """Block runtime over the compiled kernels; see `NativeFeatureRuntime`."""

    def __init__(self, head: DsparkHead, target: NativeDecoder, context_length: int) -> None:
        super().__init__(head, target.embedding.device)
        self._fusion = PackedLinear(head.fc, target)
        self._layers = range(head.config.num_layers)
        # a block may extend beyond the context
        longest = context_length + head.config.block_size
        self._forward = KernelForward(PackedBlockHead(head, target), longest)
        if head.markov_head is not None:
            self._bias = PackedLinear(head.markov_head.output, target)
        if head.config.has_confidence:
            self._confidence = PackedLinear(head.confidence_head.proj, target)

    def append(self, rows: Sequence[Row], received: Sequence[HiddenStates]) -> None:
        joined = torch.cat(
            [torch.cat([hidden[layer] for layer in self.hidden_layers], -1) for hidden in received]
        )
        features = self._fusion(joined)
        counts = [len(hidden[self.hidden_layers[0]]) for hidden in received]
        starts, num_keys = self._place_new(rows, max(counts))
        self._forward.write_caches(self.cache, features, counts, kernel_step(starts, num_keys), self._layers)
        self._advance(rows, counts)

    def run(self, rows: Sequence[Row], longest: int) -> Block:
        size, last = self.config.block_size, len(self._layers)
        starts, num_keys = self._place(rows, size)
        tokens = torch.full((len(rows), size), self.config.mask_token)
        tokens[:, 0] = torch.tensor([row.pending for row in rows])
        first = self.config.first_drafted
        layout = even_layout(len(rows), size, longest, first)
        step = kernel_step(starts, num_keys)
        output = self._forward(self.cache, KernelInputs(tokens, layout, step, self._layers, (last,)))
        return Block(in_rows(output, tokens).hidden[last], output.logits)

    def _biased(self, base: Tensor, latents: Tensor) -> Tensor:
        return base + self._bias(latents)

    def _confidence_of(self, inputs: Tensor) -> Tensor:
        return self._confidence(inputs)[..., 0]


def release_matrices(head: nn.Module) -> None:
    """Free the matrices of a head that the kernels have packed."""
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)


class PackedHead(PackedDecoder):
    """Weights of a drafter head in the layout of the kernels; it may use the target's embeddings and LM head."""

    num_layers = num_key_heads = head_size = 0

    def __init__(self, target: NativeDecoder) -> None:
        super().__init__(target.unit)
        self.embedding, self.rotaries = target.embedding, []
        self._target = target  # keeps shared weights allocated

    def _describe(self, layers: Sequence[library.Layer], **fields: Any) -> library.Decoder:
        """Return a description of layers, with the target's embeddings and LM head by default."""
        described = self._target.described
        shared = {
            "width": described.width,
            "activation": ACTIVATIONS["silu"],
            "num_embedded": described.num_embedded,
            "amx": described.amx,
            "embedding_scale": described.embedding_scale,
            "embedding": described.embedding,
            "head": described.head,
            "logit_divisor": described.logit_divisor,
            "logit_cap": described.logit_cap,
        }
        array = (library.Layer * len(layers))(*layers)
        return library.Decoder(layers=array, num_layers=len(layers), **{**shared, **fields})

    def _own_embeddings(self, table: nn.Embedding) -> dict[str, Any]:
        """Use embeddings of the head itself; return their fields of the description."""
        self.embedding = table.weight.detach().bfloat16()
        return {
            "embedding": self.embedding.data_ptr(),
            "num_embedded": len(self.embedding),
            "embedding_scale": 1.0,
        }

    def _describe_attention(
        self, layers: Sequence[Any], config: LayerConfig, rotary: RotaryPositions, **fields: Any
    ) -> library.Decoder:
        """Return a description of decoder layers of one configuration, and set what their cache depends on."""
        self.num_layers, self.num_key_heads, self.head_size = (
            len(layers),
            config.num_kv_heads,
            config.head_size,
        )
        self.rotaries = [Rotary(rotary.frequencies, rotary.factor, torch.float32)]
        return self._describe(
            [self._layer(layer, config) for layer in layers],
            inner_width=config.mlp_size,
            num_queries=config.num_heads,
            num_keys=config.num_kv_heads,
            head_size=config.head_size,
            scaling=config.head_size**-0.5,
            **fields,
        )

    def _layer(self, layer: Any, config: LayerConfig) -> library.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        has_norms = config.has_qk_norm
        return library.Layer(
            attention_norm=self._norm(layer.input_layernorm),
            query_norm=self._norm(attention.q_norm) if has_norms else library.Norm(),
            key_norm=self._norm(attention.k_norm) if has_norms else library.Norm(),
            mlp_norm=self._norm(layer.post_attention_layernorm),
            qkv=self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            output=self._linear(attention.o_proj),
            gate_up=self._linear(mlp.gate_proj, mlp.up_proj, gated=True),
            down=self._linear(mlp.down_proj),
        )

    def _linear(self, *linears: nn.Linear, gated: bool = False) -> library.Weight:
        """Return the packed weight of linear layers with the same input, outputs concatenated."""
        weight = torch.cat([linear.weight.detach().bfloat16() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        return self._pack(weight, torch.cat(biases) if biases else None, gated=gated).weight

    def _norm(self, norm: Any) -> library.Norm:
        if isinstance(norm, nn.Identity):
            return library.Norm()
        return self._keep_norm(norm.weight, norm.eps)


class PackedFeatureHead(PackedHead):
    """Weights of a feature-reading drafter head: EAGLE, MTP."""

    def __init__(self, head: FeatureHead, target: NativeDecoder) -> None:
        super().__init__(target)
        parts = head.parts
        fields: dict[str, Any] = {}
        if head.embed_tokens is not None:
            fields = self._own_embeddings(head.embed_tokens)
        if head.lm_head is not None:
            fields |= {"head": self._linear(head.lm_head), "logit_divisor": 0, "logit_cap": 0}
        if parts.projection is not None:
            fields["projection"] = self._linear(parts.projection)
        self.described = self._describe_attention(
            list(parts.layers),
            head.layer_config,
            head.rotary,
            norm=self._norm(head.norm),
            joins_features=True,
            residual_is_normalised=parts.residual_is_normalised,
            output_is_raw=not head.norm_output,
            token_norm=self._norm(parts.token_norm),
            feature_norm=self._norm(parts.feature_norm),
            width=head.layer_config.width,
            **fields,
        )
        for index, window in enumerate(head.windows):
            self.described.layers[index].window = window or 0


class PackedBlockHead(PackedHead):
    """Weights of the backbone of a block drafter: DSpark, DFlash."""

    def __init__(self, head: DsparkHead, target: NativeDecoder) -> None:
        super().__init__(target)
        fields: dict[str, Any] = {"head": self._linear(head.lm_head)} if head.lm_head is not None else {}
        if head.embed_tokens is not None:
            fields |= self._own_embeddings(head.embed_tokens)
        self.described = self._describe_attention(
            list(head.layers),
            head.config.layer,
            head.rotary,
            norm=self._norm(head.norm),
            feature_norm=self._norm(head.hidden_norm),
            is_bidirectional=True,
            **fields,
        )


class PackedMedusaHead(PackedHead):
    """Weights of a set of Medusa drafter heads."""

    def __init__(self, head: MedusaHead, target: NativeDecoder) -> None:
        super().__init__(target)
        blocks: Iterable[Any] = head.blocks
        lm_heads: Iterable[Any] = head.lm_heads
        outputs = [self._linear(lm_head) for lm_head in lm_heads] or [target.described.head]
        self._depths = [
            self._describe(
                [library.Layer(down=self._linear(layer)) for layer in block.layers],
                head=outputs[min(depth, len(outputs) - 1)],
            )
            for depth, block in enumerate(blocks)
        ]

    def depths(self) -> list[PackedMedusaHead]:
        """Return the drafter heads one by one, as decoders that share these weights."""
        found = [copy.copy(self) for _ in self._depths]
        for decoder, described in zip(found, self._depths, strict=True):
            decoder.described, decoder.num_layers = described, described.num_layers
        return found


class PackedExit(PackedHead):
    """Weights of an early exit: an adapter, or without one the target's last norm."""

    def __init__(self, head: EarlyExitHead | None, target: NativeDecoder) -> None:
        super().__init__(target)
        if head is None:
            self.described = self._describe([], norm=target.described.norm)
            return
        adapter = library.Layer(
            mlp_norm=self._norm(head.input_norm),
            gate_up=self._linear(head.gate_proj, head.up_proj, gated=True),
            down=self._linear(head.down_proj),
        )
        self.num_layers = 1
        self.described = self._describe(
            [adapter], inner_width=head.gate_proj.out_features, norm=self._norm(head.norm)
        )


class PackedLinear(PackedHead):
    """Linear layer on the kernels, for one thread at a time."""

    def __init__(self, linear: nn.Linear, target: NativeDecoder) -> None:
        super().__init__(target)
        self.described = self._describe([], width=linear.in_features, head=self._linear(linear))
        self._forward = KernelForward(self, 0)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the outputs `[..., output]` in float32 of inputs `[..., input]`."""
        return self._forward.unembed(values)
