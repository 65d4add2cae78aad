"""Triton kernels of a decoder's forward pass over few tokens.

Products are summed in an order that the shapes of the weights and the device fix, and attention in chunks of fixed
length, so that a token's values do not depend on how many tokens follow it in the pass.
"""

# Triton compiles these functions from their source: they have no annotations of values.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, value, ACTIVATION: tl.constexpr):
    """Return the product of an activated gate (1: SiLU, 2: GELU by tanh) and a value, in float32."""
    if ACTIVATION == 1:
        return gate * tl.sigmoid(gate) * value
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2 * inner) * value


@triton.jit
def norm_kernel(states, weight, output, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write a token's root-mean-square norm."""
    places = tl.arange(0, BLOCK)
    mask = places < SIZE
    factors = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    token = tl.program_id(0)
    found = tl.load(states + token * SIZE + places, mask=mask, other=0.0).to(tl.float32)
    found = found * tl.rsqrt(tl.sum(found * found, 0) / SIZE + eps) * factors
    tl.store(output + token * SIZE + places, found.to(output.dtype.element_ty), mask=mask)


@triton.jit
def store_product(
    sums,
    values,
    bias,
    residual,
    output,
    partial_sums,
    num_finished,
    num_tokens,
    num_outputs,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write `residual + scale * activation(sums + bias)`, from sums `[output, token]`.

    With an activation, `values` are the sums by which activated ones are multiplied. With several parts the program that
    finishes last adds up those of all, in their order; `num_finished` is zero before and after, and `partial_sums` are
    `[part, token, output]` in float32.
    """
    tokens = tl.arange(0, BLOCK_TOKENS)
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    output_mask = outputs < num_outputs
    places = tokens[:, None] * num_outputs + outputs[None, :]
    mask = (tokens < num_tokens)[:, None] & output_mask[None, :]
    sums, values = tl.trans(sums), tl.trans(values)
    is_last = True
    if PARTS > 1:
        size = num_tokens * num_outputs
        tl.store(partial_sums + tl.program_id(1) * size + places, sums, mask=mask)
        tl.debug_barrier()
        is_last = tl.atomic_add(num_finished + tl.program_id(0), 1, sem="acq_rel") == PARTS - 1
        if is_last:
            tl.store(num_finished + tl.program_id(0), 0)
            sums = tl.zeros((BLOCK_TOKENS, BLOCK_OUTPUTS), tl.float32)
            for part in tl.static_range(PARTS):
                # Past the cache of the multiprocessor, which does not see what others have written.
                sums += tl.load(
                    partial_sums + part * size + places, mask=mask, other=0.0, cache_modifier=".cg"
                )
    if is_last:
        if HAS_BIAS:
            sums += tl.load(bias + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
            if ACTIVATION:
                added = tl.load(bias + num_outputs + outputs, mask=output_mask, other=0.0)
                values += added.to(tl.float32)[None, :]
        if ACTIVATION:
            sums = gated(sums, values, ACTIVATION)
        sums *= scale
        if HAS_RESIDUAL:
            sums += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(output + places, sums.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    states,
    weight,
    bias,
    residual,
    output,
    partial_sums,
    num_finished,
    num_tokens,
    num_outputs,
    scale,
    NUM_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write `residual + scale * activation(states @ weight.T + bias)`.

    With an activation the second half of the weight's outputs is multiplied by the activated first half. The inputs are
    shared by `PARTS` programs, of which there is one with an activation.
    """
    tokens = tl.arange(0, BLOCK_TOKENS)
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    token_mask, output_mask = tokens < num_tokens, outputs < num_outputs
    rows = weight + outputs.to(tl.int64)[:, None] * NUM_INPUTS
    second_rows = weight + (outputs.to(tl.int64) + num_outputs)[:, None] * NUM_INPUTS
    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), tl.float32)
    values = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), tl.float32)
    part_size: tl.constexpr = tl.cdiv(tl.cdiv(NUM_INPUTS, BLOCK_INPUTS), PARTS) * BLOCK_INPUTS
    begin = tl.program_id(1) * part_size
    end = tl.minimum(begin + part_size, NUM_INPUTS)
    for first in tl.range(begin, end, BLOCK_INPUTS, num_stages=STAGES):
        columns = first + inputs
        # Without a mask of the columns, blocks are copied asynchronously in vectors of 16 bytes.
        if NUM_INPUTS % BLOCK_INPUTS == 0:
            part_mask, tile_mask = token_mask[:, None], output_mask[:, None]
        else:
            column_mask = columns < NUM_INPUTS
            part_mask, tile_mask = token_mask[:, None] & column_mask, output_mask[:, None] & column_mask
        part = tl.load(states + tokens[:, None] * NUM_INPUTS + columns, mask=part_mask, other=0.0)
        tile = tl.load(rows + columns, mask=tile_mask, other=0.0)
        sums = tl.dot(tile, tl.trans(part), sums, input_precision="ieee")
        if ACTIVATION:
            second = tl.load(second_rows + columns, mask=tile_mask, other=0.0)
            values = tl.dot(second, tl.trans(part), values, input_precision="ieee")
    store_product(
        sums,
        values,
        bias,
        residual,
        output,
        partial_sums,
        num_finished,
        num_tokens,
        num_outputs,
        scale,
        HAS_BIAS,
        HAS_RESIDUAL,
        ACTIVATION,
        BLOCK_TOKENS,
        BLOCK_OUTPUTS,
        PARTS,
    )


