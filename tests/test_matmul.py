"""Thin matrix products and the compiled decoder layer around them, against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, Qwen3Config

from shared.models import SHAPES, shape_config

pytestmark = pytest.mark.having("thin_matmul")

ROWS = [*range(1, 18), 63, 64, 65]


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def assert_product(step, x, weight):
    """As close to the exact product as a sum of n float32 terms is in any order: n units in the last place of the sum
    of their magnitudes is a bound, and rounding errors that are as often up as down stay near its square root."""
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    error = (step.thin_matmul(x, weight).double() - exact).abs()
    unit = torch.finfo(torch.float32).eps / 2
    assert (error <= 4 * x.shape[1] ** 0.5 * unit * magnitude).all()


@pytest.mark.zoo
@pytest.mark.parametrize("out_features", [1, 2, 3, 4, 5, 7, 64, 97])
@pytest.mark.parametrize("in_features", [1, 3, 16, 63, 576])
def test_every_row_count(step, in_features, out_features, threads):
    torch.manual_seed(in_features + out_features)
    weight = torch.randn(out_features, in_features)
    for rows in ROWS:
        assert_product(step, torch.randn(rows, in_features), weight)


def weight_shapes():
    """(out, in) of every weight of the built-in shapes; of more than 4096 outputs, 4096 stand for all."""
    found = set()
    for name in SHAPES:
        c = shape_config(name)
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        q, kv = c.num_attention_heads * head_dim, c.num_key_value_heads * head_dim
        found |= {(q, c.hidden_size), (kv, c.hidden_size), (c.hidden_size, q), (c.vocab_size, c.hidden_size)}
        found |= {(c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size)}
    return sorted({(min(out, 4096), size) for out, size in found})


@pytest.mark.parametrize("shape", weight_shapes(), ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_weights_of_real_models(step, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    for rows in (1, 3):
        assert_product(step, torch.randn(rows, shape[1]), weight)


def test_operands_that_are_views(step):
    torch.manual_seed(0)
    weight = torch.randn(30, 11).T
    x = torch.randn(5, 60)[:, ::2]
    assert not weight.is_contiguous() and not x.is_contiguous()
    assert_product(step, x, weight)


def test_nan_and_infinity_are_not_lost(step):
    weight = torch.ones(6, 20)
    x = torch.ones(3, 20)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    y = step.thin_matmul(x, weight)
    assert y[0].isnan().all() and y[1].isinf().all() and (y[2] == 20).all()


SIZES = {
    "vocab_size": 99,
    "hidden_size": 72,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "every bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "no bias": LlamaConfig(**SIZES),
    "q and k norm": Qwen3Config(**SIZES, head_dim=10),
}


def random_decoder(step, config):
    """A decoder in which nothing is 0 or 1, so that nothing can be left out unseen."""
    torch.manual_seed(3)
    model = step.build_model(config)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))
    return model


@pytest.mark.zoo
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (1, 64), (2, 1)], ids=str)
def test_compiled_layers_against_the_modules(step, name, shape, threads):
    """The same weights, without a cache: first through torch's modules, then through the compiled layers."""
    model = random_decoder(step, CONFIGS[name])
    ids = torch.randint(0, 99, shape)
    expected = model(ids).logits
    model.prepare_thin()
    calls = []
    compiled = step.before_attention
    step.before_attention = lambda *args: calls.append(1) or compiled(*args)
    try:
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    finally:
        step.before_attention = compiled
    assert len(calls) == 2


def test_more_rows_than_thin_use_the_modules(step, monkeypatch):
    model = random_decoder(step, CONFIGS["no bias"])
    model.prepare_thin()
    monkeypatch.setattr(step, "before_attention", None)
    assert model(torch.zeros(1, step.THIN_ROWS + 1, dtype=torch.long)).logits.isfinite().all()
    with pytest.raises(TypeError):
        model(torch.zeros(1, step.THIN_ROWS, dtype=torch.long))


def test_half_precision_uses_the_modules(step):
    model = random_decoder(step, CONFIGS["no bias"]).bfloat16()
    step.ModelRunner(model, num_blocks=2)
    assert model.thin_layers is None
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.dtype == torch.bfloat16


def test_a_new_runner_sees_new_weights(step):
    """Weights that took the place of others (not: were written into them) are used by the next runner."""
    model, other = (step.build_model(CONFIGS["no bias"]) for _ in range(2))
    step.ModelRunner(model, num_blocks=2)
    model.load_state_dict(other.state_dict(), assign=True)
    runner = step.ModelRunner(model, num_blocks=2)
    assert runner.prefill(0, [5, 6, 7]) == int(other(torch.tensor([[5, 6, 7]])).logits.argmax())


def test_product_is_that_of_the_library(step):
    """Where F.linear is exact, so is this: integers small enough for float32."""
    torch.manual_seed(0)
    x, weight = torch.randint(-8, 9, (7, 100)).float(), torch.randint(-8, 9, (33, 100)).float()
    assert torch.equal(step.thin_matmul(x, weight), F.linear(x, weight))
