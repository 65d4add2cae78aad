"""Mutation tests: known mistakes of speculative decoding, each detected by a test.

A mutant patches the package; a check is one of the proofs of test_distributions, test_noise or test_certificate in small. Each
check passes on the code as it ships and fails with the mutant in place.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy
import torch
from transformers import AutoModelForCausalLM

from distribution_cases import (
    PAIRS,
    PAIRS_WITH_END,
    PROMPT,
    ROUNDING,
    SAMPLED,
    dist_error,
    expected_accepted,
    make_pair_drafter,
    mean_accepted,
    one_hot_dist,
    plain_dist,
    play,
    seasoned,
)
from families import FAMILIES
from grammar_cases import ENDS, REGEXES, masked_dist, with_regex
from mutant_cases import Check, Mutant, Patch, check, mutation_test
from noise_cases import CRUDE, ONE_SIDED, chained_text_p_value
from secondguess import decode as loop
from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.core import Budgets, Draft, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters import combined
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.dspark import DsparkDrafter
from secondguess.drafters.feature_drafter import FeatureDrafter
from secondguess.drafters.medusa import MedusaDrafter
from secondguess.drafters.mirroring import TokenDrafter
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.self import SelfDrafter
from secondguess.drafters.suffix import SuffixDrafter
from secondguess.drafters.trees import StaticTree
from secondguess.drafters.vocabulary.drafter import TranslatingDrafter
from secondguess.heads import feature
from secondguess.heads.base import DraftVocabulary, TargetModel
from secondguess.heads.block_layers import BlockAttention
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.feature import FeatureHead, TrainingTimeAttention
from secondguess.heads.formats import checkpoint_tensors
from secondguess.heads.layer import RotaryPositions
from secondguess.heads.learning import TrainingBatch
from secondguess.heads.markov import RecurrentMarkovHead
from secondguess.heads.medusa import MedusaConfig, MedusaHead
from secondguess.heads.runtime import BlockRuntime, FeatureRuntime
from secondguess.proof.enumeration import EnumeratingNoise, enumerate_rounds
from secondguess.proof.fakes import ScriptedDrafter, TableModel
from secondguess.runtime import cached, tree
from secondguess.runtime.base import Runtime
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.cpu import chain as native_chain
from secondguess.runtime.cpu import forward as native_forward
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.library import units
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.cuda import chains, draws
from secondguess.runtime.cuda import runtime as graphs
from secondguess.runtime.decoder.fused import FusedRuntime
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.hashes import Purpose
from secondguess.runtime.modules.recurrent import RecurrentRuntime
from secondguess.runtime.modules.recurrent_cache import RecurrentCache
from secondguess.runtime.modules.tiny import tiny_pair
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.runtime.step import ForwardStep
from secondguess.sampling import SamplingParams, penalties
from secondguess.sampling.grammar import GrammarMatcher
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.probs import compute_target_probs
from secondguess.verifiers import auto, base, block, coupled, make_verifier, rejection, residuals
from unrolled_cases import WIDTH, drafts_as_it_learned, fresh_head
from verifiers.test_verifiers import batches_are_verified_like_single_rows

# Checks: each returns whether the code passes.


def dist_holds(
    verifier: str,
    drafter: str = "sampled",
    controller: Controller | str = "fixed:3",
    params: SamplingParams = SAMPLED,
    num_rounds: int = 1,
    pairs: tuple[str, ...] = ("ternary", "zeros", "equal-at-times"),
    **row_settings: object,
) -> bool:
    """Return whether the enumerated output distribution is that of plain decoding."""
    errors = []
    for pair in (PAIRS[name] for name in pairs):
        branches = play(
            pair,
            make_pair_drafter(drafter, pair),
            verifier,
            controller,
            params,
            num_rounds,
            **row_settings,
        )
        ends = row_settings.get("end_tokens", frozenset())
        errors.append(dist_error(branches, plain_dist(pair, params), 4, ends))
    return max(errors) < ROUNDING


def grammar_holds(drafter: str, regex: str, verifier: str = "auto", num_rounds: int = 1) -> bool:
    """The enumerated distribution of the text is plain decoding's with the mask of an oracle."""
    pair, params = PAIRS_WITH_END["four"], with_regex(SAMPLED, REGEXES[regex])
    length = "fixed:2" if num_rounds == 1 else "fixed:1"
    branches = play(
        pair, make_pair_drafter(drafter, pair), verifier, length, params, num_rounds, end_tokens=ENDS
    )
    return dist_error(branches, masked_dist(pair.target, REGEXES[regex], PROMPT), 5, ENDS) < ROUNDING


def acceptance_holds(verifier: str, coupled: bool = False) -> bool:
    """Return whether the mean number of accepted nodes equals the formula."""
    pair = PAIRS["ternary"]
    branches = play(pair, make_pair_drafter("sampled", pair), verifier, "fixed:1", coupled=coupled)
    if not coupled:
        expected = expected_accepted(pair, 1, verifier)
    else:
        p, q = pair.target(PROMPT), pair.drafter(PROMPT)
        expected = float(sum(1 / torch.maximum(p / p[x], q / q[x]).sum() for x in range(3)))
    return abs(mean_accepted(branches) - expected) < ROUNDING


def keyed_dist_holds(verifier: str, coupled: bool = False, drafter: torch.Tensor = CRUDE) -> bool:
    """Several rounds with the noise that ships: G-test of 20,000 texts of 5 tokens, at 1e-6."""
    return chained_text_p_value(verifier, coupled=coupled, drafter=drafter) > 1e-6


def cached_dist_holds(kind: str = "module", *, is_copied: bool = False) -> bool:
    """Two rounds on real Transformers models, enumerated: what the caches hold after a verdict is the truth.

    With `is_copied` the target's quantised copy drafts.
    """
    exact = torch.bfloat16 if kind == "native" else torch.float64
    target, drafter = (model.to(exact) for model in tiny_pair(vocab_size=2))

    def next_dist(output):
        tokens = torch.tensor([[0, 1, *output]])
        with torch.inference_mode():
            # The reference of the kernels is their own pass over the whole text, that of the others the module.
            uncached = runtime.probe(tokens) if kind == "native" else target(tokens, use_cache=False)
            return uncached.logits[0, -1].double().softmax(-1)

    if kind == "native":
        runtime, draft_runtime = (
            NativeRuntime(NativeDecoder(FusedDecoder(model, packed=False))) for model in (target, drafter)
        )
    found = exact_model_dist(target, next_dist)
    if kind != "native":
        runtime, draft_runtime = (
            FusedRuntime(FusedDecoder(model, packed=False)) if kind == "fused" else TransformersRuntime(model)
            for model in (target, drafter)
        )
    for each in (runtime, draft_runtime):
        each._prefills_together = True  # one pass for all branches instead of one per branch
    components = Components(
        runtime,
        SelfDrafter(runtime, "self:int4") if is_copied else ModelDrafter(draft_runtime, "model:tiny", 2),
        make_verifier("block"),
        make_controller("fixed:2"),
    )
    (branches,) = enumerate_rounds(components, lambda: [Row([0, 1], SAMPLED)], num_rounds=2)
    # The modules compute their norms in float32, the fused runtime in float64; the kernels return logits in float32.
    error = dist_error(branches, lambda output: found[output], num_tokens=4)
    return error < (ROUNDING if kind == "module" else 1e-6)


