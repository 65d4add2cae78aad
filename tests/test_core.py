"""Ends of rows, and the index conventions of drafts and verdicts."""

from dataclasses import replace

import pytest
import torch

from secondguess.core import Draft, Row, Verdict
from secondguess.sampling import SamplingParams

END = 9


def row_of(stop_checker=None, context_length=1000, **settings) -> Row:
    return Row(
        [1, 2],
        SamplingParams(**settings),
        end_tokens=frozenset({END}),
        context_length=context_length,
        stop_checker=stop_checker,
    )


class StopAfter:
    """A watcher that finds its stop string at given output positions."""

    def __init__(self, *positions: int) -> None:
        self.positions = positions
        self.seen: list[int] = []

    def push(self, token: int) -> bool:
        self.seen.append(token)
        return len(self.seen) in self.positions


class TestCommit:
    def test_accepted_tokens_are_followed_by_the_targets_own(self):
        row = row_of()
        commit = row.commit([3, 4], 5)
        assert (commit.tokens, commit.num_accepted, commit.drafted) == ([3, 4, 5], 2, [True, True, False])
        assert (row.tokens, row.output, row.num_output, row.pending) == ([1, 2, 3, 4, 5], [3, 4, 5], 3, 5)
        assert not row.finished

    @pytest.mark.parametrize(
        ("accepted", "kept", "num_accepted"),
        [([3, END, 5], [3, END], 2), ([3, 5], [3, 5, END], 2), ([END, END], [END], 1)],
    )
    def test_an_end_token_ends_the_row(self, accepted, kept, num_accepted):
        row = row_of()
        commit = row.commit(accepted, END)
        assert (commit.tokens, commit.num_accepted) == (kept, num_accepted)
        assert (row.output, row.finish_reason) == (kept, "stop")

    def test_the_last_position_ends_the_row(self):
        row = row_of(max_tokens=3)
        assert row.commit([3], 4).tokens == [3, 4]
        assert row.room == 1
        assert row.commit([5, 6], 7).tokens == [5]
        assert row.finish_reason == "length"

    def test_an_end_token_at_the_last_position_is_a_stop(self):
        row = row_of(max_tokens=1)
        row.commit([], END)
        assert row.finish_reason == "stop"

    def test_the_context_ends_the_row_too(self):
        row = row_of(context_length=4)
        assert row.room == 2
        assert row.commit([3, 4, 5], 6).tokens == [3, 4]
        assert row.finish_reason == "context"

    def test_max_tokens_is_the_reason_if_the_context_ends_at_the_same_position(self):
        row = row_of(context_length=4, max_tokens=2)
        row.commit([3], 4)
        assert row.finish_reason == "length"

    def test_a_stop_string_ends_the_row_and_its_watcher(self):
        stop_checker = StopAfter(2)
        row = row_of(stop_checker)
        assert row.commit([3, 4, 5], 6).tokens == [3, 4]
        assert row.finish_reason == "stop"
        assert stop_checker.seen == [3, 4]

    def test_end_tokens_and_stop_strings_do_not_count_before_min_tokens(self):
        row = row_of(StopAfter(1, 4), min_tokens=3)
        assert row.commit([3, END], 5).tokens == [3, END, 5]
        assert not row.finished
        assert row.commit([6], 7).tokens == [6]
        assert row.finish_reason == "stop"

    def test_a_watcher_sees_tokens_that_end_tokens_would_hide(self):
        """Text is made from what the watcher was shown, so it is shown every token that was committed."""
        stop_checker = StopAfter()
        row_of(stop_checker).commit([3], END)
        assert stop_checker.seen == [3, END]


