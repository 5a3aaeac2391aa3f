"""Image encoders that stand alone or inside another model: where their blocks are and how keys and masks go there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedModelError


@dataclass(frozen=True)
class EncoderAdapter:
    """Where the parts of an image encoder's stock blocks are.

    Every block adds attention to its input, then the MLP of a norm of the sum.

    Args:
        name: name of the family.
        block: qualified name of the class of the blocks.
        norm: path in a block of the norm before the MLP.
        attention: path in a block of its attention module.
        keys_from: path in the attention module of the layer whose output holds the keys; None for the attention's
            own input.
        keys: returns the head mean of the raw keys, (B, T, head_dim), for the attention module and that tensor.
        prefix: returns how many tokens stand before the patches, for the modules around the blocks, innermost first.
        mask: the argument of the attention module that takes a mask.
        key_mask: whether that mask has one number a key, (B, T), or is broadcast over heads and queries, (B, 1, 1, T).
        rotary: the argument of the attention module that holds cosines and sines of the patches, (N, head_dim) each;
            None if positions are added once.
        accepts: returns whether a list of such blocks is an image encoder, for the modules around it, innermost first.
    """

    name: str
    block: str
    norm: str
    attention: str
    keys_from: str | None
    keys: Callable[[Any, Tensor], Tensor]
    prefix: Callable[[Sequence[Any]], int]
    mask: str = "attention_mask"
    key_mask: bool = False
    rotary: str | None = None
    accepts: Callable[[Sequence[Any]], bool] = lambda around: True

    @property
    def model_type(self) -> str:
        """Name under which reports speak of the family."""
        return self.name


@dataclass(frozen=True)
class Encoder:
    """An image encoder found in a model.

    Args:
        adapter: its family.
        path: path of the list of blocks in the model.
        blocks: the blocks.
        around: the modules around the list, innermost first.
    """

    adapter: EncoderAdapter
    path: str
    blocks: list[nn.Module]
    around: tuple[nn.Module, ...]

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return self.adapter.prefix(self.around)


def find_encoders(model: nn.Module, known: Sequence[EncoderAdapter]) -> list[Encoder]:
    """Return the image encoders of known families inside a model."""
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
            continue
        names = {f"{type(block).__module__}.{type(block).__qualname__}" for block in module}
        around = tuple(_around(model, path))
        for adapter in known:
            if names == {adapter.block} and adapter.accepts(around):
                found.append(Encoder(adapter, path, list(module), around))
    return found


def _around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    parts = path.split(".")
    for stop in range(len(parts) - 1, -1, -1):
        yield model.get_submodule(".".join(parts[:stop]))


def _head_mean(attention: Any, keys: Tensor) -> Tensor:
    """Split keys (B, T, heads * head_dim) into heads and return their mean."""
    return keys.unflatten(-1, (-1, attention.head_dim)).mean(dim=2)


def _third_of_qkv(attention: Any, qkv: Tensor) -> Tensor:
    return _head_mean(attention, qkv.chunk(3, dim=-1)[1])


def _keys_of_multihead(attention: Any, x: Tensor) -> Tensor:
    """Project the input of a `torch.nn.MultiheadAttention` onto the head mean of its keys.

    The mean of the projections is the projection by the mean, which costs one head's share.
    """
    weight = attention.in_proj_weight
    if weight is None or weight.is_meta:
        raise UnsupportedModelError(
            "the attention's in_proj_weight is not at hand (offloaded, or q, k and v have weights of their own), so "
            "its keys cannot be computed"
        )
    width = attention.embed_dim
    shape = (attention.num_heads, attention.head_dim)
    mean = weight[width : 2 * width].unflatten(0, shape).mean(dim=0)
    bias = attention.in_proj_bias
    if bias is not None:
        bias = bias[width : 2 * width].unflatten(0, shape).mean(dim=0)
    return nn.functional.linear(x, mean, bias)


def _config_is(*model_types: str) -> Callable[[Sequence[Any]], bool]:
    """Return a test of the blocks' own config, which tells a vision tower from a text tower of the same classes."""
    return lambda around: getattr(getattr(around[0], "config", None), "model_type", None) in model_types


def _registers(around: Sequence[Any]) -> int:
    return 1 + around[0].config.num_register_tokens


def _timm_prefix(around: Sequence[Any]) -> int:
    return around[0].num_prefix_tokens


def _in_open_clip_tower(around: Sequence[Any]) -> bool:
    return any(_qualified(module) == "open_clip.transformer.VisionTransformer" for module in around)


def _qualified(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _transformers(name: str, layer: str, prefix: Callable[[Sequence[Any]], int], **more: Any) -> EncoderAdapter:
    """Return the record of a family of transformers, whose blocks differ in names only."""
    return EncoderAdapter(
        name=name,
        block=f"transformers.models.{name}.modeling_{name}.{layer}",
        keys_from="k_proj",
        keys=_head_mean,
        prefix=prefix,
        **more,
    )


_VIT = {"norm": "layernorm_after", "attention": "attention"}
_CLIP = {"norm": "layer_norm2", "attention": "self_attn"}
_DINO = {"norm": "norm2", "attention": "attention"}

ENCODERS = (
    _transformers("vit", "ViTLayer", lambda around: 1, **_VIT),
    _transformers("deit", "DeiTLayer", lambda around: 2, **_VIT),
    _transformers("clip", "CLIPEncoderLayer", lambda around: 1, **_CLIP, accepts=_config_is("clip_vision_model")),
    _transformers("siglip", "SiglipEncoderLayer", lambda around: 0, **_CLIP, accepts=_config_is("siglip_vision_model")),
    _transformers(
        "siglip2", "Siglip2EncoderLayer", lambda around: 0, **_CLIP, accepts=_config_is("siglip2_vision_model")
    ),
    _transformers("dinov2", "Dinov2Layer", lambda around: 1, **_DINO),
    _transformers("dinov2_with_registers", "Dinov2WithRegistersLayer", _registers, **_DINO),
    _transformers("dinov3_vit", "DINOv3ViTLayer", _registers, **_DINO, rotary="position_embeddings"),
    EncoderAdapter(
        name="timm",
        block="timm.models.vision_transformer.Block",
        norm="norm2",
        attention="attn",
        keys_from="qkv",
        keys=_third_of_qkv,
        prefix=_timm_prefix,
        mask="attn_mask",
        accepts=lambda around: hasattr(around[0], "num_prefix_tokens"),
    ),
    EncoderAdapter(
        name="open_clip",
        block="open_clip.transformer.ResidualAttentionBlock",
        norm="ln_2",
        attention="attn",
        keys_from=None,
        keys=_keys_of_multihead,
        prefix=lambda around: 1,
        mask="key_padding_mask",
        key_mask=True,
        accepts=_in_open_clip_tower,
    ),
)