@cache
def hybrid_runtime() -> RecurrentRuntime:
    """Return a runtime that was loaded without mutants, since the check at loading notices some of them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RecurrentRuntime(AutoModelForCausalLM.from_config(FAMILIES["falcon-h1"]()).double())


def recurrent_rows_forget(records: bool) -> bool:
    """Return whether rounds with rejections leave a hybrid's logits, with states recorded by token or run again."""
    runtime, row = hybrid_runtime(), Row([5, 6, 7], SAMPLED)
    runtime.free()
    runtime.records_states = records
    runtime.begin([row])
    errors = []
    for num_accepted in (1, 0, 2, 0):
        logits = runtime.score([row], Draft.chains([[8, 9]])).logits[0]
        with torch.inference_mode():
            expected = runtime.model(torch.tensor([[*row.tokens, 8, 9]]), use_cache=False).logits[0, -3:]
        errors.append(float((logits - expected).abs().max()))
        runtime.keep([row], [range(num_accepted)])
        row.tokens += [*[8, 9][:num_accepted], 4]
    return max(errors) < 1e-5


def native_trees_are_chains() -> bool:
    """Return whether each path of a tree has the logits of the same tokens as text."""
    (model, _) = (each.bfloat16() for each in tiny_pair(vocab_size=5))
    runtime = NativeRuntime(NativeDecoder(FusedDecoder(model, packed=False)))
    expected = runtime.probe(torch.tensor([[0, 1, 4]])).logits[0, -1]
    row = Row([0, 1], SAMPLED)
    runtime.begin([row])
    siblings = Draft(torch.tensor([[3, 4]]), torch.tensor([[-1, -1]]), torch.tensor([2]))
    return torch.equal(runtime.score([row], siblings).logits[0, 2], expected)


def batches_draw_as_token_by_token(runtime: Callable[[], Runtime]) -> bool:
    """Return whether the same chains are drawn at once for a batch, whose rows have one and two tokens to read."""
    drafter = TokenDrafter(runtime(), "model:tiny", 5)
    params = [SAMPLED, SamplingParams(temperature=0.0), SAMPLED]
    found = []
    for at_once in (True, False):
        rows = [Row([number, 1, 2] * 6, each, seed=number) for number, each in enumerate(params)]
        for _ in range(2):
            noise = KeyedNoise.from_rows(rows)
            if not at_once:
                noise.of_rows = lambda: None
            drafter.prepare(rows, [0] * 3)
            draft = drafter.propose(rows, Budgets([3] * 3, lambda *_: [True] * 3, uses_probs=False), noise)
            found.append((draft.token_lists, draft.probs))
            for row, nodes, length in zip(rows, draft.token_lists, (3, 3, 0), strict=True):
                row.tokens += [*nodes[:length], 4]
        for row in rows:
            drafter.release(row)
        drafter.reset_prefix_cache()
    return all(
        tokens == others and torch.allclose(probs, expected, atol=1e-5)
        for (tokens, probs), (others, expected) in zip(found[:2], found[2:], strict=True)
    )


def of_graphs() -> Runtime:
    (_, model) = tiny_pair(vocab_size=5)
    return graphs.GraphRuntime(FusedDecoder(model, packed=False))


def of_kernels() -> Runtime:
    (_, model) = tiny_pair(vocab_size=5)
    return NativeRuntime(NativeDecoder(FusedDecoder(model.bfloat16(), packed=False)))


def heads_draft_as_they_learn(kind: str) -> bool:
    """Return whether a head's distributions along each path, after rounds with trees, are those in training.

    The text is right with any drafts: only this check detects worse ones.
    """
    target = TransformersRuntime(tiny_pair(vocab_size=5)[0])
    drafter = head_drafter(kind, target, StaticTree((2, 1)))
    row = Row([0, 1, 4, 2], SamplingParams(temperature=1.0, max_tokens=60), seed=11)
    components = Components(target, drafter, make_verifier("auto"), make_controller("fixed:2"))
    rounds = decode(components, [row])
    for _ in range(8):
        next(rounds)
    budgets = Budgets([2], lambda dists, depth: [True], uses_probs=False)
    with torch.inference_mode():
        drafter.prepare([row], [0])
        draft = drafter.propose([row], budgets, KeyedNoise.from_rows([row]))
    text, drawn = list(row.tokens), draft.tokens[0].tolist()
    rounds.close()
    errors = []
    for elder, younger in ((0, 2), (1, 3)):
        said = learnt_dists(target, drafter.head, [*text, drawn[elder], drawn[younger]], len(text) - 1)
        errors.append(torch.stack(said) - draft.probs[0, [elder, younger]])
    return max(float(error.abs().max()) for error in errors) < 1e-5


WINDOWED = (BlockAttention(window=3, is_causal=True), BlockAttention(window=2, from_anchor=True))
BLOCK_KINDS = {
    "dspark": {},
    "dspark-windows": {"attention": WINDOWED},
    "dspark-rnn": {"markov_kind": "rnn"},
    "xpress": {
        "markov_kind": "refiner", "refiner_mlp_size": 4, "block_size": 3, "samples_from_anchor": False,
        "has_confidence": False, "confidence_reads_markov": False,
    },
}  # fmt: skip
"""Options of each kind of block drafter."""


def head_drafter(kind, target, shape):
    model = TargetModel.from_runtime(target)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "medusa":
            head = MedusaHead(MedusaConfig(num_heads=2, num_layers=1, has_bias=True), model)
        else:
            sizes = {"hidden_layers": (0, 1), "block_size": 2, "markov_rank": 3, "num_layers": 2}
            head = DsparkHead(replace(DsparkHead.fresh(model, **sizes).config, **BLOCK_KINDS[kind]), model)
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.7)
    make = MedusaDrafter if kind == "medusa" else DsparkDrafter
    return make(head.to(model.dtype), target, kind, shape)


