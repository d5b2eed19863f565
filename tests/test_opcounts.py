"""How many operators a write, a gather and a decode step dispatch, and the formula that says how the count grows."""

from __future__ import annotations

import pytest
import torch

from shared.bench import counts
from shared.bench.subjects import BaselineSubject, StepSubject
from shared.opcount import Law, count_ops, find_law
from shared.steps import find_step

# What the number of operators grows with, by step: the tutorial in one table. L layers, B requests, T tokens of a
# write, S tokens of history, N blocks. A step that is not listed is a new one: say here what it claims.
GROWS_WITH = {
    "01_naive_write": {"write": {"T"}, "gather": {"L", "B", "N"}, "decode_step": {"L", "B", "N"}},
    "02_vectorized_write": {"write": set(), "gather": {"L", "B", "N"}, "decode_step": {"L", "B", "N"}},
    "03_naive_gather": {"write": set(), "gather": {"L", "S"}, "decode_step": {"L", "B", "S"}},
    "04_vectorized_gather": {"write": set(), "gather": {"L", "B"}, "decode_step": {"L", "B"}},
    "05_dynamic_cache_fix": {"write": set(), "gather": {"L", "B"}, "decode_step": {"L", "B"}},
    "06_slot_mapping": {"write": set(), "gather": {"L"}, "decode_step": {"L"}},
    "07_block_table_attention": {"write": set(), "decode_step": {"L"}},
    "08_decode_matmul": {"write": set(), "decode_step": {"L"}},
}


@pytest.fixture(scope="module")
def laws():
    found = {}

    def laws_of(slug):
        if slug not in found:
            found[slug] = counts.all_laws(find_step(slug))
        return found[slug]

    return laws_of


def test_counts_grow_with_what_the_step_says(step, laws):
    """Finding a law already checks that it gives every count on its grid exactly."""
    grows = {kind: law.all.variables for kind, law in laws(step.SLUG).items()}
    assert grows == GROWS_WITH[step.SLUG]


def test_laws_hold_where_they_were_not_fitted(step, laws):
    layers, histories = 4, [7, 65, 16, 1, 30]
    sizes = counts.sizes_of(layers, histories)
    config = counts.tiny_config(layers)
    decoded = counts.count_decode(StepSubject(find_step(step.SLUG), step.build_model(config)), histories)
    law = laws(step.SLUG)["decode_step"]
    assert [law.all(**sizes), law.non_view(**sizes)] == list(decoded[:2])
    written = counts.count_write(step, counts.tiny_config(2), 50)
    law = laws(step.SLUG)["write"]
    assert [law.all(**{"T": 50, "[T=1]": 0}), law.non_view(**{"T": 50, "[T=1]": 0})] == list(written[:2])
    if "gather" in laws(step.SLUG):
        gathered = counts.count_gather(step, config, histories)
        law = laws(step.SLUG)["gather"]
        assert [law.all(**sizes), law.non_view(**sizes)] == list(gathered[:2])


def test_baseline_copies_all_history_with_a_constant_number_of_operators(make_tiny):
    law = counts.decode_laws(None).all
    assert law.variables == {"L"}
    _, model = make_tiny("llama")
    short, long = (counts.count_decode(BaselineSubject(model), [n] * 2)[2] for n in (16, 64))
    config = model.config
    row = 2 * config.num_key_value_heads * config.head_dim * 4
    # K and V of 48 more tokens in 2 requests, read and written, in every layer.
    assert long - short >= 2 * config.num_hidden_layers * row * 48 * 2


def test_views_are_told_from_work():
    x = torch.zeros(4, 6)
    counter = count_ops(lambda: x.t()[1].view(2, 2))
    assert (counter.all, counter.non_view, counter.bytes_moved) == (3, 0, 0)
    counter = count_ops(lambda: x + 1)
    assert (counter.all, counter.non_view, counter.bytes_moved) == (1, 1, 2 * x.numel() * 4)


def test_a_scatter_moves_what_it_stores_not_the_pool():
    pool, rows = torch.zeros(1000, 8), torch.ones(3, 8)
    for store in (
        lambda: pool.index_copy_(0, torch.tensor([5, 1, 7]), rows),
        lambda: pool.__setitem__(torch.tensor([5, 1, 7]), rows),
    ):
        assert 2 * rows.numel() * 4 <= count_ops(store).bytes_moved < 1000


def test_find_law():
    seen = [({"L": layers, "S": n}, 7 + 5 * layers + 8 * layers * n) for layers in (1, 2, 3) for n in (1, 4, 9)]
    law = find_law(seen, ("1", "L", "S", "L·S"))
    assert law == Law({"1": 7, "L": 5, "L·S": 8}) and str(law) == "7 + 5·L + 8·L·S"
    assert law.variables == {"L", "S"} and law(L=30, S=4096) == 7 + 150 + 8 * 30 * 4096
    with pytest.raises(ValueError, match="no law over"):
        find_law([*seen, ({"L": 4, "S": 2}, 92)], ("1", "L", "S", "L·S"))
    with pytest.raises(ValueError, match="do not tell apart"):
        find_law([(sizes | {"B": sizes["L"]}, n) for sizes, n in seen], ("1", "L", "B"))
