"""Batches hold a budget of tokens, every pair once, and the same whatever the processes."""

from itertools import chain

import numpy as np
import pytest

from vanilla_transformer_tools.text.batches import TokenBatchSampler


@pytest.fixture(scope="module")
def lengths():
    """Lengths like those of a corpus of sentences: skewed, both sides alike but not equal."""
    rng = np.random.default_rng(3)
    source = 3 + rng.gamma(3, 5, 30_000)
    target = source * rng.normal(1, 0.15, len(source)) + rng.normal(0, 1, len(source))
    return np.maximum(1, np.stack([source, target], axis=1).astype(int))


@pytest.fixture
def draw(lengths):
    """Lengths of an epoch that are drawn anew: those of the corpus, and up to a third more."""

    def draw_epoch(epoch):
        return lengths + np.random.default_rng(epoch).binomial(lengths, 0.3)

    return draw_epoch


def epoch_of(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def cost(lengths, batch):
    return len(batch) * int(lengths[batch].max(axis=0).sum())


def test_batches_hold_every_pair_exactly_once_and_keep_their_budget(lengths):
    sampler = TokenBatchSampler(lengths, 4096, seed=0)

    batches = epoch_of(sampler, 5)

    assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))
    costs = [cost(lengths, batch) for batch in batches]
    assert max(costs) <= 4096
    # One batch holds what is left over; the others could take no further pair of their length.
    assert sorted(costs)[1] > 0.85 * 4096
    assert sampler.padding == pytest.approx(1 - lengths.sum() / sum(costs))
    assert sampler.padding < 0.05


def test_batch_may_fill_its_budget_to_the_last_token():
    assert len(TokenBatchSampler([(3, 4)] * 6, 21, seed=0)) == 2
    assert len(TokenBatchSampler([(3, 4)] * 6, 20, seed=0)) == 3
    assert len(TokenBatchSampler([(9, 11)], 20, seed=0)) == 1


def test_batch_costs_what_its_own_longest_sides_cost():
    assert len(TokenBatchSampler([(9, 1), (9, 1), (1, 9), (1, 9)], 20, seed=0)) == 2


def test_batches_differ_between_epochs_in_content_and_order_and_not_in_number(lengths):
    sampler = TokenBatchSampler(lengths, 2048, seed=0)
    first, second = epoch_of(sampler, 0), epoch_of(sampler, 1)

    assert len(first) == len(second) == len(sampler)
    assert len(set(map(frozenset, first)) & set(map(frozenset, second))) < 0.25 * len(first)
    sizes = [list(map(len, batches)) for batches in (first, second)]
    assert sizes[0] != sizes[1]


def test_batches_come_in_no_order_of_length(lengths):
    longest = [lengths[batch].max() for batch in TokenBatchSampler(lengths, 2048, seed=0)]

    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.2


def test_batches_are_reproduced_by_seed_and_epoch(lengths):
    sampler = TokenBatchSampler(lengths, 2048, seed=11)
    epoch_of(sampler, 0)

    assert epoch_of(sampler, 4) == epoch_of(TokenBatchSampler(lengths, 2048, seed=11), 4)
    assert epoch_of(sampler, 4) != epoch_of(TokenBatchSampler(lengths, 2048, seed=12), 4)


@pytest.mark.parametrize(("num_processes", "redraws"), [(3, False), (2, True)])
def test_processes_share_the_batches_of_one_process(lengths, draw, num_processes, redraws):
    drawn, redraw = (draw(0), draw) if redraws else (lengths, None)

    def batches_of(**process):
        return epoch_of(TokenBatchSampler(drawn, 2048, seed=5, redraw=redraw, **process), 2)

    shares = [
        batches_of(num_processes=num_processes, process_index=index)
        for index in range(num_processes)
    ]

    parts = list(zip(*shares, strict=True))
    assert [sorted(chain(*part)) for part in parts] == [sorted(batch) for batch in batches_of()]
    for part in parts:
        sizes = list(map(len, part))
        assert min(sizes) >= max(1, max(sizes) - 1)


def test_last_batch_takes_pairs_over_when_a_process_would_have_none():
    # The budget cuts seven pairs of 10 tokens into 6 + 1.
    samplers = [
        TokenBatchSampler([(5, 5)] * 7, 60, seed=0, num_processes=3, process_index=index)
        for index in range(3)
    ]

    assert sorted(map(len, samplers[0])) == [1, 2]
    assert sorted(map(len, samplers[2])) == [1, 1]
    shares = chain.from_iterable(samplers)
    assert sorted(chain.from_iterable(shares)) == list(range(7))


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "enough"),
    [
        ([(5, 5)] * 6, 20, 60),
        # Only the first batches would be too small.
        ([(9, 9)] * 2 + [(10, 1)] * 3, 35, 114),
        # Only the last one would be, and taking pairs over would make it exceed the budget.
        ([(5, 5)] * 6 + [(25, 25)], 60, 300),
    ],
)
def test_sampler_refuses_a_budget_too_small_for_its_processes(lengths, max_tokens, enough):
    expected = rf"3 processes .* `max_tokens` = {max_tokens} .* {enough} is always enough"

    with pytest.raises(ValueError, match=expected):
        TokenBatchSampler(lengths, max_tokens, seed=0, num_processes=3)
    assert len(TokenBatchSampler(lengths, enough, seed=0, num_processes=3)) > 0


def test_sampler_refuses_fewer_pairs_than_processes_and_a_pair_beyond_the_budget():
    with pytest.raises(ValueError, match="got 2 pairs for 3 processes"):
        TokenBatchSampler([(5, 5)] * 2, 100, seed=0, num_processes=3)
    with pytest.raises(ValueError, match="got 0 pairs for 1 processes"):
        TokenBatchSampler([], 100, seed=0)
    with pytest.raises(ValueError, match=r"got 20 for pair 1 \(counted from 0\) of 21 tokens"):
        TokenBatchSampler([(9, 9), (11, 10), (3, 3)], 20, seed=0)


# Lengths that are drawn anew for each epoch


def test_batches_keep_number_and_budget_when_lengths_are_drawn_anew(draw):
    fixed = TokenBatchSampler(draw(0), 2048, seed=0)
    sampler = TokenBatchSampler(draw(0), 2048, seed=0, redraw=draw)

    # A few are in reserve.
    assert 1 < len(sampler) / len(fixed) < 1.03
    for epoch in range(3):
        batches, lengths = epoch_of(sampler, epoch), draw(epoch)
        assert len(batches) == len(sampler)
        assert sorted(chain.from_iterable(batches)) == list(range(30_000))
        assert max(cost(lengths, batch) for batch in batches) <= 2048


@pytest.mark.parametrize("num_processes", [1, 4])
def test_pairs_that_grow_beyond_the_budget_have_room(num_processes):
    pairs = np.array([[20, 20]] * 12 + [[60, 60]] * 4)
    # In this epoch the longest pairs have 660 tokens.
    longer = np.array([[20, 20]] * 12 + [[330, 330]] * 4)
    sampler = TokenBatchSampler(
        pairs, 500, seed=0, num_processes=num_processes, redraw=lambda epoch: longer
    )

    share = epoch_of(sampler, 1)

    assert len(share) == len(sampler)
    assert len(list(chain.from_iterable(share))) == len(pairs) / num_processes
