"""How much attention every key receives."""

from torch import Tensor

from . import fast, naive

__all__ = ["attention_columns", "fast", "naive"]


def attention_columns(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return the mean over heads and queries of the attention probabilities of every key, without a mask.

    Args:
        query: `(G, heads, Q, D)`, floating point, `Q >= 1`.
        key: `(G, kv_heads, K, D)`; `heads` is a multiple of `kv_heads`, whose heads are shared in runs.
        scaling: factor of the logits.

    Returns:
        `(G, K)`, float32 (float64 for float64 input), non-negative, rows sum to 1.

    Raises:
        ValueError: the shapes do not fit together, or there is no query.
    """
    if query.dim() != 4 or key.dim() != 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"expected query (G, heads, Q, D) and key (G, kv_heads, K, D), got {tuple(query.shape)} and "
            f"{tuple(key.shape)}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise ValueError(f"{query.shape[1]} heads cannot share {key.shape[1]} kv heads")
    if query.shape[2] == 0:
        raise ValueError(f"a mean over no queries: query has shape {tuple(query.shape)}")
    return fast.attention_columns(query, key, scaling)
