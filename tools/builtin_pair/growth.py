"""Extension of a trained decoder by further layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from builtin_pair.model import Decoder
from secondguess.errors import BadInputError

_OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight")


def deepened(decoder: Decoder, num_layers: int) -> tuple[Decoder, dict[str, str]]:
    """Return a copy of ``decoder`` with ``num_layers`` layers.

    For a multiple of its depth, the stack is repeated (G_stack, arXiv 2405.15319). For any other
    depth, new layers are spread evenly: each is a copy of the layer before it whose two output
    projections are zero, so that the outputs of the model do not change (LLaMA Pro, arXiv
    2401.02415).

    Returns:
        The deeper decoder, and a mapping from the names of its parameters that are not of new
        layers to their previous names.

    Raises:
        BadInputError: fewer layers than the decoder has.
    """
    depth = decoder.shape.num_layers
    if num_layers < depth:
        raise BadInputError(
            f"a model of {depth} layers cannot be deepened to {num_layers}; give at least {depth}"
        )
    sources = layer_sources(depth, num_layers)
    grown = Decoder(replace(decoder.shape, num_layers=num_layers))
    weights = dict(decoder.named_parameters())
    taken: dict[str, str] = {}
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            source, is_new = _source(name, sources)
            if is_new and name.endswith(_OUTPUT_PROJECTIONS):
                parameter.zero_()
                continue
            parameter.copy_(weights[source])
            if not is_new:
                taken[name] = source
    return grown, taken


def layer_sources(depth: int, num_layers: int) -> list[tuple[int, bool]]:
    """Return per layer of the deeper model the layer it copies, and whether it is the identity.

    >>> layer_sources(3, 4)
    [(0, False), (1, False), (2, False), (2, True)]
    """
    if num_layers % depth == 0:
        return [(layer % depth, False) for layer in range(num_layers)]
    sources: list[tuple[int, bool]] = []
    for layer in range(depth):
        copies = (layer + 1) * num_layers // depth - layer * num_layers // depth
        sources += [(layer, copy > 0) for copy in range(copies)]
    return sources


def _source(name: str, sources: list[tuple[int, bool]]) -> tuple[str, bool]:
    parts = name.split(".")
    if parts[:2] != ["model", "layers"]:
        return name, False
    layer, is_new = sources[int(parts[2])]
    return ".".join([*parts[:2], str(layer), *parts[3:]]), is_new
