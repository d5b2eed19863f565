"""The claims of the page on left padding."""

import torch
import torch.nn.functional as F

torch.manual_seed(0)

# --8<-- [start:mask]
seq_lens = torch.tensor([10, 6])[:, None]  # A and B of the picture
columns = torch.arange(10 + 1)  # the history, and the new token's column
mask = columns >= seq_lens.max() - seq_lens
assert mask.long().tolist() == [[1] * 11, [0] * 4 + [1] * 7]
# --8<-- [end:mask]

# --8<-- [start:positions]
position_ids = seq_lens = torch.tensor([10, 6])[:, None]  # one new token for each request
assert position_ids.tolist() == [[10], [6]]  # its own count, not its column: that is 10 in both rows
# --8<-- [end:positions]

# --8<-- [start:right_padding]
k = torch.zeros(2, 10)
k[0, :10] = k[1, :6] = 1.0  # right padding: the rows end in different columns
assert k[:, -1].tolist() == [1, 0]  # the last column is no longer everybody's newest token
# --8<-- [end:right_padding]

# --8<-- [start:multiply]
k, padding = torch.tensor([float("nan"), float("inf"), 3.0]), torch.tensor([True, True, False])
assert (k * ~padding).isnan().tolist() == [True, True, False]  # NaN * 0 and inf * 0 are NaN
assert k.masked_fill(padding, 0).tolist() == [0, 0, 3]
assert torch.where(padding, 0, k).tolist() == [0, 0, 3]
# --8<-- [end:multiply]

# --8<-- [start:mask_is_not_enough]
q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8)
mask = torch.tensor([[False, True, True]])  # the first column is padding
v[:, :, 0] = float("nan")  # and its slot holds something that is no number
assert F.scaled_dot_product_attention(q, k, v, attn_mask=mask).isnan().all()  # weight 0 times NaN is NaN
v[:, :, 0] = 0
assert F.scaled_dot_product_attention(q, k, v, attn_mask=mask).isfinite().all()
# --8<-- [end:mask_is_not_enough]

# --8<-- [start:same_bits]
k = torch.randn(1000).half()
keep = torch.rand(1000) > 0.5
assert torch.equal(k * keep, k * keep.to(k.dtype))  # bool times half is exact: the result is half, to the bit
assert (k * keep).dtype == torch.float16
# --8<-- [end:same_bits]


# --8<-- [start:relative]
def rotate(x, position):
    """RoPE on one vector: each pair of numbers turned by its own angle per position."""
    angles = position * 10000.0 ** (-torch.arange(0, len(x), 2, dtype=x.dtype) / len(x))
    x1, x2 = x.chunk(2)
    return torch.cat((x1 * angles.cos() - x2 * angles.sin(), x2 * angles.cos() + x1 * angles.sin()))


q, k = torch.randn(2, 64, dtype=torch.float64)
score = rotate(q, 6) @ rotate(k, 2)
assert torch.isclose(rotate(q, 6 + 35) @ rotate(k, 2 + 35), score)  # both shifted: nothing changes
assert not torch.isclose(rotate(q, 6 + 35) @ rotate(k, 2), score, rtol=0.01)  # only one of them: another score
# --8<-- [end:relative]

# --8<-- [start:from_mask]
attention_mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
assert position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
# --8<-- [end:from_mask]
