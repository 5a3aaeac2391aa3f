"""`tokred bench prefill`: how much of the speed that a shorter sequence permits is really reached.

Random-weight stock models with real proportions run three ways in every round, in random order:

- stock: the model as it is;
- tokred: the model with a method attached, selection and book-keeping included;
- ideal: the stock decoder layers, without hooks, on random input of exactly the length that each of them saw under
  the method, plus the untouched rest (embedding, projector, positions, final norm, head).

Compared is decoder prefill: everything in the forward pass but the vision tower, whose blocks no method here shortens.
Blocks of the tower that a method does not touch give back their recorded output instead of being computed again, and
the time left in the tower is subtracted in every run, except for what the method itself costs there: the hooks that it
adds, and the whole of a module whose attention it taps (which then counts in all three).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tokred
from tokred.adapters.base import cache_argument, mask_cache_argument
from tokred.errors import ParameterError, TokredError
from tokred.registry import build_method

from .measure import Clock, bootstrap, interleave, machine, median, now, pin_threads, place, twin

BAR_MEDIAN, BAR_ROW, BAR_ROW_UPPER = 0.95, 0.92, 0.95
"""The median over all rows; the median of one row; the upper end of one row's interval."""
SHORT_TOLERANCE = 0.03
"""How far the ideal may be from a natively short stock decoder, for methods that act before layer 0."""
MIN_ROUNDS = 15
DECODE_TOKENS = 9
KEYS = (
    "model",
    "method",
    "keep",
    "token_layers",
    "stock_ms",
    "tokred_ms",
    "ideal_ms",
    "short_input_ms",
    "achieved_over_ideal",
    "achieved_lo",
    "achieved_hi",
    "overhead_pct_of_stock",
    "overhead_pct_of_ideal",
)
"""Keys of a row of the JSON file."""


@dataclass
class BenchModel:
    """A random-weight model, the inputs of one prompt, and where its parts are.

    Args:
        name: model type.
        model: the stock model in evaluation mode.
        inputs: keyword arguments of one forward pass, batch 1.
        image_token: id of the placeholder.
        tower: path of the vision tower in the model.
        blocks: path of the tower's block list.
        projector: path of the projector, None if it is part of the tower.
        language: path of the decoder.
        about: one line on the sizes.
    """

    name: str
    model: nn.Module
    inputs: dict[str, torch.Tensor]
    image_token: int
    tower: str
    blocks: str
    projector: str | None
    language: str
    about: str

    def to(self, device: torch.device, dtype: torch.dtype) -> BenchModel:
        """Move the model and its inputs to a device, and their floating-point numbers to a dtype."""
        self.model.to(device, dtype)
        for name, value in self.inputs.items():
            self.inputs[name] = value.to(device, dtype if value.is_floating_point() else None)
        return self

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.model.parameters()).dtype

    @property
    def is_visual(self) -> torch.Tensor:
        """Which prompt tokens are placeholders, (L,)."""
        return self.inputs["input_ids"][0] == self.image_token

    @property
    def visual(self) -> int:
        """Number of visual tokens in the prompt."""
        return int(self.is_visual.sum())

    @property
    def text(self) -> int:
        """Number of text tokens in the prompt."""
        return len(self.is_visual) - self.visual


def _text_sizes(smoke: bool) -> dict[str, int]:
    if smoke:
        return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    return {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}


def _vocabulary(smoke: bool) -> int:
    return 128 if smoke else 32000


def _about_decoder(sizes: dict[str, int], vocabulary: int) -> str:
    return (
        f"decoder {sizes['num_hidden_layers']} x {sizes['hidden_size']}, {sizes['num_attention_heads']} heads, "
        f"MLP {sizes['intermediate_size']}, vocabulary {vocabulary}"
    )


def _prompt(smoke: bool, visual: int, image_token: int) -> torch.Tensor:
    """Return ids of text, image, text, of shape (1, L)."""
    around = 4 if smoke else 32
    text = torch.arange(2 * around) % 90 + 5
    return torch.cat([text[:around], torch.full((visual,), image_token), text[around:]]).unsqueeze(0)


