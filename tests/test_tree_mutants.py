"""Mutation tests of sampled trees, as in test_mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy
import torch

from distribution_cases import (
    PAIRS,
    ROUNDING,
    SAMPLED,
    after_prompt,
    dist_error,
    make_grown_drafter,
    make_tree_drafter,
    play,
)
from mutant_cases import Check, Mutant, Patch, check, mutation_test
from noise_cases import TREE, chained_text_p_value
from secondguess.controllers import make_controller
from secondguess.core import Draft, Row
from secondguess.decode import Components
from secondguess.drafters.trees import TreeBuilder
from secondguess.proof.enumeration import enumerate_rounds
from secondguess.proof.fakes import random_probs
from secondguess.runtime import cached, tree
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.decoder.fused import FusedRuntime
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.modules.tiny import tiny_pair
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling.noise import KeyedNoise
from secondguess.verifiers import make_verifier, shapes, traversal, trees
from secondguess.verifiers.traversal import TraversalVerifier
from test_mutants import exact_model_dist, places_share_accept_numbers, siblings_see_each_other
from tree_drafter import DistTreeDrafter

# Checks: each returns whether the code passes.


def dist_holds(
    verifier: str = "traversal",
    widths: tuple[int, ...] = (2,),
    without_replacement: bool = True,
    min_prob: float = 0.0,
    pairs: tuple[str, ...] = ("ternary", "zeros"),
) -> bool:
    """Return whether the enumerated output distribution is that of plain decoding."""
    errors = []
    for pair in (PAIRS[name] for name in pairs):
        drafter = make_tree_drafter(pair, widths, without_replacement, min_prob)
        errors.append(
            dist_error(play(pair, drafter, verifier, "fixed:9"), after_prompt(pair.target), num_tokens=3)
        )
    return max(errors) < ROUNDING


def dist(*args: object, **settings: object) -> Check:
    return check(dist_holds, *args, **settings)


def keyed_dist_holds() -> bool:
    """Several rounds with the noise that ships: G-test of 20,000 texts of 5 tokens, at 1e-6."""
    return chained_text_p_value("traversal", parents=TREE, without_replacement=False) > 1e-6


def padding_stays_out() -> bool:
    """Two real nodes that cannot be accepted, before three of padding that could."""
    target = torch.tensor([1.0, 0.0]).expand(50, 6, 2)
    tokens = torch.tensor([[1, 1, 0, 0, 0]]).expand(50, 5)
    form = torch.tensor([[-1, -1, -1, -1, -1]]).expand(50, 5)
    probs = torch.tensor([0.5, 0.5]).expand(50, 5, 2)
    draft = Draft(tokens, form, torch.full((50,), 2), probs, without_replacement=False)
    noise = KeyedNoise.from_rows([Row([0], SAMPLED, seed=seed) for seed in range(50)])
    return not any(make_verifier("traversal").verify(draft, target, noise).lengths)


def runtime_of(kind: str, vocab_size: int) -> CachedRuntime:
    model = tiny_pair(vocab_size=vocab_size)[0].double()
    return FusedRuntime(FusedDecoder(model, packed=False)) if kind == "fused" else TransformersRuntime(model)


def paths_are_chains(kind: str) -> bool:
    """Return whether each path of a tree has the logits of the same tokens as text."""
    runtime = runtime_of(kind, vocab_size=5)
    tokens, parents = [3, 4, 2, 1, 0], [-1, -1, 0, 1, 1]
    texts = [[0, 1, 3], [0, 1, 4], [0, 1, 3, 2], [0, 1, 4, 1], [0, 1, 4, 0]]
    expected = [runtime.probe(torch.tensor([text])).logits[0, -1] for text in texts]
    row = Row([0, 1], SAMPLED)
    runtime.begin([row])
    found = runtime.score([row], Draft(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([5])))
    return torch.allclose(found.logits[0, 1:], torch.stack(expected), atol=1e-9)


def cached_dist_holds(kind: str) -> bool:
    """Two rounds with trees on a real cache, enumerated: a scattered path that was accepted is found there."""
    model = tiny_pair(vocab_size=2)[0].double()

    def next_dist(output):
        with torch.inference_mode():
            logits = model(torch.tensor([[0, 1, *output]]), use_cache=False).logits
            return logits[0, -1].double().softmax(-1)

    found = exact_model_dist(model, next_dist)
    components = Components(
        runtime_of(kind, vocab_size=2),
        DistTreeDrafter(2, random_probs(2, 1), (2,)),
        make_verifier("traversal"),
        make_controller("fixed:9"),
    )
    (branches,) = enumerate_rounds(components, lambda: [Row([0, 1], SAMPLED)], num_rounds=2)
    # The modules compute their norms in float32, the fused runtime in float64.
    return dist_error(branches, lambda output: found[output], 4) < (ROUNDING if kind == "module" else 1e-6)


def dynamic_dist_holds() -> bool:
    """Trees of the likeliest nodes, where these are samples."""
    pair = PAIRS["binary"]
    drafter = make_grown_drafter(pair, "dynamic", nodes=2, width=2, depth=2)
    return dist_error(play(pair, drafter, "auto", "fixed:2"), after_prompt(pair.target), 3) < ROUNDING


def siblings_are_judged_in_another_order(patch: Patch) -> None:
    original = shapes.Shape.children.func
    patch.setattr(shapes.Shape, "children", property(lambda self: [nodes[::-1] for nodes in original(self)]))
    patch.setattr(trees, "shape_of", shapes.Shape)


def siblings_claim_to_be(without_replacement: bool) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        original = DistTreeDrafter.propose
        patch.setattr(
            DistTreeDrafter,
            "propose",
            lambda self, *args: replace(original(self, *args), without_replacement=without_replacement),
        )

    return mutate


def twins_are_dropped(patch: Patch) -> None:
    """The presence of a sampled node then depends on its own token."""
    original = DistTreeDrafter.propose

    def propose(self, *args):
        draft = original(self, *args)
        return replace(draft, lengths=torch.where(draft.tokens[:, 0] == draft.tokens[:, 1], 1, draft.lengths))

    patch.setattr(DistTreeDrafter, "propose", propose)


def sampled_nodes_are_ranked_again(patch: Patch) -> None:
    """Anticipation: the last node is dropped if its path is improbable, which is allowed only for deterministic trees."""
    original = DistTreeDrafter.propose

    def propose(self, *args):
        draft = original(self, *args)
        chance = draft.probs.gather(2, draft.tokens[..., None])[:, -1, 0]
        return replace(draft, lengths=draft.lengths - (chance < 0.3).long())

    patch.setattr(DistTreeDrafter, "propose", propose)


def sampled_trees_are_pruned(patch: Patch) -> None:
    """More is drawn than stays, and the likeliest stays, as it may where nodes are no samples."""
    original = TreeBuilder.__init__

    def init(self, *args):
        original(self, *args)
        self.free = [True] * len(self.free)

    patch.setattr(TreeBuilder, "__init__", init)


def levels_are_withdrawn(patch: Patch) -> None:
    """`keep_drafting` is evaluated on the nodes drawn, one level late: an improbable last level is dropped."""
    original = TreeBuilder.grow

    def grow(self, active, logits, tree, depth):
        before = [list(nodes) for nodes in self.nodes]
        parent_logits = original(self, active, logits, tree, depth)
        for row in active:
            if depth and max(self.nodes[row][index].log_prob for index in self.frontiers[row]) < -1.2:
                self.nodes[row], self.frontiers[row] = before[row], []
        return parent_logits

    patch.setattr(TreeBuilder, "grow", grow)


def distributions_without_siblings_are_not_renormalised(patch: Patch) -> None:
    _change_token_probs(
        patch, lambda token_probs: replace(token_probs, remaining=numpy.sign(token_probs.remaining))
    )


def cousins_are_removed_too(patch: Patch) -> None:
    """Nodes of one depth are taken for siblings: those of other parents are removed from a node's distribution."""
    original = trees.Shape.earlier_siblings.func

    def earlier(self):
        depths = [len(path) for path in self.paths[1:]]
        return [
            [other for other in range(node) if depths[other] == depths[node]]
            for node, _ in enumerate(original(self))
        ]

    patch.setattr(trees.Shape, "earlier_siblings", property(earlier))