def learnt_dists(target, head, text, pending):
    """Return the distributions of the nodes after position `pending` as in training: after the text's own tokens."""
    tokens = torch.tensor([text])
    with torch.no_grad():
        states = target.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
    counts = torch.arange(len(text))[None] == pending + 1
    counts[:, pending + 2] = True
    hidden = dict(enumerate(states)) | {-1: states[-1]}
    said = []

    def remember(target_probs, draft_logits):
        said.append(draft_logits.detach())
        nothing = draft_logits.sum(-1) * 0
        return nothing, nothing.detach()

    head.learn(TrainingBatch(tokens, counts, hidden), target.embedding_and_head(), remember)
    if isinstance(head, MedusaHead):  # the counted tokens, one after the other: each depth drafts the next
        return [logits[depth].softmax(-1) for depth, logits in enumerate(said)]
    anchors, chosen = head._anchors(counts)  # DSpark learns at positions that it draws, all depths at once
    nodes = [
        (anchor, depth)
        for anchor in anchors[0][chosen[0]].tolist()
        for depth in range(head.config.num_drafted)
        if anchor + depth + 1 < len(text) and counts[0, anchor + depth + 1]
    ]
    return [said[0][nodes.index((pending, depth))].softmax(-1) for depth in range(len(text) - 1 - pending)]


def exact_model_dist(target, next_dist):
    """Return the model's distributions after every output of up to 3 tokens, from the unmodified module."""
    outputs = [()]
    for output in outputs:
        if len(output) < 3:
            outputs += [(*output, 0), (*output, 1)]
    return {output: next_dist(output) for output in outputs}


def rows_stay_apart() -> bool:
    """Return whether rows of one batch generate, at temperature 0, the same text as alone."""
    pair, params = PAIRS["ternary"], SamplingParams(temperature=0.0, max_tokens=6)
    components = Components(
        TableModel(3, pair.target),
        ScriptedDrafter(lambda row: [sum(row.tokens) % 3, 1]),
        make_verifier("auto"),
        make_controller("fixed:2"),
    )
    rows = [Row([0, 1], params), Row([2], params), Row([1, 1, 2], params)]
    for _ in decode(components, rows):
        pass
    expected = one_hot_dist(3, 3)
    return all(
        row.tokens[place] == int(expected(tuple(row.tokens[:place])).argmax())
        for row in rows
        for place in range(row.num_prompt, len(row.tokens))
    )


def head_says_its_words() -> bool:
    """Return whether a head over some of the target's tokens has its logits at the tokens of its map, read as offsets."""
    head = fresh_head("eagle3")
    thought = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        own, everywhere = head.draft_logits(thought), head.logits(thought)
    offsets = checkpoint_tensors(head, head.vocabulary)["d2t"].tolist()
    at = [index + offset for index, offset in enumerate(offsets)]
    return everywhere.isfinite().nonzero()[:, 0].tolist() == at and torch.equal(everywhere[at], own)


# Mutants: each puts one mistake into the code.


def redraw_from_the_target_after_a_rejection(patch: Patch) -> None:
    patch.setattr(
        residuals, "next_token_probs", lambda draft, dists, lengths, weights: residuals.at(dists, lengths)
    )


def bonus_from_the_last_drafted_place(patch: Patch) -> None:
    original = residuals.next_token_probs

    def next_token_probs(draft, dists, lengths, weights):
        whole = torch.from_numpy(lengths) == draft.lengths
        before = residuals.at(dists, (lengths - 1).clip(0))
        return torch.where(whole[:, None], before, original(draft, dists, lengths, weights))

    patch.setattr(residuals, "next_token_probs", next_token_probs)


def correction_from_the_place_behind(patch: Patch) -> None:
    original = residuals.next_token_probs

    def next_token_probs(draft, dists, lengths, weights):
        return original(draft, dists, (lengths + 1).clip(max=draft.num_nodes), weights)

    patch.setattr(residuals, "next_token_probs", next_token_probs)


def uncapped_last_test(patch: Patch) -> None:
    """Hierarchical speculative decoding as published (algorithms page, 1.4)."""
    original = block.prefix_weights

    def prefix_weights(ratios):
        weights = original(ratios)
        with numpy.errstate(over="ignore"):
            weights[:, -1] = ratios.prod(1).clip(max=1)
        return weights

    patch.setattr(block, "prefix_weights", prefix_weights)


def uncapped_prefix_weights(patch: Patch) -> None:
    def prefix_weights(ratios):
        with numpy.errstate(over="ignore"):
            products = ratios.cumprod(1).clip(max=1)
        return numpy.concatenate([numpy.ones((len(ratios), 1)), products], 1)

    patch.setattr(block, "prefix_weights", prefix_weights)


def block_stops_at_the_first_failure(patch: Patch) -> None:
    original = EnumeratingNoise.accept
    patch.setattr(
        EnumeratingNoise, "accept", lambda self, probs: original(self, probs).cumprod(1).astype(bool)
    )


def drop_the_trigger_token(patch: Patch) -> None:
    """Anticipation: a node is withdrawn because it is an unlikely one (algorithms page, 3.0)."""
    original = ModelDrafter.propose

    def propose(self, rows, budgets, noise):
        draft = original(self, rows, budgets, noise)
        last = (draft.lengths - 1).clamp_min(0)[:, None]
        chance = draft.probs.gather(2, draft.tokens[..., None])[..., 0].gather(1, last)[:, 0]
        dropped = (chance < 0.4) & (draft.lengths > 0)
        return Draft(draft.tokens, draft.parents, draft.lengths - dropped.long(), draft.probs)

    patch.setattr(ModelDrafter, "propose", propose)


def discard_a_poor_draft(patch: Patch) -> None:
    """Anticipation: whether to speculate at all is decided after a look at what was drawn."""
    original = ModelDrafter.propose

    def propose(self, rows, budgets, noise):
        draft = original(self, rows, budgets, noise)
        if not draft.num_nodes:
            return draft
        chance = draft.probs.gather(2, draft.tokens[..., None])[:, 0, 0]
        lengths = torch.where(chance < 0.4, 0, draft.lengths)
        return Draft(draft.tokens, draft.parents, lengths, draft.probs)

    patch.setattr(ModelDrafter, "propose", propose)