@triton.jit
def weights_of(words):
    """Return the eight integers from -8 to 7 of each 32-bit word, lowest bits first, as bfloat16."""
    # Two words at a time: four bits below the exponent of 128 are a number from 128 to 143.
    first, second, third, fourth, fifth, sixth, seventh, eighth = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, moved;
        prmt.b32 low, $8, $9, 0x5410;
        prmt.b32 high, $8, $9, 0x7632;
        lop3.b32 $0, low, 0x000F000F, 0x43004300, 0xEA;
        shr.b32 moved, low, 4;
        lop3.b32 $1, moved, 0x000F000F, 0x43004300, 0xEA;
        shr.b32 moved, low, 8;
        lop3.b32 $2, moved, 0x000F000F, 0x43004300, 0xEA;
        shr.b32 moved, low, 12;
        lop3.b32 $3, moved, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $4, high, 0x000F000F, 0x43004300, 0xEA;
        shr.b32 moved, high, 4;
        lop3.b32 $5, moved, 0x000F000F, 0x43004300, 0xEA;
        shr.b32 moved, high, 8;
        lop3.b32 $6, moved, 0x000F000F, 0x43004300, 0xEA;
        shr.b32 moved, high, 12;
        lop3.b32 $7, moved, 0x000F000F, 0x43004300, 0xEA;
        }
        """,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [words],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    return first, second, third, fourth, fifth, sixth, seventh, eighth


@triton.jit
def scale_of(pairs, HALF: tl.constexpr):
    """Return the lower or upper of two bfloat16 numbers in each 32-bit word, as float32."""
    bits = pairs & -65536 if HALF else pairs << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def add_products(sums, part, weights, pairs, HALF: tl.constexpr):
    """Return `sums + ((weights - 136) @ part) * scales`."""
    weights = (weights - 136.0).to(part.dtype)
    return sums + tl.dot(weights, part, input_precision="tf32") * scale_of(pairs, HALF)[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def quantised_linear_kernel(
    states,
    codes,
    scales,
    bias,
    residual,
    output,
    partial_sums,
    num_finished,
    num_tokens,
    num_outputs,
    scale,
    NUM_INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write what `linear_kernel` does, for weights as in `QuantisedProduct`."""
    tokens = tl.arange(0, BLOCK_TOKENS)
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    words = tl.arange(0, GROUP)
    token_mask, output_mask = tokens < num_tokens, outputs < num_outputs
    num_blocks: tl.constexpr = (NUM_INPUTS + 8 * GROUP - 1) // (8 * GROUP)
    num_rows = num_outputs * 2 if ACTIVATION else num_outputs
    rows = codes + outputs.to(tl.int64)[:, None] * (num_blocks * GROUP) + words
    second_rows = rows + num_outputs.to(tl.int64) * (num_blocks * GROUP)
    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), tl.float32)
    values = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), tl.float32)
    part_size: tl.constexpr = tl.cdiv(num_blocks, PARTS)
    begin = tl.program_id(1) * part_size
    end = tl.minimum(begin + part_size, num_blocks)
    for block in tl.range(begin, end, num_stages=STAGES):
        weights = weights_of(tl.load(rows + block * GROUP, mask=output_mask[:, None], other=0))
        if ACTIVATION:
            second = weights_of(tl.load(second_rows + block * GROUP, mask=output_mask[:, None], other=0))
        for group in tl.static_range(8):
            columns = (block * 8 + group) * GROUP + words
            part_mask = token_mask[None, :]
            if NUM_INPUTS % (8 * GROUP) != 0:
                part_mask = part_mask & (columns < NUM_INPUTS)[:, None]
            places = tokens[None, :] * NUM_INPUTS + columns[:, None]
            part = tl.load(states + places, mask=part_mask, other=0.0)
            pairs = tl.load(scales + (block * 4 + group // 2) * num_rows + outputs, mask=output_mask, other=0)
            sums = add_products(sums, part, weights[group], pairs, group % 2)
            if ACTIVATION:
                others = scales + (block * 4 + group // 2) * num_rows + num_outputs + outputs
                values = add_products(
                    values, part, second[group], tl.load(others, mask=output_mask, other=0), group % 2
                )
    store_product(
        sums,
        values,
        bias,
        residual,
        output,
        partial_sums,
        num_finished,
        num_tokens,
        num_outputs,
        scale,
        HAS_BIAS,
        HAS_RESIDUAL,
        ACTIVATION,
        BLOCK_TOKENS,
        BLOCK_OUTPUTS,
        PARTS,
    )


@triton.jit(do_not_specialize=["width"])
def rotate_kernel(
    qkv,
    queries,
    keys,
    values,
    query_norm,
    key_norm,
    table,
    slots,
    starts,
    positions,
    width,
    slot_stride,
    head_stride,
    eps,
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Normalise and rotate a token's queries and keys; write keys and values to the cache.

    Rows whose start is negative write nothing to the cache.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    row = token // width
    places = tl.arange(0, BLOCK)
    mask = places < SIZE
    source = qkv + (token * (NUM_QUERIES + 2 * NUM_KEYS) + head) * SIZE
    found = tl.load(source + places, mask=mask, other=0.0).to(tl.float32)
    if head < NUM_QUERIES + NUM_KEYS:
        others = places ^ 1 if IS_INTERLEAVED else (places + ROTATED // 2) % ROTATED
        is_rotated = places < ROTATED
        other = tl.load(source + others, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_NORM:
            factor = tl.rsqrt(tl.sum(found * found, 0) / SIZE + eps)
            norm = query_norm
            if head >= NUM_QUERIES:
                norm = key_norm
            found = found * factor * tl.load(norm + places, mask=mask, other=0.0).to(tl.float32)
            other = other * factor * tl.load(norm + others, mask=is_rotated, other=0.0).to(tl.float32)
        angles = table + tl.load(positions + token) * (2 * ROTATED) + places
        cos = tl.load(angles, mask=is_rotated, other=1.0).to(tl.float32)
        sin = tl.load(angles + ROTATED, mask=is_rotated, other=0.0).to(tl.float32)
        found = found * cos + other * sin
    if head < NUM_QUERIES:
        place = (token * NUM_QUERIES + head) * SIZE + places
        tl.store(queries + place, found.to(queries.dtype.element_ty), mask=mask)
    else:
        start = tl.load(starts + row)
        is_cached = start >= 0
        cell = start + token % width
        into = tl.load(slots + row) * slot_stride + cell * SIZE + places
        if head < NUM_QUERIES + NUM_KEYS:
            into += (head - NUM_QUERIES) * head_stride
            tl.store(keys + into, found.to(keys.dtype.element_ty), mask=mask & is_cached)
        else:
            into += (head - NUM_QUERIES - NUM_KEYS) * head_stride
            tl.store(values + into, found.to(values.dtype.element_ty), mask=mask & is_cached)


@triton.jit(do_not_specialize=["width", "num_chunks", "chunk_size", "window"])
def attention_kernel(
    queries,
    keys,
    values,
    slots,
    starts,
    positions,
    ancestors,
    sums,
    statistics,
    width,
    slot_stride,
    head_stride,
    num_chunks,
    chunk_size,
    scaling,
    cap,
    window,
    IS_CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Write the unnormalised attention output of one chunk of keys, with its maximum and its sum.

    A query attends to the cached keys and to its ancestors or, if the pass is causal, to all queries before it.
    Statistics are `[token, head, chunk, 2]`, outputs `[token, head, chunk, size]`, in float32.
    """
    row, kv_head = tl.program_id(0) // NUM_KEYS, tl.program_id(0) % NUM_KEYS
    chunk = tl.program_id(1)
    start = tl.load(starts + row)
    total = start + width
    low = chunk * chunk_size
    places = tl.arange(0, BLOCK_SIZE)
    is_place = places < SIZE
    base = tl.load(slots + row) * slot_stride + kv_head * head_stride
    if (start >= 0) & (low < total):
        folded = tl.program_id(2) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
        query = folded // GROUP
        is_query = query < width
        head = kv_head * GROUP + folded % GROUP
        token = row * width + query
        heads = token * (NUM_KEYS * GROUP) + head
        query_tile = tl.load(
            queries + heads[:, None] * SIZE + places[None, :],
            mask=is_query[:, None] & is_place[None, :],
            other=0.0,
        )
        position = tl.load(positions + token, mask=is_query, other=0)
        if not IS_CAUSAL:
            visible_nodes = tl.load(ancestors + token, mask=is_query, other=0)
        largest = tl.full((BLOCK_QUERIES,), -float("inf"), tl.float32)
        weights = tl.zeros((BLOCK_QUERIES,), tl.float32)
        attended = tl.zeros((BLOCK_QUERIES, BLOCK_SIZE), tl.float32)
        first = low
        if HAS_WINDOW:
            # positions never fall along a row's queries' paths below its start
            oldest = tl.maximum(start + 1 - window, 0)
            first = tl.maximum(low, oldest // BLOCK_KEYS * BLOCK_KEYS)
        end = tl.minimum(low + chunk_size, total)
        if IS_CAUSAL:
            last = (tl.program_id(2) * BLOCK_QUERIES + BLOCK_QUERIES - 1) // GROUP
            end = tl.minimum(end, start + last + 1)
        for block_start in range(first, end, BLOCK_KEYS):
            cells = block_start + tl.arange(0, BLOCK_KEYS)
            is_cell = cells < total
            block = base + cells[:, None] * SIZE + places[None, :]
            block_mask = is_cell[:, None] & is_place[None, :]
            key = tl.load(keys + block, mask=block_mask, other=0.0)
            scores = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scaling
            if HAS_CAP:
                scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
            node = cells - start
            if IS_CAUSAL:
                visible = node[None, :] <= query[:, None]
            else:
                bits = visible_nodes[:, None] >> tl.minimum(tl.maximum(node, 0), 63)[None, :]
                visible = ((node < 0)[None, :] | ((bits & 1) == 1)) & is_cell[None, :]
            if HAS_WINDOW:
                node_positions = tl.load(positions + row * width + node, mask=(node >= 0) & is_cell, other=0)
                key_position = tl.where(node < 0, cells, node_positions)
                visible = visible & (position[:, None] - key_position[None, :] < window)
            scores = tl.where(visible, scores, -float("inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            shift = tl.where(larger == -float("inf"), 0.0, larger)
            probs = tl.exp(scores - shift[:, None])
            decay = tl.exp(largest - shift)
            weights = weights * decay + tl.sum(probs, 1)
            value = tl.load(values + block, mask=block_mask, other=0.0)
            attended = attended * decay[:, None]
            attended = tl.dot(probs.to(value.dtype), value, attended, input_precision="ieee")
            largest = larger
        into = heads.to(tl.int64) * num_chunks + chunk
        tl.store(statistics + into * 2, largest, mask=is_query)
        tl.store(statistics + into * 2 + 1, weights, mask=is_query)
        tl.store(
            sums + into[:, None] * SIZE + places[None, :],
            attended,
            mask=is_query[:, None] & is_place[None, :],
        )


@triton.jit(do_not_specialize=["width", "num_chunks", "chunk_size"])
def merge_kernel(
    sums,
    statistics,
    starts,
    output,
    width,
    num_chunks,
    chunk_size,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Write a block of a token's attention output of one head, joined from the chunks; zeros for padding."""
    token, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + token // width)
    places, chunks = tl.program_id(2) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_CHUNKS)
    is_place = places < SIZE
    attended = tl.zeros((BLOCK_SIZE,), tl.float32)
    largest = -float("inf")
    weight = 0.0
    at = (token * NUM_HEADS + head).to(tl.int64) * num_chunks
    num_read = tl.where(start < 0, 0, tl.cdiv(start + width, chunk_size))
    for first in range(0, num_read, BLOCK_CHUNKS):
        chunk_index, is_read = at + first + chunks, first + chunks < num_read
        maxima = tl.load(statistics + chunk_index * 2, mask=is_read, other=-float("inf"))
        totals = tl.load(statistics + chunk_index * 2 + 1, mask=is_read, other=0.0)
        block = chunk_index[:, None] * SIZE + places
        found = tl.load(sums + block, mask=is_read[:, None] & is_place, other=0.0)
        larger = tl.maximum(largest, tl.max(maxima, 0))
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        kept, factors = tl.exp(largest - shift), tl.exp(maxima - shift)
        attended = attended * kept + tl.sum(factors[:, None] * found, 0)
        weight = weight * kept + tl.sum(factors * totals, 0)
        largest = larger
    attended = tl.where(weight > 0, attended / weight, 0.0)
    into = output + (token * NUM_HEADS + head) * SIZE + places
    tl.store(into, attended.to(output.dtype.element_ty), mask=is_place)


@triton.jit
def most_likely_kernel(
    logits,
    partial,
    num_finished,
    tokens,
    confidences,
    num_logits,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the most likely token of a row, the lowest among equals, and its softmax.

    The softmax is NaN if a logit is NaN or infinite, or all are minus infinity.

    Each program reads a block of logits; the one of a row that finishes last joins what all have written to `partial`,
    `[row, part, 3]` in float32: their largest logit, its token, and the sum of exponentials.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    places = part * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(
        logits + row.to(tl.int64) * num_logits + places, mask=places < num_logits, other=-float("inf")
    )
    largest = tl.max(found, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    into = partial + (row * PARTS + part) * 3
    tl.store(into, largest)
    tl.store(into + 1, tl.min(tl.where(found == largest, places, num_logits), 0).to(tl.float32))
    tl.store(into + 2, tl.sum(tl.exp(found - shift), 0))
    tl.debug_barrier()
    if tl.atomic_add(num_finished + row, 1, sem="acq_rel") == PARTS - 1:
        tl.store(num_finished + row, 0)
        parts = tl.arange(0, triton.next_power_of_2(PARTS))
        part_address, is_part = partial + (row * PARTS + parts) * 3, parts < PARTS
        # Past the cache of the multiprocessor, which does not see what others have written.
        maxima = tl.load(part_address, mask=is_part, other=-float("inf"), cache_modifier=".cg")
        candidates = tl.load(part_address + 1, mask=is_part, other=0.0, cache_modifier=".cg")
        totals = tl.load(part_address + 2, mask=is_part, other=0.0, cache_modifier=".cg")
        largest = tl.max(maxima, 0)
        token = tl.min(tl.where(maxima == largest, candidates.to(tl.int32), num_logits), 0)
        tl.store(tokens + row, tl.minimum(token, num_logits - 1).to(tl.int64))
        tl.store(confidences + row, (1.0 / tl.sum(totals * tl.exp(maxima - largest), 0)).to(tl.float64))