def what_nobody_drew_is_accepted(patch: Patch) -> None:
    """A distribution without tokens left is still used."""
    _change_token_probs(
        patch, lambda token_probs: replace(token_probs, remaining=token_probs.remaining.clip(1e-3))
    )


def _change_token_probs(patch: Patch, change: Callable[[trees.TokenProbs], trees.TokenProbs]) -> None:
    original = trees.TokenProbs.from_draft.__func__
    patch.setattr(
        trees.TokenProbs, "from_draft", classmethod(lambda cls, *args: change(original(cls, *args)))
    )


def siblings_are_removed_from_the_target_too(patch: Patch) -> None:
    """As for deterministic drafts: the residual is the target's distribution without the rejected tokens."""
    original = trees.Level.reject

    def reject(self, rank, weights):
        before = self._left[:, : len(rank.nodes)]
        masses = original(self, rank, weights)
        self._left = before.scatter(-1, self._draft.tokens[:, rank.nodes, None], 0.0)
        self._totals = self._left.sum(-1).numpy()
        for place, query in enumerate(rank.queries):
            self._dists[query] = self._left[:, place]
        return masses

    patch.setattr(trees.Level, "reject", reject)


def weights_outlive_a_rejection(patch: Patch) -> None:
    patch.setattr(traversal, "weights_after", lambda weights, masses: weights)