def choose_the_drafter_by_its_guess(patch: Patch) -> None:
    """Anticipation: the look-up steps in where the model has drawn an unlikely token."""
    original = CombinedDrafter.propose

    def propose(self, rows, budgets, noise):
        draft = original(self, rows, budgets, noise)
        if not draft.num_nodes:
            return draft
        chance = draft.probs.gather(2, draft.tokens[..., None])[:, 0, 0]
        poor = (chance < 0.4)[:, None]
        tokens = torch.where(poor, 0, draft.tokens)
        one_hot = torch.nn.functional.one_hot(tokens, draft.probs.shape[-1]).to(draft.probs)
        return Draft(tokens, draft.parents, draft.lengths, torch.where(poor[..., None], one_hot, draft.probs))

    patch.setattr(CombinedDrafter, "propose", propose)


def look_ups_beside_samples_have_even_distributions(patch: Patch) -> None:
    patch.setattr(
        combined,
        "one_hot_probs",
        lambda tokens, vocab_size: torch.full((*tokens.shape, vocab_size), 1 / vocab_size),
    )


def draft_distribution_of_another_temperature(patch: Patch) -> None:
    original = ModelDrafter.propose

    def propose(self, rows, budgets, noise):
        draft = original(self, rows, budgets, noise)
        probs = draft.probs.pow(1 / 0.8)
        return Draft(draft.tokens, draft.parents, draft.lengths, probs / probs.sum(-1, keepdim=True))

    patch.setattr(ModelDrafter, "propose", propose)


def greedy_draft_treated_as_sampled(patch: Patch) -> None:
    patch.setattr(EnumeratingNoise, "draft", lambda self, dists, depth, node=None: dists.argmax(-1))


def certain_draft_treated_as_sampled(patch: Patch) -> None:
    original = ScriptedDrafter.propose

    def propose(self, rows, budgets, noise):
        draft = original(self, rows, budgets, noise)
        probs = torch.full((*draft.tokens.shape, 3), 1 / 3, dtype=torch.float64)
        return Draft(draft.tokens, draft.parents, draft.lengths, probs)

    patch.setattr(ScriptedDrafter, "propose", propose)
    patch.setattr(ScriptedDrafter, "deterministic", False)  # else the loop refuses the draft


def shared_outputs_are_drafted_with_their_counts(patch: Patch) -> None:
    """A look-up reports how often each token followed, though it did not draw its draft from that."""
    original = SuffixDrafter.propose

    def propose(self, rows, budgets, noise):
        draft = original(self, rows, budgets, noise)
        likely = torch.nn.functional.one_hot(draft.tokens, 3).double()
        return replace(draft, probs=(1 + 3 * likely) / 6)

    patch.setattr(SuffixDrafter, "propose", propose)


def shared_outputs_are_replayed(patch: Patch) -> None:
    """A cache of replies: what was once written after the same text is committed again."""
    patch.setattr(
        block, "likelihood_ratios", lambda draft, dists: numpy.ones(tuple(draft.tokens.shape)) * 1.0
    )


def sampled_draft_treated_as_certain(patch: Patch) -> None:
    """Acceptance with probability p(x), but the draft distribution is subtracted in the correction."""
    patch.setattr(
        rejection,
        "likelihood_ratios",
        lambda draft, dists: residuals.likelihood_ratios(
            Draft(draft.tokens, draft.parents, draft.lengths), dists
        ),
    )


def draft_of_text_treated_as_sampled(patch: Patch) -> None:
    original = TranslatingDrafter.propose

    def propose(self, rows, budgets, noise):
        draft = original(self, rows, budgets, noise)
        even = torch.full((*draft.tokens.shape, self.vocab_size), 1 / self.vocab_size, dtype=torch.float64)
        return replace(draft, probs=even)

    patch.setattr(TranslatingDrafter, "propose", propose)


def probabilities_passed_to_tokens_encoded_again(patch: Patch) -> None:
    """The rule of TokenTiming (arXiv 2510.15545): drafts are sampled, and their text is encoded by the target's tokenizer.

    A token has the probability of the draft token that is aligned with it, here the one in which it ends;
    the rest is spread over the other tokens. The token is not drawn from that distribution.
    """

    def propose(self, rows, budgets, noise):
        chains, chances = [[] for _ in rows], [[] for _ in rows]
        self.chains = chains
        active = list(range(len(rows)))
        for depth in range(budgets.longest):
            dists = self.chain_logits(rows, active).softmax(-1)
            tokens = noise.draft(dists, depth).tolist()
            for index, token in enumerate(tokens):
                chains[index].append(token)
                chances[index].append(dists[index, token].item())
            self.extend(rows, active, tokens)
        encoded = [self._encoded(chain)[: budgets.longest] for chain in chains]
        probs = torch.zeros(len(rows), max(map(len, encoded)), self.vocab_size, dtype=torch.float64)
        target, draft = self.pair.target, self.pair.draft
        for index, tokens in enumerate(encoded):
            ends = list(itertools.accumulate(len(draft.bytes_of(token)) for token in chains[index]))
            for place, end in enumerate(
                itertools.accumulate(len(target.bytes_of(token)) for token in tokens)
            ):
                chance = chances[index][bisect.bisect_left(ends, end)]
                probs[index, place] = (1 - chance) / (self.vocab_size - 1)
                probs[index, place, tokens[place]] = chance
        return Draft.chains(encoded, probs)

    patch.setattr(TranslatingDrafter, "propose", propose)


def lenience(patch: Patch) -> None:
    patch.setattr(rejection, "likelihood_ratios", lambda *args: 1.05 * residuals.likelihood_ratios(*args))


def clipped_residual(patch: Patch) -> None:
    original = residuals.residual

    def residual(*args):
        dists, _ = original(*args)
        dists = torch.where(dists < 1e-3, 0.0, dists)
        return dists, dists.sum(-1).numpy()

    patch.setattr(residuals, "residual", residual)


def top_p_after_the_ratio(patch: Patch) -> None:
    """Acceptance compares untruncated distributions; only corrections are truncated."""
    seen = {}

    def remember(logits, rows, draft):
        seen["probs"] = logits.softmax(-1)
        return compute_target_probs(logits, rows, draft)

    patch.setattr(base, "compute_target_probs", remember)
    patch.setattr(
        rejection, "likelihood_ratios", lambda draft, dists: residuals.likelihood_ratios(draft, seen["probs"])
    )


