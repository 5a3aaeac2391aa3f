"""Tiny random stock models and prompts for them, built offline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

IMAGE, VIDEO, START, END = 150, 151, 152, 153
PAD, EOS = 0, 2
VOCABULARY = 200


def _text_config(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": 1,
    } | changes


def _finish(model: torch.nn.Module) -> Any:
    # Wide weights make attention peaked and logits far apart, so that a misplaced key shows.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Vectors are norms and biases, which stay as they are, and embeddings, which are random.
            if parameter.dim() > 1 or parameter.std() > 0:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.eval()


def _clip(side: int) -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=side * 4,
        patch_size=4,
        projection_dim=32,
    )


def llava(attention: str = "sdpa") -> Any:
    """A LLaVA with 16 tokens an image."""
    config = LlavaConfig(
        vision_config=_clip(4), text_config=Qwen2Config(**_text_config()), image_token_id=IMAGE, vision_feature_layer=-2
    )
    config._attn_implementation = attention
    return _finish(LlavaForConditionalGeneration(config))


def llava_next(attention: str = "sdpa") -> Any:
    """A LLaVA-NeXT with 16 tokens for the whole image and up to four tiles of 16."""
    config = LlavaNextConfig(
        vision_config=_clip(4),
        text_config=Qwen2Config(**_text_config()),
        image_token_id=IMAGE,
        vision_feature_layer=-2,
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )
    config._attn_implementation = attention
    return _finish(LlavaNextForConditionalGeneration(config))


def _qwen_ids() -> dict[str, int]:
    return {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def _rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def qwen2_5_vl(attention: str = "sdpa") -> Any:
    """The model Q25 of the acceptance cases."""
    config = Qwen2_5_VLConfig(
        text_config=_text_config(rope_parameters=_rope()),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_qwen_ids(),
    )
    config._attn_implementation = attention
    return _finish(Qwen2_5_VLForConditionalGeneration(config))


def qwen2_vl(attention: str = "sdpa") -> Any:
    """A Qwen2-VL of the same size."""
    config = Qwen2VLConfig(
        text_config=_text_config(rope_parameters=_rope()),
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **_qwen_ids(),
    )
    config._attn_implementation = attention
    return _finish(Qwen2VLForConditionalGeneration(config))


BUILDERS: dict[str, Callable[..., Any]] = {
    "llava": llava,
    "llava_next": llava_next,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
}


@dataclass(frozen=True)
class Row:
    """One prompt: ids in which `IMAGE` stands once for every image, and the sizes of these images.

    A size is a grid (rows, columns) of merged tokens for Qwen, a number of tiles (height, width) for LLaVA-NeXT, and
    without meaning for LLaVA.
    """

    ids: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...] = ()


ONE_IMAGE = Row((5, 6, START, IMAGE, END, 7, 8, 9), ((4, 4),))
TWO_IMAGES = Row((5, START, IMAGE, END, 11, START, IMAGE, END, 12, 13), ((4, 4), (2, 4)))
TEXT_ONLY = Row((5, 6, 7, 8, 9, 10))


def inputs(family: str, rows: list[Row], seed: int = 0, pad_right: bool = False, mask: bool = True) -> dict[str, Any]:
    """Return what the family's processor would return for these prompts: padded, float32."""
    build = {"llava": _llava_media, "llava_next": _llava_next_media}.get(family, _qwen_media)
    ids, media = [], []
    for row in rows:
        sizes = iter(row.sizes)
        expanded: list[int] = []
        for token in row.ids:
            if token != IMAGE:
                expanded.append(token)
                continue
            # Every image has its own seed, so that it is the same alone and in a batch.
            length, parts = build(next(sizes), seed + sum(row.ids) * 7 + len(expanded))
            expanded += [IMAGE] * length
            media.append(parts)
        ids.append(expanded)
    longest = max(map(len, ids))
    padded, masks = [], []
    for row_ids in ids:
        fill = [PAD] * (longest - len(row_ids))
        padded.append(row_ids + fill if pad_right else fill + row_ids)
        masks.append([1] * len(row_ids) + [0] * len(fill) if pad_right else [0] * len(fill) + [1] * len(row_ids))
    result: dict[str, Any] = {"input_ids": torch.tensor(padded)}
    if mask:
        result["attention_mask"] = torch.tensor(masks)
    if family.startswith("qwen"):
        result["mm_token_type_ids"] = (result["input_ids"] == IMAGE).int()
    for name in media[0] if media else ():
        parts = [part[name] for part in media]
        if name == "pixel_values" and family == "llava_next":
            most = max(len(part) for part in parts)
            parts = [torch.nn.functional.pad(part, (0, 0) * 3 + (0, most - len(part))).unsqueeze(0) for part in parts]
        result[name] = torch.cat(parts)
    return result


def _noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _llava_media(size: tuple[int, int], seed: int) -> tuple[int, dict[str, torch.Tensor]]:
    return 16, {"pixel_values": _noise((1, 3, 16, 16), seed)}


def _llava_next_media(size: tuple[int, int], seed: int) -> tuple[int, dict[str, torch.Tensor]]:
    height, width = size[0] * 8 - 2, size[1] * 8
    tiles_high, tiles_wide = -(-height // 16), -(-width // 16)
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    cut = unpad_image(torch.zeros(1, tiles_high * 4, tiles_wide * 4), (height, width))
    length = 16 + cut.shape[1] * (cut.shape[2] + 1)
    pixels = _noise((1 + tiles_high * tiles_wide, 3, 16, 16), seed)
    return length, {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}


def _qwen_media(size: tuple[int, int], seed: int) -> tuple[int, dict[str, torch.Tensor]]:
    rows, columns = size
    pixels = _noise((rows * columns * 4, 3 * 2 * 4 * 4), seed)
    return rows * columns, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows * 2, columns * 2]])}


def base_inputs(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return what reaches the decoder of the stock model in a prefill: embeddings, positions and the 2-D mask."""
    seen: dict[str, Any] = {}

    def look(module: Any, args: Any, kwargs: Any) -> None:
        seen.update(kwargs)

    hook = model.model.language_model.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        model(**batch, use_cache=False)
    hook.remove()
    return {name: seen[name] for name in ("inputs_embeds", "attention_mask", "position_ids")}


def cache_of(output: Any) -> Any:
    """Return the cache of a model or `generate` output, under the name of this version of transformers."""
    cache = getattr(output, "cache", None)
    return output.past_key_values if cache is None else cache


_VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
CACHE_NAME = "cache" if _VERSION >= (5, 24) else "past_key_values"
# Before, beams repeated images one by one, which mixes up the images of a prompt with two of them.
BEAMS_REPEAT_IMAGES_BY_ROW = _VERSION >= (5, 20)
TAKES_ENCODED_MEDIA = _VERSION >= (5, 20)