def children_are_weighed_before_their_siblings_fail(patch: Patch) -> None:
    """All children of a node are compared with the target's distribution of the first one."""

    def ratios(self, rank):
        nodes = rank.node_index
        known = self._token_probs.target[:, rank.query_index, nodes]
        return known * self._token_probs.remaining[:, nodes] / self._token_probs.drawn[:, nodes]

    patch.setattr(trees.Level, "ratios", ratios)


def corrections_come_from_the_untouched_distribution(patch: Patch) -> None:
    original = traversal.traverse

    def traverse(shape, draft, target_probs):
        return original(shape, draft, target_probs)[0], target_probs.unbind(1)

    patch.setattr(traversal, "traverse", traverse)


def the_distribution_behind_another_node(patch: Patch) -> None:
    """Children are verified by the distribution after their parent's sibling."""
    original = TraversalVerifier.verify_shape

    def verify_shape(self, shape, draft, target_probs, noise):
        exchanged = target_probs.clone()
        exchanged[:, 1], exchanged[:, 2] = target_probs[:, 2], target_probs[:, 1]
        return original(self, shape, draft, exchanged, noise)

    patch.setattr(TraversalVerifier, "verify_shape", verify_shape)


def parents_come_up_before_their_children(patch: Patch) -> None:
    original = traversal.first_accepted
    patch.setattr(traversal, "first_accepted", lambda order, accepted: original(sorted(order), accepted))


def padding_counts_as_drafted(patch: Patch) -> None:
    patch.setattr(Draft, "shapes", property(lambda self: [tuple(row) for row in self.parents.tolist()]))


def nodes_of_one_depth_share_their_number(patch: Patch) -> None:
    original = KeyedNoise.draft
    patch.setattr(KeyedNoise, "draft", lambda self, dists, depth, node=None: original(self, dists, depth))


def grandparents_are_not_seen(patch: Patch) -> None:
    def ancestor_closure(parents):
        nodes = torch.arange(parents.shape[1])
        return (parents[:, :, None] == nodes) | (nodes[:, None] == nodes)

    patch.setattr(cached, "ancestor_closure", ancestor_closure)


def positions_are_indices(patch: Patch) -> None:
    patch.setattr(tree, "depths", lambda closure: torch.arange(closure.shape[1]).expand(closure.shape[:2]))


def scattered_paths_are_left_where_they_are(patch: Patch) -> None:
    patch.setattr(KeyValueCache, "compact", lambda self, *args: None)


MUTANTS = [
    Mutant(siblings_are_judged_in_another_order, dist("traversal"), "sibling-order-traversal"),
    Mutant(siblings_are_judged_in_another_order, dist("recursive"), "sibling-order-recursive"),
    Mutant(siblings_claim_to_be(False), dist("traversal"), "distinct-verified-as-independent"),
    Mutant(
        siblings_claim_to_be(True),
        dist("traversal", without_replacement=False),
        "independent-verified-as-distinct",
    ),
    Mutant(
        siblings_claim_to_be(True), dist("recursive", without_replacement=False), "the-same-under-recursive"
    ),
    Mutant(twins_are_dropped, dist("traversal", without_replacement=False)),
    Mutant(sampled_nodes_are_ranked_again, dist("traversal")),
    Mutant(sampled_trees_are_pruned, check(dynamic_dist_holds)),
    Mutant(levels_are_withdrawn, check(dynamic_dist_holds)),
    Mutant(distributions_without_siblings_are_not_renormalised, dist("traversal")),
    Mutant(cousins_are_removed_too, dist("traversal", widths=(2, 1), pairs=("ternary",))),
    Mutant(siblings_are_removed_from_the_target_too, dist("recursive", without_replacement=False)),
    Mutant(weights_outlive_a_rejection, dist("traversal", widths=(1, 2))),
    Mutant(children_are_weighed_before_their_siblings_fail, dist("traversal")),
    Mutant(corrections_come_from_the_untouched_distribution, dist("traversal")),
    Mutant(the_distribution_behind_another_node, dist("traversal", widths=(2, 1), pairs=("binary",))),
    Mutant(parents_come_up_before_their_children, dist("traversal", widths=(1, 2))),
    Mutant(what_nobody_drew_is_accepted, dist("traversal", pairs=("certain-drafter",))),
    Mutant(padding_counts_as_drafted, check(padding_stays_out)),
    Mutant(nodes_of_one_depth_share_their_number, check(keyed_dist_holds)),
    Mutant(places_share_accept_numbers, check(keyed_dist_holds)),
    *(
        Mutant(mutate, check(paths_are_chains, kind), f"{mutate.__name__}-{kind}")
        for mutate in (siblings_see_each_other, grandparents_are_not_seen, positions_are_indices)
        for kind in ("module", "fused")
    ),
    *(
        Mutant(
            scattered_paths_are_left_where_they_are,
            check(cached_dist_holds, kind),
            f"compaction-forgotten-{kind}",
        )
        for kind in ("module", "fused")
    ),
]

test_the_check_passes_and_fails_with_the_mutant = mutation_test(MUTANTS)