def build_llava(smoke: bool) -> BenchModel:
    """Build LLaVA with a CLIP tower of ViT-L/14@336 proportions and a Qwen2 decoder, 576 visual tokens.

    Args:
        smoke: build a tiny one instead, to test the benchmark itself.
    """
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

    sizes = _text_sizes(smoke)
    side, patch = (32, 4) if smoke else (336, 14)
    tower = (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        if smoke
        else {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    )
    vocabulary = _vocabulary(smoke)
    image_token = vocabulary - 1
    visual = (side // patch) ** 2
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=side, patch_size=patch, **tower),
        text_config=Qwen2Config(
            vocab_size=vocabulary, num_key_value_heads=sizes["num_attention_heads"], tie_word_embeddings=False, **sizes
        ),
        image_token_index=image_token,
        image_seq_length=visual,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    model = LlavaForConditionalGeneration(config).eval()
    ids = _prompt(smoke, visual, image_token)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 3, side, side),
    }
    about = f"{visual} visual tokens; tower {tower['num_hidden_layers']} x {tower['hidden_size']}; " + _about_decoder(
        sizes, vocabulary
    )
    return BenchModel(
        "llava",
        model,
        inputs,
        image_token,
        "model.vision_tower",
        "model.vision_tower.encoder.layers",
        "model.multi_modal_projector",
        "model.language_model",
        about,
    )


def build_qwen2_5_vl(smoke: bool) -> BenchModel:
    """Build Qwen2.5-VL with its tower's width but a shallow depth, and one image of 1,200 merged tokens.

    Args:
        smoke: build a tiny one instead, to test the benchmark itself.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sizes = _text_sizes(smoke)
    vocabulary = _vocabulary(smoke)
    image_token = vocabulary - 1
    head_size = sizes["hidden_size"] // sizes["num_attention_heads"]
    half = head_size // 2
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
    grid = (1, 12, 12) if smoke else (1, 60, 80)
    tower: dict[str, Any] = (
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [1]}
        if smoke
        else {"depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "fullatt_block_indexes": [7]}
    )
    config = Qwen2_5_VLConfig(
        vision_config=tower | {"out_hidden_size": sizes["hidden_size"]},
        text_config=sizes
        | {
            "vocab_size": vocabulary,
            "num_key_value_heads": sizes["num_attention_heads"],
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        },
        image_token_id=image_token,
        video_token_id=vocabulary - 2,
        vision_start_token_id=vocabulary - 3,
        vision_end_token_id=vocabulary - 4,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    patches = grid[0] * grid[1] * grid[2]
    vision = config.vision_config
    ids = _prompt(smoke, patches // vision.spatial_merge_size**2, image_token)
    row = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == image_token).int(),
        "pixel_values": torch.randn(patches, row),
        "image_grid_thw": torch.tensor([grid]),
    }
    about = (
        f"{patches // vision.spatial_merge_size**2} visual tokens after the 2x2 merger; tower {tower['depth']} x "
        f"{tower['hidden_size']} (the released one has 32 blocks; only the recorded output of blocks counts here); "
        + _about_decoder(sizes, vocabulary)
    )
    return BenchModel(
        "qwen2_5_vl",
        model,
        inputs,
        image_token,
        "model.visual",
        "model.visual.blocks",
        None,
        "model.language_model",
        about,
    )


MODELS: dict[str, Callable[[bool], BenchModel]] = {"llava": build_llava, "qwen2_5_vl": build_qwen2_5_vl}
"""Builders of the benchmark models by model type."""


@dataclass
class Recording:
    """What one stock run leaves behind for the runs to come.

    Args:
        outputs: output of every tower block, by path in the tower.
        features: visual features as they enter the prompt, (N, D).
        rows: input of the projector, (1, N, C); None if the projector is part of the tower.
        arguments: positional and keyword arguments of tower modules, by path in the tower.
    """

    outputs: dict[str, Any]
    features: torch.Tensor
    rows: torch.Tensor | None
    arguments: dict[str, tuple[tuple, dict[str, Any]]] = field(default_factory=dict)


def _encode(bench: BenchModel) -> Any:
    """Run the stock model's own encoding of the picture."""
    media = {name: value for name, value in bench.inputs.items() if name in ("pixel_values", "image_grid_thw")}
    with torch.no_grad():
        return bench.model.get_image_features(**media)