def distributions_of_the_next_place(patch: Patch) -> None:
    patch.setattr(
        rejection,
        "likelihood_ratios",
        lambda draft, dists: residuals.likelihood_ratios(draft, dists.roll(-1, 1)),
    )


def padding_counts_as_rejected(patch: Patch) -> None:
    """A short row of a padded batch, accepted whole, is corrected for a node that it never had."""
    original = residuals.next_token_probs

    def next_token_probs(draft, dists, lengths, weights):
        padded = torch.full_like(draft.lengths, draft.num_nodes)
        return original(Draft(draft.tokens, draft.parents, padded, draft.probs), dists, lengths, weights)

    patch.setattr(residuals, "next_token_probs", next_token_probs)


def tree_walk_ignores_parents(patch: Patch) -> None:
    original = base.accept_matching

    def accept_matching(draft, chosen):
        flat = torch.arange(-1, draft.num_nodes - 1).expand_as(draft.parents)
        return original(Draft(draft.tokens, flat, draft.lengths), chosen)

    for module in (base, coupled):
        patch.setattr(module, "accept_matching", accept_matching)


def penalties_skip_drafted_ancestors(patch: Patch) -> None:
    patch.setattr(
        Draft,
        "ancestors",
        lambda self: torch.zeros(self.num_rows, self.num_nodes, self.num_nodes, dtype=torch.bool),
    )


def grammar_of_the_committed_text_at_every_node(patch: Patch) -> None:
    original = GrammarMatcher.allowed
    patch.setattr(GrammarMatcher, "allowed", lambda self, path: original(self, ()))


def grammar_skips_the_bonus(patch: Patch) -> None:
    original = penalties.mask_by_grammar_

    def mask_by_grammar_(logits, rows, nodes, visible):
        last = logits[:, -1].clone()
        original(logits, rows, nodes, visible)
        if logits.shape[1] > 1:
            logits[:, -1] = last

    patch.setattr(penalties, "mask_by_grammar_", mask_by_grammar_)


def grammar_keeps_rejected_nodes(patch: Patch) -> None:
    """A rejected draft is not rolled back: the state is no longer that of the committed text."""
    original = GrammarMatcher.push
    patch.setattr(GrammarMatcher, "_restart", lambda self: None)  # it would read the committed text again

    def push(self, token):
        self._path = ()
        is_complete = original(self, token)
        self.has_failed = False  # it would end the text, which the enumeration continues
        return is_complete

    patch.setattr(GrammarMatcher, "push", push)


def grammar_ends_only_between_rounds(patch: Patch) -> None:
    """Nodes after the end of the grammar are committed."""
    original = Row.commit

    def commit(self, accepted, next_token, rejected=()):
        grammar, self.grammar = self.grammar, None
        committed = original(self, accepted, next_token, rejected)
        self.grammar = grammar
        for token in committed.tokens:
            if grammar.push(token):
                self.finish_reason = self.finish_reason or "stop"
        return committed

    patch.setattr(Row, "commit", commit)


def end_token_inside_a_draft_is_overlooked(patch: Patch) -> None:
    original = Row.commit

    def commit(self, accepted, next_token, rejected=()):
        ends, self.end_tokens = self.end_tokens, frozenset()
        self.tokens.extend(accepted)
        self.end_tokens = ends
        return original(self, [], next_token)

    patch.setattr(Row, "commit", commit)


def rows_swapped_in_the_batch(patch: Patch) -> None:
    original = loop.verify_logits

    def verify(*arguments):
        verdict = original(*arguments)
        return Verdict(verdict.paths, [*verdict.next_tokens[-1:], *verdict.next_tokens[:-1]])

    patch.setattr(loop, "verify_logits", verify)


def stale_cache_after_a_rejection(patch: Patch) -> None:
    """Compaction off by one: keys of the next node are stored where an accepted node's should."""
    original = CachedRuntime.keep

    def keep(self, rows, paths):
        moves = [
            (self.slots[row].slot, self.slots[row].length, [node + 1 for node in path])
            for row, path in zip(rows, paths, strict=True)
            if path and path[-1] + 1 < self.slots[row].num_nodes
        ]
        original(self, rows, paths)
        if moves:
            with torch.inference_mode():
                self.cache.compact(*zip(*moves, strict=True))

    patch.setattr(CachedRuntime, "keep", keep)


def states_after_rejected_nodes_are_kept(patch: Patch) -> None:
    original = RecurrentRuntime._commit

    def commit(self, state, last):
        original(self, state, max(self._ends.get(state, {}), default=last))

    patch.setattr(RecurrentRuntime, "_commit", commit)


def keys_of_rejected_nodes_are_kept(patch: Patch) -> None:
    """Attention is not cropped: a row's next keys follow those of all nodes so far."""
    original, reached = RecurrentCache.place_path, {}

    def place_path(self, slot, start, path, num_queries):
        gap = max(0, reached.get(id(self), 0) - start) if start else 0
        reached[id(self)] = path[-1] + 1 + gap
        original(self, slot, start + gap, [place + gap for place in path], num_queries)

    patch.setattr(RecurrentCache, "place_path", place_path)


def replayed_tokens_are_dropped(patch: Patch) -> None:
    """The pass after a rejection begins with pending, as for keys and values."""

    def catch_up(self, states):
        for state in states:
            state.length = len(state.row.tokens) - 1
        return [1] * len(states)

    def states_at(self, slot, length):
        return self.snapshots[slot][-1].states if length else {}

    patch.setattr(RecurrentRuntime, "_catch_up", catch_up)
    patch.setattr(RecurrentCache, "states_at", states_at)


def rejected_nodes_stay_visible(patch: Patch) -> None:
    """The mask lets a query see every place of the cache, including those of later nodes."""
    original = tree.chain_mask

    def chain_mask(*args):
        return torch.ones_like(original(*args))

    patch.setattr(tree, "chain_mask", chain_mask)


def kernels_look_beyond_the_cache(patch: Patch) -> None:
    """They get one cached token more than there is."""
    original = native_forward.KernelForward._prepare

    def prepare(self, cache, inputs):
        step = replace(inputs.step, starts=[each + (each > 0) for each in inputs.step.starts])
        return original(self, cache, inputs._replace(step=step))

    patch.setattr(native_forward.KernelForward, "_prepare", prepare)


def siblings_see_each_other(patch: Patch) -> None:
    """Every node is taken for a descendant of those before it."""
    original = cached.ancestor_closure
    patch.setattr(cached, "ancestor_closure", lambda parents: torch.ones_like(original(parents)).tril())


