"""Tensor operations that the methods share.

Each operation is a folder: `naive.py` is the readable reference and test oracle, `fast.py` the form that runs, and the
dispatcher in `__init__.py` checks the arguments and chooses between the forms. Nothing here imports the rest of tokred.
"""

from .attention_columns import attention_columns
from .cover import cover
from .drop_similar import drop_similar
from .farthest_points import farthest_points
from .gather import gather
from .match import match
from .nearest import nearest
from .topk_indices import topk_indices

__all__ = [
    "attention_columns",
    "cover",
    "drop_similar",
    "farthest_points",
    "gather",
    "match",
    "nearest",
    "topk_indices",
]