def record(bench: BenchModel) -> Recording:
    """Encode the picture once and keep what the blocks gave back and what the projector saw."""
    outputs: dict[str, Any] = {}
    rows: list[torch.Tensor] = []
    handles = []
    tower = bench.model.get_submodule(bench.tower)

    def keep(path: str) -> Callable[..., None]:
        return lambda module, args, output: outputs.__setitem__(path, output)

    for path in _block_paths(bench):
        handles.append(tower.get_submodule(path).register_forward_hook(keep(path)))
    if bench.projector is not None:
        projector = bench.model.get_submodule(bench.projector)
        handles.append(projector.register_forward_pre_hook(lambda module, args: rows.append(args[0])))
    features = _encode(bench).pooler_output
    for handle in handles:
        handle.remove()
    return Recording(outputs, torch.cat(list(features)).clone(), rows[0].clone() if rows else None)


def record_arguments(bench: BenchModel, recording: Recording, paths: list[str]) -> None:
    """Encode the picture again and keep the arguments of some modules of the tower, unless they are known."""
    tower = bench.model.get_submodule(bench.tower)
    handles = []

    def keep(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs: recording.arguments.__setitem__(path, (args, kwargs))

    for path in paths:
        if path not in recording.arguments:
            handles.append(tower.get_submodule(path).register_forward_pre_hook(keep(path), with_kwargs=True))
    if handles:
        _encode(bench)
    for handle in handles:
        handle.remove()


def _block_paths(bench: BenchModel) -> list[str]:
    """Return the paths of the tower's blocks, relative to the tower."""
    prefix = bench.blocks[len(bench.tower) + 1 :]
    return [f"{prefix}.{index}" for index, _ in enumerate(bench.model.get_submodule(bench.blocks))]


def _marks(module: nn.Module) -> tuple[Any, ...]:
    """Return what changes on a module when something attaches to it: hooks, then its config and forward."""
    hooks = tuple(module._forward_pre_hooks), tuple(module._forward_hooks)
    return hooks, (id(module.__dict__.get("config")), id(module.__dict__.get("forward")))


@dataclass
class Touched:
    """What a method changed in the tower, as paths relative to the tower.

    Args:
        hooked: modules that only carry more hooks: those hooks are part of the method's cost.
        tapped: modules that now run different code: the whole module counts, in every arm.
    """

    hooked: list[str]
    tapped: list[str]


def _touched(before: dict[str, tuple[Any, ...]], tower: nn.Module) -> Touched:
    hooked, tapped = [], []
    for path, module in tower.named_modules():
        hooks, code = _marks(module)
        old_hooks, old_code = before[path]
        if code != old_code and not any(path.startswith(outer + ".") for outer in tapped):
            tapped.append(path)
        elif hooks != old_hooks and path:
            hooked.append(path)
    inside = [path for path in hooked if any(path.startswith(outer + ".") for outer in tapped)]
    return Touched([path for path in hooked if path not in inside], tapped)


def _replay(tower: nn.Module, recording: Recording, computed: list[str]) -> None:
    """Let every block give back its recorded output, except those that contain a module of `computed`."""

    def give_back(output: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: output

    for block, output in recording.outputs.items():
        if not any(path == block or path.startswith(block + ".") for path in computed):
            tower.get_submodule(block).forward = give_back(output)


@dataclass
class Arm:
    """One way to run a benchmark model, with a clock on its tower.

    Args:
        bench: the model that it was made from.
        model: its own modules around the shared weights.
        touched: what the method changed in the tower.
    """

    bench: BenchModel
    model: nn.Module
    touched: Touched

    def __post_init__(self) -> None:
        self.clock = Clock(self.bench.device)

    def watch(self) -> None:
        """Put the clock on the tower and on the modules whose time stays in."""
        tower = self.model.get_submodule(self.bench.tower)
        self.clock.watch(tower, "tower", with_hooks=False)
        for path in self.touched.tapped:
            self.clock.watch(tower.get_submodule(path), f"tapped:{path}", with_hooks=True)
        for path in self.touched.hooked:
            self.clock.watch(tower.get_submodule(path), f"outer:{path}", with_hooks=True)
            self.clock.watch(tower.get_submodule(path), f"inner:{path}", with_hooks=False)

    @torch.no_grad()
    def prefill(self) -> dict[str, float]:
        """Run one prefill and return the seconds of decoder prefill and, by path, of the tapped modules."""
        self.clock.take()
        start = now(self.bench.device)
        self.model(**self.bench.inputs, logits_to_keep=1, use_cache=True)
        total = now(self.bench.device) - start
        seconds = self.clock.take()
        result = {key.removeprefix("tapped:"): value for key, value in seconds.items() if key.startswith("tapped:")}
        hooks = sum(seconds[f"outer:{path}"] - seconds[f"inner:{path}"] for path in self.touched.hooked)
        return result | {"decoder": total - seconds["tower"] + hooks}


@dataclass
class Lengths:
    """What the model's parts saw during one prefill under a method.

    Args:
        layers: sequence length at each decoder layer.
        projector: number of rows that the projector got, None if it is part of the tower.
    """

    layers: list[int]
    projector: int | None


def observe_lengths(bench: BenchModel, model: nn.Module) -> Lengths:
    """Run one prefill and return the length that each decoder layer and the projector really saw."""
    layers: list[int] = []
    rows: list[int] = []
    handles = []

    def see(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        layers.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    for layer in model.get_submodule(bench.language).layers:
        handles.append(layer.register_forward_pre_hook(see, with_kwargs=True))
    if bench.projector is not None:
        projector = model.get_submodule(bench.projector)
        handles.append(projector.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1])))
    try:
        with torch.no_grad():
            model(**bench.inputs, logits_to_keep=1, use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    return Lengths(layers, rows[0] if rows else None)


class Ideal:
    """The stock modules at the lengths that a method produced, called without hooks.

    Args:
        bench: the stock model.
        recording: what its tower saw.
        lengths: the lengths under the method.
        tapped: tower modules that count in every arm.
    """

    def __init__(self, bench: BenchModel, recording: Recording, lengths: Lengths, tapped: list[str]):
        self.bench = bench
        self.features = recording.features
        self.lengths = lengths
        tower = bench.model.get_submodule(bench.tower)
        self.tapped = [(tower.get_submodule(path), *recording.arguments[path]) for path in tapped]
        self.rows = None if recording.rows is None else recording.rows[:, : lengths.projector].contiguous()
        self.language = bench.model.get_submodule(bench.language)
        width = self.language.config.hidden_size
        self.hidden = {
            length: torch.randn(1, length, width, device=bench.device, dtype=bench.dtype) for length in lengths.layers
        }
        self.embeddings = {length: self._rotary(length) for length in lengths.layers[1:]}
        self.cache_argument = cache_argument(self.language.layers[0].forward)

    def _positions(self, length: int) -> torch.Tensor:
        """Return position ids in the form that the decoder's rotary embedding takes."""
        positions = torch.arange(length, device=self.bench.device).unsqueeze(0)
        return positions if self.bench.name == "llava" else positions.expand(3, 1, -1)

    def _rotary(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return self.language.rotary_emb(self.hidden[length], self._positions(length))

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Run once and return the seconds in all and those of the decoder alone."""
        from transformers import DynamicCache
        from transformers.masking_utils import create_causal_mask

        bench, language = self.bench, self.language
        start = now(self.bench.device)
        for module, args, kwargs in self.tapped:
            module(*args, **kwargs)
        if self.rows is not None:
            bench.model.get_submodule(bench.projector)(self.rows)
        ids = bench.inputs["input_ids"]
        embeds = language.embed_tokens(ids)
        embeds.masked_scatter((ids == bench.image_token).unsqueeze(-1), self.features)
        if "image_grid_thw" in bench.inputs:
            bench.model.model.get_rope_index(
                ids,
                mm_token_type_ids=bench.inputs["mm_token_type_ids"],
                image_grid_thw=bench.inputs["image_grid_thw"],
                attention_mask=bench.inputs["attention_mask"],
            )
        middle = now(self.bench.device)
        cache = DynamicCache(config=language.config)
        first = self.lengths.layers[0]
        hidden = self.hidden[first]
        arguments = {
            "config": language.config,
            "inputs_embeds": hidden,
            "attention_mask": bench.inputs["attention_mask"][:, :first],
            "position_ids": None,
        }
        mask = create_causal_mask(**arguments, **{mask_cache_argument(): cache})
        embeddings = language.rotary_emb(hidden, self._positions(first))
        for layer, length in zip(language.layers, self.lengths.layers, strict=True):
            if length != hidden.shape[1]:
                # a batch of one without padding needs no mask tensor, so the next lengths need none either
                hidden, embeddings, mask = self.hidden[length], self.embeddings[length], None
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=embeddings,
                use_cache=True,
                **{self.cache_argument: cache},
            )
        bench.model.lm_head(language.norm(hidden)[:, -1:])
        end = now(self.bench.device)
        return {"all": end - start, "decoder": end - middle}


class ShortInput:
    """The stock model on a prompt that never had more visual tokens than the method leaves.

    Args:
        bench: the stock model.
        recording: what its tower gave back.
        visual: number of visual tokens, at least 1.
    """

    def __init__(self, bench: BenchModel, recording: Recording, visual: int):
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        self.bench = bench
        self.rows = None if recording.rows is None else recording.rows[:, :visual].contiguous()
        ids = bench.inputs["input_ids"]
        place = torch.cumsum(bench.is_visual, 0)
        ids = ids[:, ~bench.is_visual | (place <= visual)]
        self.prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        features = recording.features[:visual]
        self.encoded = {"image": BaseModelOutputWithPooling(pooler_output=[features])}
        self.positions = {}
        if bench.name != "llava":
            self.positions["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(3, 1, -1)

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Run one prefill and return the seconds in all and those of the model call alone."""
        start = now(self.bench.device)
        if self.rows is not None:
            self.bench.model.get_submodule(self.bench.projector)(self.rows)
        middle = now(self.bench.device)
        self.bench.model(
            **self.prompt, **self.positions, mm_encoder_outputs=dict(self.encoded), logits_to_keep=1, use_cache=True
        )
        end = now(self.bench.device)
        return {"all": end - start, "decoder": end - middle}

    def decode(self) -> list[float]:
        """Return the seconds of each decode step after a natively short prefill."""
        return decode_steps(self.bench.model, self.prompt | {"mm_encoder_outputs": dict(self.encoded)})


class SameCache:
    """The stock model on a cache whose layers hold as many keys as a method leaves in each.

    Args:
        bench: the stock model.
        layers: number of keys by layer.
    """

    def __init__(self, bench: BenchModel, layers: list[int]):
        self.bench = bench
        config = bench.model.get_submodule(bench.language).config
        heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        self.keys = [torch.randn(1, heads, length, width, device=bench.device, dtype=bench.dtype) for length in layers]
        self.config = config
        # The prompt is text as long as the first layer's keys, and one token more.
        ids = bench.inputs["input_ids"][:, :1].expand(1, layers[0] + 1).contiguous()
        self.prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self) -> list[float]:
        """Return the seconds of each decode step."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        for index, keys in enumerate(self.keys):
            cache.update(keys, keys, index)
        return decode_steps(self.bench.model, self.prompt | {cache_argument(self.bench.model.forward): cache})


class _Stopwatch:
    """Streamer that notes when each token of `generate` arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to flush."""


def decode_steps(model: nn.Module, inputs: dict[str, Any]) -> list[float]:
    """Return the seconds of each decode step of `generate`, prefill left out."""
    watch = _Stopwatch()
    model.generate(**inputs, max_new_tokens=DECODE_TOKENS, do_sample=False, eos_token_id=None, streamer=watch)
    # the first entry is the prompt, the second ends the prefill
    return [after - before for before, after in zip(watch.times[1:], watch.times[2:], strict=False)]


@dataclass
class Setting:
    """One method at one keep ratio on one model, ready to be measured."""

    method: str
    keep: float
    arm: Arm
    handle: Any
    lengths: Lengths
    token_layers: float
    ideal: Ideal
    short: ShortInput
    same_cache: SameCache

    @property
    def acts_before_decoder(self) -> bool:
        """Whether all decoder layers saw the same length."""
        return len(set(self.lengths.layers)) == 1


def _attach(bench: BenchModel, recording: Recording, method: str, keep: float) -> Setting:
    model = twin(bench.model)
    tower = model.get_submodule(bench.tower)
    before = {path: _marks(module) for path, module in tower.named_modules()}
    handle = tokred.apply(model, method, keep=keep)
    touched = _touched(before, tower)
    lengths = observe_lengths(bench, model)
    summary = handle.summary().to_dict()
    token_layers = sum(length - bench.text for length in lengths.layers) / (bench.visual * len(lengths.layers))
    reported = summary.get("token_layers")
    if reported is not None and abs(reported - token_layers) > 1e-6:
        raise RuntimeError(f"{method} on {bench.name}: summary says token_layers={reported}, seen were {token_layers}")
    _replay(tower, recording, touched.tapped)
    arm = Arm(bench, model, touched)
    arm.watch()
    record_arguments(bench, recording, touched.tapped)
    ideal = Ideal(bench, recording, lengths, touched.tapped)
    short = ShortInput(bench, recording, lengths.layers[-1] - bench.text)
    same_cache = SameCache(bench, lengths.layers)
    return Setting(method, keep, arm, handle, lengths, token_layers, ideal, short, same_cache)


def measure_model(
    name: str,
    methods: list[str],
    keeps: list[float],
    *,
    rounds: int,
    smoke: bool,
    seed: int,
    where: tuple[torch.device, torch.dtype],
    progress: Callable[[int, str], Callable[[], Any]],
) -> dict[str, Any]:
    """Measure every method at every keep ratio on one benchmark model.

    Args:
        name: a key of `MODELS`.
        methods: names of registered methods.
        keeps: keep ratios, each in (0, 1].
        rounds: number of rounds.
        smoke: use the tiny model.
        seed: seed of the weights, the inputs and the order of the runs.
        where: device and dtype of the model.
        progress: takes the number of runs and what they are, returns what to call after each.

    Returns:
        `rows` with the keys of `KEYS`, `details` with further columns in the same order, `refused` methods with the
        reason, and `about` the model.
    """
    torch.manual_seed(seed)
    bench = MODELS[name](smoke).to(*where)
    recording = record(bench)
    settings: list[Setting] = []
    refused: dict[str, str] = {}
    for method in methods:
        for keep in keeps:
            try:
                settings.append(_attach(bench, recording, method, keep))
            except ParameterError:
                raise
            except TokredError as error:
                refused[method] = str(error)
    if not settings:
        return {"about": bench.about, "rows": [], "details": [], "refused": refused}

    tapped = sorted({path for setting in settings for path in setting.arm.touched.tapped})
    stock = Arm(bench, twin(bench.model), Touched([], tapped))
    _replay(stock.model.get_submodule(bench.tower), recording, tapped)
    stock.watch()

    runs: dict[Any, Callable[[], dict[str, float]]] = {"stock": stock.prefill}
    for index, setting in enumerate(settings):
        runs["tokred", index] = setting.arm.prefill
        runs["ideal", index] = setting.ideal.run
        runs["short", index] = setting.short.run
    for run in runs.values():
        run()
    seen = interleave(runs, rounds, seed, progress(rounds * len(runs), f"{name} prefill"))
    steps: dict[Any, Callable[[], list[float]]] = {}
    for index, setting in enumerate(settings):
        steps["tokred", index] = functools.partial(decode_steps, setting.arm.model, bench.inputs)
        steps["short", index] = setting.short.decode
        steps["same", index] = setting.same_cache.decode
    for step in steps.values():
        step()
    decode_rounds = max(2, rounds // 3)
    decoded = interleave(steps, decode_rounds, seed, progress(decode_rounds * len(steps), f"{name} decode"))

    rows, details = [], []
    for index, setting in enumerate(settings):
        row, detail = _row(bench, setting, index, seen, decoded)
        rows.append(row)
        details.append(detail)
        setting.arm.clock.close()
        setting.handle.remove()
    return {"about": bench.about, "rows": rows, "details": details, "refused": refused}


def _row(
    bench: BenchModel, setting: Setting, index: int, seen: dict[Any, list], decoded: dict[Any, list]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the row of one setting and its further columns."""

    def with_tapped(run: dict[str, float]) -> float:
        return run["decoder"] + sum(run[path] for path in setting.arm.touched.tapped)

    stock = [with_tapped(run) * 1e3 for run in seen["stock"]]
    reached = [with_tapped(run) * 1e3 for run in seen["tokred", index]]
    ideal = [run["all"] * 1e3 for run in seen["ideal", index]]
    short = [run["all"] * 1e3 for run in seen["short", index]]
    achieved, low, high = bootstrap([i / t for i, t in zip(ideal, reached, strict=True)])
    row = {
        "model": bench.name,
        "method": setting.method,
        "keep": setting.keep,
        "token_layers": setting.token_layers,
        "stock_ms": median(stock),
        "tokred_ms": median(reached),
        "ideal_ms": median(ideal),
        "short_input_ms": median(short),
        "achieved_over_ideal": achieved,
        "achieved_lo": low,
        "achieved_hi": high,
        "overhead_pct_of_stock": 100 * median((t - i) / s for s, t, i in zip(stock, reached, ideal, strict=True)),
        "overhead_pct_of_ideal": 100 * median((t - i) / i for t, i in zip(reached, ideal, strict=True)),
    }
    decode = [median(steps) * 1e3 for steps in decoded["tokred", index]]
    decode_short = [median(steps) * 1e3 for steps in decoded["short", index]]
    decode_same = [median(steps) * 1e3 for steps in decoded["same", index]]
    ideal_over_short = None
    if setting.acts_before_decoder:
        ideal_over_short = median(
            i["decoder"] / s["decoder"] for i, s in zip(seen["ideal", index], seen["short", index], strict=True)
        )
    detail = {
        "model": bench.name,
        "method": setting.method,
        "keep": setting.keep,
        "layer_lengths": setting.lengths.layers,
        "passes": high >= BAR_ROW_UPPER and achieved >= BAR_ROW,
        "decode_ms": median(decode),
        "decode_short_ms": median(decode_short),
        "decode_over_short": bootstrap([d / s for d, s in zip(decode, decode_short, strict=True)]),
        "decode_same_cache_ms": median(decode_same),
        "decode_over_same_cache": bootstrap([d / s for d, s in zip(decode, decode_same, strict=True)]),
        "ideal_over_short_decoder": ideal_over_short,
        "tapped_tower_modules": setting.arm.touched.tapped,
        "rounds": {"stock_ms": stock, "tokred_ms": reached, "ideal_ms": ideal, "short_input_ms": short},
    }
    return row, detail


def bench_prefill(
    models: list[str],
    methods: list[str],
    keeps: list[float],
    *,
    rounds: int,
    smoke: bool,
    seed: int,
    threads: int | None,
    device: str,
    dtype: str,
    progress: Callable[[int, str], Callable[[], Any]],
) -> dict[str, Any]:
    """Measure decoder prefill on the benchmark models.

    Args:
        models: keys of `MODELS`.
        methods: names of registered methods.
        keeps: keep ratios, each in (0, 1].
        rounds: rounds of stock, tokred and ideal; the bar asks for `MIN_ROUNDS`.
        smoke: use tiny models, to test the benchmark itself.
        seed: seed of weights, inputs and order.
        threads: number of compute threads, None for one per core.
        device: torch device.
        dtype: a key of `measure.DTYPES`.
        progress: takes a number of runs and what they are, returns what to call after each.

    Returns:
        `rows`, `details`, `refused` and `about` by model, the `verdict`, and the `machine`.

    Raises:
        ParameterError: a model, method, ratio, dtype or device is not known or not allowed.
    """
    for name in models:
        if name not in MODELS:
            raise ParameterError(f"unknown benchmark model {name!r}; there are {', '.join(MODELS)}")
    for method in methods:
        for keep in keeps:
            build_method(method, {"keep": keep})
    if rounds < 1:
        raise ParameterError(f"rounds={rounds} is not at least 1")
    if threads is not None and threads < 1:
        raise ParameterError(f"threads={threads} is not at least 1")
    where = place(device, dtype)
    pin_threads(threads)
    result: dict[str, Any] = {"rows": [], "details": [], "refused": {}, "about": {}}
    for name in models:
        measured = measure_model(
            name,
            methods,
            keeps,
            rounds=rounds,
            smoke=smoke,
            seed=seed,
            where=where,
            progress=progress,
        )
        result["rows"] += measured["rows"]
        result["details"] += measured["details"]
        result["refused"][name] = measured["refused"]
        result["about"][name] = measured["about"]
    result["settings"] = {
        "rounds": rounds,
        "smoke": smoke,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "batch": 1,
    }
    result["verdict"] = verdict(result["rows"], result["details"], rounds)
    result["machine"] = machine()
    return result


def verdict(rows: list[dict[str, Any]], details: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Hold the rows against the bar of design section 6.

    Args:
        rows: rows with the keys of `KEYS`.
        details: their further columns, in the same order.
        rounds: number of rounds that they rest on.
    """
    if not rows:
        return {
            "passes": False,
            "median_over_rows": None,
            "failing": [],
            "short_check_failing": [],
            "enough_rounds": False,
        }
    over_rows = median(row["achieved_over_ideal"] for row in rows)
    failing = [f"{d['model']}/{d['method']}/{d['keep']:g}" for d in details if not d["passes"]]
    far = [
        f"{d['model']}/{d['method']}/{d['keep']:g}"
        for d in details
        if d["ideal_over_short_decoder"] is not None and abs(d["ideal_over_short_decoder"] - 1) > SHORT_TOLERANCE
    ]
    enough = rounds >= MIN_ROUNDS
    return {
        "passes": enough and not failing and over_rows >= BAR_MEDIAN,
        "median_over_rows": over_rows,
        "failing": failing,
        "short_check_failing": far,
        "enough_rounds": enough,
    }


def write_json(result: dict[str, Any], path: Path) -> Path:
    """Write the rows to a JSON file, and everything else to `*.meta.json` beside it.

    Args:
        result: what `bench_prefill` returned.
        path: the file of the rows: a list of objects with the keys of `KEYS`.

    Returns:
        Path of the second file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result["rows"], indent=1) + "\n", encoding="utf-8")
    beside = path.with_name(f"{path.stem}.meta.json")
    rest = {key: value for key, value in result.items() if key != "rows"}
    beside.write_text(json.dumps(rest, indent=1) + "\n", encoding="utf-8")
    return beside