def purposes_share_numbers(one: Purpose, other: Purpose) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        original = KeyedNoise.uniforms
        patch.setattr(
            KeyedNoise,
            "uniforms",
            lambda self, places, purpose: original(self, places, one if purpose == other else purpose),
        )

    return mutate


def places_share_accept_numbers(patch: Patch) -> None:
    original = KeyedNoise.uniforms
    patch.setattr(
        KeyedNoise,
        "uniforms",
        lambda self, places, purpose: original(
            self, [[0] * len(row) for row in places] if purpose == Purpose.ACCEPT else places, purpose
        ),
    )


def rounds_share_numbers(patch: Patch) -> None:
    """Numbers keyed by absolute position alone: a later round meets those a verdict has spoken about."""
    original = KeyedNoise.uniforms

    def uniforms(self, places, purpose):
        fresh = KeyedNoise(self.keys, [0] * len(self.positions), self.coupled, self.greedy)
        moved = [[place + start for place in row] for start, row in zip(self.positions, places, strict=True)]
        return original(fresh, moved, purpose)

    patch.setattr(KeyedNoise, "uniforms", uniforms)


def rows_of_a_batch_share_uniforms(patch: Patch) -> None:
    original = chains.draw_parameters

    def parameters(requests, *rest):
        return original([replace(request, noise=requests[0].noise) for request in requests], *rest)

    patch.setattr(chains, "draw_parameters", parameters)


def rows_of_a_batch_are_read_up_to_the_longest(patch: Patch) -> None:
    patch.setattr(draws, "_last", lambda of_tokens, num_read: of_tokens[:, -1])


def kernels_draw_with_one_key(patch: Patch) -> None:
    original = native_chain.noises_of_rows
    patch.setattr(native_chain, "noises_of_rows", lambda noises: original([noises[0]] * len(noises)))


def kernels_draw_before_the_last_token(patch: Patch) -> None:
    """The logits of the first uncached token of each row serve its first node."""
    original = native_forward.last_token_layout

    def layout(counts):
        whole = original(counts)
        return replace(whole, selected=type(whole.selected)(*whole.firsts[:-1]))

    patch.setattr(native_forward, "last_token_layout", layout)


def rows_share_decisions(patch: Patch) -> None:
    """The first row's numbers serve all rows of a batch."""
    original = KeyedNoise.uniforms
    patch.setattr(
        KeyedNoise,
        "uniforms",
        lambda self, places, purpose: original(
            KeyedNoise(self.keys[:1] * len(places), self.positions, self.coupled, self.greedy),
            places,
            purpose,
        ),
    )


def padding_is_verified(patch: Patch) -> None:
    original = block.BlockVerifier.verify_nodes

    def verify_nodes(self, draft, target_probs, noise):
        whole = replace(draft, lengths=torch.full_like(draft.lengths, draft.num_nodes))
        return original(self, whole, target_probs, noise)

    patch.setattr(block.BlockVerifier, "verify_nodes", verify_nodes)


def raced_nodes_are_rejected(patch: Patch) -> None:
    """Nodes of coupled rows are accepted with a probability, though the text is drawn by the race that drew them."""
    original = auto.verify_groups

    def verify_groups(groups, draft, target_probs, noise):
        _, _, (verifier, _) = groups
        fresh = KeyedNoise(noise.keys, noise.positions, torch.zeros_like(noise.coupled), noise.greedy)
        return original([(verifier, torch.arange(draft.num_rows))], draft, target_probs, fresh)

    patch.setattr(auto, "verify_groups", verify_groups)


def race_forgets_the_position(patch: Patch) -> None:
    original = KeyedNoise._race

    def race(self, dists, depths, *token_ids):
        still = KeyedNoise(self.keys, [0] * len(self.positions), self.coupled, self.greedy)
        return original(still, dists, depths, *token_ids)

    patch.setattr(KeyedNoise, "_race", race)


def neighbouring_races_are_the_same(patch: Patch) -> None:
    original = KeyedNoise._race

    def race(self, dists, depths, *token_ids):
        return original(self, dists, (depths - 1).clamp_min(0), *token_ids)

    patch.setattr(KeyedNoise, "_race", race)


def race_is_off_by_one_from_the_draft(patch: Patch) -> None:
    original = base.query_depths
    patch.setattr(coupled, "query_depths", lambda draft: original(draft) + 1)


def streams_share_numbers(patch: Patch) -> None:
    original = KeyedNoise.from_rows.__func__

    def from_rows(cls, rows, device="cpu"):
        noise = original(cls, rows, device)
        return cls(noise.keys[:1] * len(rows), noise.positions, noise.coupled, noise.greedy)

    patch.setattr(KeyedNoise, "from_rows", classmethod(from_rows))


def medusa_reads_the_state_of_the_old_pending(patch: Patch) -> None:
    """Right after a rejection, stale after an acceptance."""

    def observe(self, rows, verdict, hidden):
        for index, row in enumerate(rows):
            self._states[row] = hidden[-1][index, 0].clone()

    patch.setattr(MedusaDrafter, "observe", observe)


def medusa_heads_are_off_by_one(patch: Patch) -> None:
    """The first head is taken for the prediction of pending."""
    original = MedusaHead.logits
    patch.setattr(MedusaHead, "logits", lambda self, states, depth: original(self, states, max(depth - 1, 0)))


def dspark_hears_rejected_nodes(patch: Patch) -> None:
    """Of a tree's nodes the first are taken for the path."""
    original = DsparkDrafter.observe

    def observe(self, rows, verdict, hidden):
        original(self, rows, Verdict.from_chain(verdict.lengths, verdict.next_tokens), hidden)

    patch.setattr(DsparkDrafter, "observe", observe)


def dspark_keeps_keys_of_the_last_block(patch: Patch) -> None:
    """The keys that a block wrote are not written over by those of the committed text, but attended to as well."""
    original = BlockRuntime._attend

    def attend(self, rows, width):
        attention = original(self, rows, width)
        for row in rows:
            self.slots[row].length += 1
        return attention

    patch.setattr(BlockRuntime, "_attend", attend)


def dspark_bias_of_a_neighbours_parent(patch: Patch) -> None:
    original = DsparkDrafter.tree_logits
    patch.setattr(
        DsparkDrafter,
        "tree_logits",
        lambda self, rows, active, tree: original(
            self, rows, active, Draft(tree.tokens.flip(1), tree.parents, tree.lengths)
        ),
    )