class TestDraft:
    def test_chains_are_padded_trees(self):
        draft = Draft.chains([[5, 6, 7], [], [8]])
        assert draft.tokens.tolist() == [[5, 6, 7], [0, 0, 0], [8, 0, 0]]
        assert draft.parents.tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, -1, -1]]
        assert draft.mask.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
        assert (draft.num_rows, draft.num_nodes, draft.is_chain) == (3, 3, True)

    @pytest.mark.parametrize("draft", [Draft.empty(2), Draft.chains([[], []])])
    def test_a_draft_may_be_empty(self, draft):
        assert draft.tokens.shape == draft.parents.shape == (2, 0)
        assert draft.is_chain
        assert draft.ancestors().shape == (2, 0, 0)
        assert Verdict.from_chain(draft.lengths.tolist(), [1, 2]).paths == [[], []]

    def test_is_chain_ignores_padding(self):
        lengths = torch.tensor([2])
        tokens = torch.tensor([[5, 6]])
        assert not Draft(tokens, torch.tensor([[-1, -1]]), lengths).is_chain
        assert Draft(tokens, torch.tensor([[-1, -1]]), torch.tensor([1])).is_chain

    def test_ancestors_are_the_path_to_the_root(self):
        #  0 ── 1 ── 3 ── 5      2 hangs from pending, 4 from 1; the second row is a chain of 6
        parents = torch.tensor([[-1, 0, -1, 1, 1, 3], [-1, 0, 1, 2, 3, 4]])
        draft = Draft(torch.zeros(2, 6, dtype=torch.long), parents, torch.tensor([6, 6]))
        ancestors = [row.nonzero().flatten().tolist() for row in draft.ancestors()[0]]
        assert ancestors == [[0], [0, 1], [2], [0, 1, 3], [0, 1, 4], [0, 1, 3, 5]]
        assert torch.equal(draft.ancestors()[1], torch.ones(6, 6, dtype=torch.bool).tril())

    @pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 8, 9, 17])
    def test_ancestors_of_chains_of_any_length(self, num_nodes):
        ancestors = Draft.chains([[7] * num_nodes]).ancestors()[0]
        assert torch.equal(ancestors, torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril())

    def test_levels_are_the_longest_paths(self):
        parents = torch.tensor([[-1, 0, -1, 1, 1, 3], [-1, -1, -1, -1, -1, -1], [-1, 0, 0, -1, -1, -1]])
        draft = Draft(torch.zeros_like(parents), parents, torch.tensor([6, 2, 3]))
        assert draft.num_levels == [4, 1, 2]
        assert draft.is_branching == [True, True, True]
        chains = Draft.chains([[5, 6, 7], [], [8]])
        assert chains.num_levels == chains.lengths.tolist() == [3, 0, 1]
        assert Draft.empty(2).num_levels == [0, 0]

    def test_branching_is_decided_per_row(self):
        parents = torch.tensor([[-1, 0, 0], [-1, 0, 1], [-1, 0, -1], [-1, -1, -1]])
        draft = Draft(torch.zeros_like(parents), parents, torch.tensor([3, 3, 2, 0]))
        assert draft.is_branching == [True, False, False, False]
        assert draft.shapes == [(-1, 0, 0), (-1, 0, 1), (-1, 0), ()]

    @pytest.mark.parametrize("without_replacement", [True, False])
    def test_select_keeps_how_siblings_were_drawn(self, without_replacement):
        draft = replace(Draft.chains([[5], [6]]), without_replacement=without_replacement)
        assert draft.select(torch.tensor([1])).without_replacement == without_replacement

    def test_select_takes_rows_in_order_with_their_distributions(self):
        probs = torch.arange(6.0).reshape(3, 1, 2)
        part = Draft.chains([[5], [6], [7]], probs).select(torch.tensor([2, 0]))
        assert part.tokens.tolist() == [[7], [5]]
        assert part.probs is not None
        assert part.probs.tolist() == [[[4.0, 5.0]], [[0.0, 1.0]]]


class TestVerdict:
    def test_verdict_from_a_chain(self):
        verdict = Verdict.from_chain([2, 0, 3], [7, 8, 9])
        assert verdict.paths == [[0, 1], [], [0, 1, 2]]
        assert verdict.lengths == [2, 0, 3]

    def test_merged_drafts_keep_their_rows(self):
        one = Verdict([[0, 2]], [5])
        other = Verdict.from_chain([0, 1], [6, 7])
        merged = Verdict.merged([([1], one), ([2, 0], other)], num_rows=3)
        assert merged.paths == [[0], [0, 2], []]
        assert merged.next_tokens == [7, 5, 6]

    def test_merging_empty_drafts_gives_an_empty_draft(self):
        assert Verdict.merged([], num_rows=0).paths == []