def dspark_reads_beyond_its_windows(patch: Patch) -> None:
    original = BlockRuntime._attend

    def attend(self, rows, width):
        self.config = replace(self.config, attention=())
        return original(self, rows, width)

    patch.setattr(BlockRuntime, "_attend", attend)


def dspark_forgets_earlier_tokens_of_the_block(patch: Patch) -> None:
    patch.setattr(
        RecurrentMarkovHead,
        "last_latent",
        lambda self, states, previous: self.latents(states, previous[..., -1:])[..., -1, :],
    )


def xpress_takes_pending_for_the_token_before_it(patch: Patch) -> None:
    original = DsparkDrafter.start

    def start(self, rows, longest):
        original(self, rows, longest)
        self._previous[0] = self._previous[1]

    patch.setattr(DsparkDrafter, "start", start)


def vocabulary_map_read_as_ids(patch: Patch) -> None:
    original = DraftVocabulary.to_target

    def to_target(self, logits):
        offsets = DraftVocabulary(self.vocab_size)
        offsets.token_ids = self.token_ids - torch.arange(len(self))
        return original(offsets, logits)

    patch.setattr(DraftVocabulary, "to_target", to_target)


def a_node_keeps_the_feature_it_was_drafted_with(patch: Patch) -> None:
    """Committed tokens are not processed again with the target's hidden states."""
    original = FeatureRuntime.rewind
    patch.setattr(
        FeatureRuntime,
        "rewind",
        lambda self, rows, lengths: original(self, rows, [length + 1 for length in lengths]),
    )


def a_token_is_read_beside_its_own_feature(patch: Patch) -> None:
    """The target's states are those after the tokens instead of before them."""
    original = FeatureDrafter.begin

    def begin(self, rows, hidden):
        shifted = [{layer: states.roll(-1, 0) for layer, states in each.items()} for each in hidden]
        original(self, rows, shifted)

    patch.setattr(FeatureDrafter, "begin", begin)


def steps_of_training_stand_in_one_place(patch: Patch) -> None:
    original, unroll = RotaryPositions.forward, FeatureHead.unroll

    def unroll_in_one_place(self, batch):
        with Patch.context() as during:
            during.setattr(
                RotaryPositions,
                "forward",
                lambda self, positions, dtype: original(self, positions - positions[:, :1], dtype),
            )
            return unroll(self, batch)

    patch.setattr(FeatureHead, "unroll", unroll_in_one_place)


def steps_of_training_see_no_earlier_steps(patch: Patch) -> None:
    """Only the text and the last step: a chain of three does not know its second node."""
    original = TrainingTimeAttention.attend

    def attend(self, layer, *heads):
        return original(replace(self, chains={layer: []}), layer, *heads)

    patch.setattr(TrainingTimeAttention, "attend", attend)


def drafts_see_behind_the_window(patch: Patch) -> None:
    patch.setattr(ForwardStep, "visible", lambda self, mask_function, window: self.mask)


def steps_of_training_see_behind_the_window(patch: Patch) -> None:
    patch.setattr(feature, "TrainingTimeAttention", lambda windows: TrainingTimeAttention())


def entries_of_the_copy_are_kept(patch: Patch) -> None:
    """Keys and values of accepted nodes are those that the quantised copy computed while drafting."""
    run_copy, keep = NativeRuntime.run_copy, NativeRuntime.keep
    written = {}

    def blocks_of(runtime):
        return (*runtime.cache.keys, *runtime.cache.values)

    def remember(self, *args):
        logits = run_copy(self, *args)
        written[self] = [block.clone() for block in blocks_of(self)]
        return logits

    def restore(self, rows, paths):
        for row, path in zip(rows, paths, strict=True):
            state = self.slots[row]
            places = slice(state.length - 1, state.length + len(path))
            for entries, old in zip(blocks_of(self), written.get(self, ()), strict=False):
                entries[state.slot, :, places] = old[state.slot, :, places]
        keep(self, rows, paths)

    patch.setattr(NativeRuntime, "run_copy", remember)
    patch.setattr(NativeRuntime, "keep", restore)


def dist(*args: object, **settings: object) -> Check:
    return check(dist_holds, *args, **settings)


PENALISED = SamplingParams(temperature=1.0, frequency_penalty=1.5, max_tokens=20)
TRUNCATED = SamplingParams(temperature=1.0, top_p=0.7, max_tokens=20)

MUTANTS = [
    Mutant(redraw_from_the_target_after_a_rejection, dist("rejection"), "redraw-from-p-token-level"),
    Mutant(redraw_from_the_target_after_a_rejection, dist("block"), "redraw-from-p-block"),
    Mutant(bonus_from_the_last_drafted_place, dist("rejection")),
    Mutant(correction_from_the_place_behind, dist("rejection")),
    Mutant(uncapped_last_test, dist("block")),
    Mutant(uncapped_prefix_weights, dist("block")),
    Mutant(block_stops_at_the_first_failure, dist("block")),
    Mutant(drop_the_trigger_token, dist("block", controller="confidence:3,threshold=0.5")),
    Mutant(drop_the_trigger_token, dist("block", controller=seasoned(3)), "drop-the-trigger-token-cost"),
    Mutant(drop_the_trigger_token, dist("block", controller="entropy:3"), "drop-the-trigger-token-entropy"),
    Mutant(discard_a_poor_draft, dist("block", controller=seasoned(3))),
    Mutant(
        choose_the_drafter_by_its_guess,
        dist("block", "either", controller=seasoned(2), num_rounds=2, pairs=("binary",)),
    ),
    Mutant(look_ups_beside_samples_have_even_distributions, dist("block", "either")),
    Mutant(draft_distribution_of_another_temperature, dist("rejection", pairs=("ternary",))),
    Mutant(greedy_draft_treated_as_sampled, dist("rejection")),
    Mutant(certain_draft_treated_as_sampled, dist("block", "deterministic")),
    Mutant(shared_outputs_are_drafted_with_their_counts, dist("rejection", "shared", history="")),
    Mutant(shared_outputs_are_replayed, dist("block", "shared", history="")),
    Mutant(sampled_draft_treated_as_certain, dist("rejection")),
    Mutant(draft_of_text_treated_as_sampled, dist("rejection", "text")),
    Mutant(probabilities_passed_to_tokens_encoded_again, dist("rejection", "text")),
    Mutant(probabilities_passed_to_tokens_encoded_again, dist("block", "text"), "token-timing-block"),
    Mutant(lenience, dist("rejection")),
    Mutant(clipped_residual, dist("rejection", pairs=("rare",))),
    Mutant(top_p_after_the_ratio, dist("rejection", params=TRUNCATED)),
    Mutant(grammar_of_the_committed_text_at_every_node, check(grammar_holds, "sampled", "may-end")),
    Mutant(
        grammar_of_the_committed_text_at_every_node,
        check(grammar_holds, "small-tree", "may-end"),
        "grammar-of-the-committed-text-tree",
    ),
    Mutant(grammar_skips_the_bonus, check(grammar_holds, "sampled", "may-end", "block")),
    Mutant(grammar_keeps_rejected_nodes, check(grammar_holds, "sampled", "may-end", num_rounds=2)),
    Mutant(grammar_ends_only_between_rounds, check(grammar_holds, "sampled", "short")),
    Mutant(distributions_of_the_next_place, dist("rejection")),
    Mutant(padding_counts_as_rejected, dist("rejection", controller="confidence:3,threshold=0.5")),
    Mutant(tree_walk_ignores_parents, dist("coupled", "tree", pairs=("ternary", "binary"))),
    Mutant(penalties_skip_drafted_ancestors, dist("block", params=PENALISED)),
    Mutant(end_token_inside_a_draft_is_overlooked, dist("block", end_tokens=frozenset({1}))),
    Mutant(rows_swapped_in_the_batch, dist("block"), "rows-swapped-sampled"),
    Mutant(rows_swapped_in_the_batch, check(rows_stay_apart), "rows-swapped-greedy"),
    Mutant(stale_cache_after_a_rejection, check(cached_dist_holds)),
    Mutant(rejected_nodes_stay_visible, check(cached_dist_holds)),
    Mutant(states_after_rejected_nodes_are_kept, check(recurrent_rows_forget, False), "states-kept-replayed"),
    Mutant(states_after_rejected_nodes_are_kept, check(recurrent_rows_forget, True), "states-kept-recorded"),
    Mutant(keys_of_rejected_nodes_are_kept, check(recurrent_rows_forget, False)),
    Mutant(replayed_tokens_are_dropped, check(recurrent_rows_forget, False)),
    Mutant(stale_cache_after_a_rejection, check(cached_dist_holds, "fused"), "stale-cache-fused"),
    Mutant(rejected_nodes_stay_visible, check(cached_dist_holds, "fused"), "rejected-nodes-visible-fused"),
    *(
        [
            Mutant(stale_cache_after_a_rejection, check(cached_dist_holds, "native"), "stale-cache-native"),
            Mutant(kernels_look_beyond_the_cache, check(cached_dist_holds, "native")),
            Mutant(entries_of_the_copy_are_kept, check(cached_dist_holds, "native", is_copied=True)),
            Mutant(siblings_see_each_other, check(native_trees_are_chains)),
        ]
        if units()
        else []
    ),
    Mutant(
        purposes_share_numbers(Purpose.DRAFT, Purpose.ACCEPT),
        check(keyed_dist_holds, "rejection"),
        "draft-and-accept-share-numbers",
    ),
    Mutant(
        purposes_share_numbers(Purpose.ACCEPT, Purpose.DRAW),
        check(keyed_dist_holds, "block", drafter=ONE_SIDED),
        "accept-and-draw-share-numbers",
    ),
    Mutant(places_share_accept_numbers, check(keyed_dist_holds, "rejection")),
    Mutant(rounds_share_numbers, check(keyed_dist_holds, "block")),
    Mutant(rows_of_a_batch_share_uniforms, check(batches_draw_as_token_by_token, of_graphs)),
    Mutant(rows_of_a_batch_are_read_up_to_the_longest, check(batches_draw_as_token_by_token, of_graphs)),
    *[
        Mutant(mutant, check(batches_draw_as_token_by_token, of_kernels))
        for mutant in (kernels_draw_with_one_key, kernels_draw_before_the_last_token)
        if units()
    ],
    *[
        Mutant(mutant, check(batches_are_verified_like_single_rows))
        for mutant in (rows_share_decisions, padding_is_verified, raced_nodes_are_rejected)
    ],
    Mutant(race_forgets_the_position, check(keyed_dist_holds, "coupled", coupled=True)),
    Mutant(neighbouring_races_are_the_same, check(keyed_dist_holds, "coupled", coupled=True)),
    Mutant(race_is_off_by_one_from_the_draft, check(acceptance_holds, "coupled", coupled=True)),
    Mutant(medusa_reads_the_state_of_the_old_pending, check(heads_draft_as_they_learn, "medusa")),
    Mutant(medusa_heads_are_off_by_one, check(heads_draft_as_they_learn, "medusa")),
    Mutant(dspark_hears_rejected_nodes, check(heads_draft_as_they_learn, "dspark")),
    Mutant(dspark_keeps_keys_of_the_last_block, check(heads_draft_as_they_learn, "dspark")),
    Mutant(dspark_bias_of_a_neighbours_parent, check(heads_draft_as_they_learn, "dspark")),
    Mutant(dspark_reads_beyond_its_windows, check(heads_draft_as_they_learn, "dspark-windows")),
    Mutant(dspark_forgets_earlier_tokens_of_the_block, check(heads_draft_as_they_learn, "dspark-rnn")),
    Mutant(xpress_takes_pending_for_the_token_before_it, check(heads_draft_as_they_learn, "xpress")),
    Mutant(streams_share_numbers, check(keyed_dist_holds, "block")),
    # Worse drafts keep the output distribution; the check is that a head drafts as it was trained.
    Mutant(vocabulary_map_read_as_ids, check(head_says_its_words)),
    Mutant(a_node_keeps_the_feature_it_was_drafted_with, check(drafts_as_it_learned, "eagle3")),
    Mutant(a_token_is_read_beside_its_own_feature, check(drafts_as_it_learned, "eagle1")),
    Mutant(steps_of_training_stand_in_one_place, check(drafts_as_it_learned, "mtp")),
    Mutant(steps_of_training_see_no_earlier_steps, check(drafts_as_it_learned, "eagle3")),
    Mutant(drafts_see_behind_the_window, check(drafts_as_it_learned, "eagle3, windows")),
    Mutant(steps_of_training_see_behind_the_window, check(drafts_as_it_learned, "eagle3, windows")),
]

test_the_check_passes_and_fails_with_the_mutant = mutation_test(MUTANTS)
