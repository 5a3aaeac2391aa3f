"""What happens in the calls of a model with a handle: hooks that shorten sequences and keep everything in step."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from . import cache as caches
from . import kernels
from .adapters.base import DECODER_ARGUMENTS, ModelAdapter, cache_argument, mask_cache_argument
from .errors import (
    LiveHandleError,
    ParameterError,
    StageTakenError,
    UnsupportedAttentionError,
    UnsupportedCacheError,
    UnsupportedFamilyError,
    UnsupportedInputError,
)
from .layout import MediaItem, Span, place_items
from .method import Context, Method, ModelShape, Need, Selection, Stage, Step
from .observe import Capture, Seen, capturing, tap
from .reduction import Reduction
from .report import CallReport, Statistics


logger = logging.getLogger("tokred")


@dataclass
class Encoding:
    """State of one call of a feature method."""

    projected: Selection | None = None
    length: int = 0


@dataclass
class Call:
    """State of one call of the base model.

    Attributes:
        session: the session whose base model runs.
        outer: the call around this one, or None.
        ids: token ids, (B, L), or None.
        type_ids: `mm_token_type_ids`, (B, L), or None.
        labels: the call's own copy of the labels, or None.
        items: media encoded inside this call or passed to it, by modality.
        capture: what the attention taps saw.
        active: whether anything is shorter than stock: the tokens of this call or the layers of the cache.
        cache: the cache that the decoder uses, or None.
        past: number of logical tokens in the cache before the call.
        length: number of logical tokens that the call brings.
        valid: which logical tokens are no padding, bool of shape (B, past + length), or None for all.
        mask: a 4-D mask given by the user, or None.
        block: which of the call's tokens reach the current layer; None for all.
        segment: name of `block` in the cache layers.
        spans: the media items among the tokens that reach the current layer.
        replaced: what the layers after a reduction inside the decoder get in place of what the decoder passes.
        masks: mask and valid keys of the layers so far, by the keys that a layer holds.
        valid_keys: valid keys of the layer that ran last, bool of shape (B, K), or None for all.
        report: what the call did, or None if it did nothing.
    """

    session: Session
    outer: Call | None
    ids: torch.Tensor | None
    type_ids: torch.Tensor | None
    labels: torch.Tensor | None
    items: dict[str, list[MediaItem]] = field(default_factory=dict)
    capture: Capture = field(default_factory=Capture)
    active: bool = False
    cache: Any = None
    past: int = 0
    length: int = 0
    valid: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    block: Reduction | None = None
    segment: int = -1
    spans: list[Span] = field(default_factory=list)
    replaced: dict[str, Any] = field(default_factory=dict)
    masks: dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]] = field(default_factory=dict)
    valid_keys: torch.Tensor | None = None
    report: CallReport | None = None


_call: ContextVar[Call | None] = ContextVar("tokred_call", default=None)
_encoding: ContextVar[Encoding | None] = ContextVar("tokred_encoding", default=None)
_labels: ContextVar[torch.Tensor | None] = ContextVar("tokred_labels", default=None)


class _Lengths:
    """The part of a cache that transformers asks for when it builds a mask."""

    is_compileable = False

    def __init__(self, past: int):
        self._past = past

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._past

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._past + query_length, 0


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the host time of a hook to the statistics, and keep compilers out of it."""

    @torch.compiler.disable
    @functools.wraps(function)
    def hook(self: Session, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(self, *args, **kwargs)
        finally:
            self.statistics.add_time(time.perf_counter() - start)

    return hook


class Session:
    """The hooks of one handle on one model.

    Args:
        model: the model given to `tokred.apply`.
        adapter: its family.
        methods: the methods, in the order in which their steps run.

    Raises:
        UnsupportedFamilyError: a method needs what the family does not provide.
        UnsupportedAttentionError: a decoder layer's attention would not be exact on a shortened sequence.
        StageTakenError: two methods act on one stage.
        ParameterError: a method's layer lies outside the model.
    """

    def __init__(self, model: nn.Module, adapter: ModelAdapter, methods: tuple[Method, ...]):
        self.model = model
        self.adapter = adapter
        self.base = adapter.base(model)
        self.config: Any = self.base.config
        self.decoder = self.base.get_submodule(adapter.decoder)
        self.layers: nn.ModuleList = self.decoder.layers  # type: ignore[assignment]
        self.methods = methods
        self.paused = False
        self.statistics = Statistics()
        self._override: ContextVar[tuple[Method, ...] | None] = ContextVar("tokred_override", default=None)
        self._undo: list[Callable[[], None]] = []
        self._warned_of_clamp = False
        self._cache_argument = cache_argument(self.decoder.forward)
        self._mask_cache_argument = mask_cache_argument()
        self._layer_index = {layer: index for index, layer in enumerate(self.layers)}
        self._check()
        self._all_steps = self._steps(methods)
        self._last_site = max((step.layer for _, step in self._all_steps if step.layer is not None), default=0)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise LiveHandleError("this model has a tokred handle and cannot be copied; call handle.remove() first")

    def __reduce__(self) -> NoReturn:
        raise LiveHandleError("this model has a tokred handle and cannot be pickled; call handle.remove() first")

    def _check(self) -> None:
        provided = self.adapter.provides(self.config)
        stages: dict[tuple[Stage, int | None], Method] = {}
        for method, step in self._steps(self.methods):
            missing = sorted(step.needs - provided)
            if missing:
                raise UnsupportedFamilyError(
                    f"{method.name} needs {', '.join(missing)}, which {self.adapter.model_type} with this config does "
                    f"not provide (it provides {', '.join(sorted(provided))})"
                )
            if step.stage is Stage.PROJECTOR and self.adapter.projector is None:
                raise UnsupportedFamilyError(
                    f"{method.name} removes tokens before the projector, but the projector of "
                    f"{self.adapter.model_type} mixes tokens"
                )
            other = stages.setdefault((step.stage, step.layer), method)
            if other is not method:
                where = step.stage if step.layer is None else f"{step.stage} {step.layer}"
                raise StageTakenError(f"{other.name} and {method.name} both act on stage {where}")
        text_config = self.decoder.config
        kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
        if kinds or (getattr(text_config, "sliding_window", None) and not hasattr(text_config, "layer_types")):
            raise UnsupportedAttentionError(
                f"the decoder has layers of type {', '.join(sorted(kinds)) or 'sliding_attention'}; only full_attention "
                "is exact on a shortened sequence so far"
            )

    def _steps(self, methods: Sequence[Method]) -> list[tuple[Method, Step]]:
        shape = ModelShape(num_layers=len(self.layers))
        steps = [(method, step) for method in methods for step in method.plan(shape)]
        return sorted(steps, key=lambda pair: pair[1].order)

    def _current_steps(self) -> list[tuple[Method, Step]]:
        if self.paused:
            return []
        override = self._override.get()
        return self._all_steps if override is None else self._steps(override)

    def _steps_at(self, stage: Stage, layer: int | None = None) -> list[tuple[Method, Step]]:
        return [(method, step) for method, step in self._current_steps() if (step.stage, step.layer) == (stage, layer)]

    def _count(self, method: Method, length: int) -> int | None:
        """Return how many of `length` media tokens a method keeps, warning once if it wants more than there are."""
        wanted = getattr(method, "num_tokens", None)
        if wanted is not None and wanted > length and not self._warned_of_clamp:
            self._warned_of_clamp = True
            logger.warning("%s: num_tokens=%d is more than the %d tokens of an item: all are kept", method.name, wanted, length)
        return method.count(length)

    # Attaching

    def attach(self) -> None:
        """Add all hooks."""
        steps = [step for _, step in self._steps(self.methods)]
        needs = frozenset().union(*(step.needs for step in steps))
        self._pre_hook(self.base, self._enter_base)
        self._post_hook(self.base, self._leave_base)
        if self.model is not self.base:
            self._pre_hook(self.model, self._enter_model)
        self._pre_hook(self.decoder, self._enter_decoder)
        self._post_hook(self.decoder, self._leave_decoder, always=False)
        for layer in self.layers:
            self._pre_hook(layer, self._enter_layer)
        for modality in self.adapter.media:
            self._wrap_encoder(modality)
        if any(step.stage is Stage.PROJECTOR for step in steps):
            projector = self.base.get_submodule(self.adapter.projector)  # type: ignore[arg-type]
            self._pre_hook(projector, self._enter_projector)
            self._post_hook(projector, self._leave_projector, always=False)
        if needs & {Need.CLS_ROW, Need.TOWER_KEYS, Need.CLS_HIDDEN}:
            block = self._feature_block()
            self._undo.append(tap(block.get_submodule(self.adapter.tower_attention)))
            self._post_hook(block, self._leave_feature_block, always=False)
        if needs & {Need.LAST_ROW, Need.LAYER_KEYS}:
            for before in sorted({step.layer - 1 for step in steps if step.layer is not None}):
                self._undo.append(tap(self._attention(before)))

    def detach(self) -> None:
        """Remove everything that `attach` added, last first."""
        while self._undo:
            self._undo.pop()()
        self._end_call()

    def _pre_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _post_hook(self, module: nn.Module, hook: Callable[..., Any], always: bool = True) -> None:
        self._undo.append(module.register_forward_hook(hook, with_kwargs=True, always_call=always).remove)

    def _wrap_encoder(self, modality: str) -> None:
        name = self.adapter.media[modality].encode
        original = getattr(self.base, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def encode(*args: Any, **kwargs: Any) -> Any:
            encoding = Encoding()
            outer = _encoding.set(encoding), capturing.set(Capture())
            try:
                output = original(*args, **kwargs)
            finally:
                _encoding.reset(outer[0])
                capturing.reset(outer[1])
            return self._leave_encoder(modality, signature.bind(*args, **kwargs).arguments, encoding, output)

        setattr(self.base, name, encode)
        self._undo.append(lambda: delattr(self.base, name))

    def _feature_block(self) -> nn.Module:
        blocks = self.base.get_submodule(self.adapter.tower_layers)  # type: ignore[arg-type]
        return blocks[self.adapter.feature_layer(self.config)]  # type: ignore[index, misc]

    def _attention(self, layer: int) -> nn.Module:
        return self.layers[layer].get_submodule(self.adapter.attention)

    @contextmanager
    def override(self, methods: tuple[Method, ...]) -> Iterator[None]:
        """Use other parameters in the calls of this context, on the same sites.

        Raises:
            ParameterError: a method would act on a site to which nothing is attached.
        """
        attached = {(step.stage, step.layer) for _, step in self._steps(self.methods)}
        for method, step in self._steps(methods):
            if (step.stage, step.layer) not in attached:
                raise ParameterError(f"{method.name}: a site cannot be moved while attached (layer={step.layer})")
        token = self._override.set(methods)
        try:
            yield
        finally:
            self._override.reset(token)

    # Encoding media

    @_timed
    def _leave_feature_block(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        capture = capturing.get()
        if capture is not None:
            capture.outputs[module] = output[0] if isinstance(output, tuple) else output

    @_timed
    def _enter_projector(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        encoding = _encoding.get()
        steps = self._steps_at(Stage.PROJECTOR)
        if encoding is None or not steps:
            return None
        hidden, *rest = args
        [(method, step)] = steps
        if self._count(method, hidden.shape[1]) == hidden.shape[1]:
            return None
        context = Context(hidden, step.needs, self._observe_tower, _positions(hidden))
        selection = step.select(context)
        encoding.projected, encoding.length = selection, hidden.shape[1]
        rows = kernels.gather(hidden, selection.keep) if selection.rows is None else selection.rows
        return (rows, *rest), kwargs

    def _observe_tower(self, need: Need, text: bool) -> torch.Tensor:
        capture = capturing.get() or Capture()
        block = self._feature_block()
        if need is Need.CLS_HIDDEN:
            return capture.outputs[block][:, :1]
        seen = capture.attention[block.get_submodule(self.adapter.tower_attention)]
        if need is Need.TOWER_KEYS:
            return seen.key.mean(dim=1)
        return seen.rows(torch.zeros(seen.query.shape[0], dtype=torch.long, device=seen.query.device))

    @_timed
    def _leave_projector(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        encoding = _encoding.get()
        if encoding is None or encoding.projected is None:
            return None
        return _carriers(output, encoding.projected.keep, encoding.length)

    @_timed
    def _leave_encoder(self, modality: str, arguments: dict[str, Any], encoding: Encoding, output: Any) -> Any:
        features = getattr(output, "pooler_output", None)
        if features is None:
            raise UnsupportedInputError("a model with a tokred handle encodes media with return_dict=True only")
        lengths = [len(feature) for feature in features]
        media = self.adapter.media[modality]
        cells = self.adapter.cells(self.config, modality, arguments.get(media.grid or ""), lengths)
        merged: list[torch.Tensor | None] = [None] * len(lengths)
        if encoding.projected is not None and encoding.projected.merged_into is not None:
            if lengths == [encoding.length] * len(encoding.projected.merged_into):
                merged = list(encoding.projected.merged_into)
        for method, step in self._steps_at(Stage.FEATURES):
            features, merged = self._reduce_features(method, step, features, merged)
        output.pooler_output = features
        # A plain attribute: `generate` hands the same object to the prefill, and no field of the output changes.
        items = [MediaItem(modality, *parts) for parts in zip(lengths, cells, merged, strict=True)]
        output.tokred_items = items
        call = _call.get()
        if call is not None:
            call.items[modality] = items
        return output

    def _reduce_features(
        self, method: Method, step: Step, features: Sequence[torch.Tensor], merged: list[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        features, merged = list(features), list(merged)
        buckets: dict[int, list[int]] = {}
        for index, feature in enumerate(features):
            if self._count(method, len(feature)) != len(feature):
                buckets.setdefault(len(feature), []).append(index)
        for length, members in buckets.items():
            hidden = torch.stack([features[index] for index in members])
            selection = step.select(Context(hidden, step.needs, _no_observation, _positions(hidden)))
            rows = kernels.gather(hidden, selection.keep) if selection.rows is None else selection.rows
            for place, (index, feature) in enumerate(
                zip(members, _carriers(rows, selection.keep, length), strict=True)
            ):
                features[index] = feature
                if selection.merged_into is not None:
                    merged[index] = selection.merged_into[place]
        return features, merged

    # The base model

    @_timed
    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        arguments = _arguments(module, args, kwargs)
        if arguments.get("labels") is None:
            return None
        # The copy is masked once it is known which tokens are gone.
        labels = arguments["labels"].clone()
        _labels.set(labels)
        return (), arguments | {"labels": labels}

    @_timed
    def _enter_base(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # PyTorch runs no hook when Ctrl-C ends a call, which may have left one behind.
        self._end_call()
        arguments = _arguments(module, args, kwargs)
        labels = _labels.get()
        _labels.set(None)
        call = Call(self, _call.get(), arguments.get("input_ids"), arguments.get("mm_token_type_ids"), labels)
        for modality, output in (arguments.get("mm_encoder_outputs") or {}).items():
            if output is not None:
                lengths = [len(feature) for feature in output.pooler_output]
                items = getattr(output, "tokred_items", ())
                # Beam search repeats the features and leaves the items; their grids then are not known.
                if [item.length for item in items] != lengths:
                    items = [MediaItem(modality, length) for length in lengths]
                call.items[modality] = list(items)
        pixels = any(arguments.get(name) is not None for name in ("pixel_values", "pixel_values_videos"))
        if call.ids is None and call.type_ids is None and (pixels or call.items):
            raise UnsupportedInputError(
                "media with inputs_embeds need mm_token_type_ids too: without them the media tokens cannot be told "
                "from text"
            )
        _call.set(call)
        caches.handle_is_active.set(True)

    @torch.compiler.disable
    def _leave_base(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._end_call()

    def _end_call(self) -> None:
        """Forget the running call of this session, if there is one."""
        call = _call.get()
        if call is not None and call.session is self:
            _call.set(call.outer)
            caches.handle_is_active.set(call.outer is not None)
            capturing.set(None)

    # The decoder

    @_timed
    def _enter_decoder(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = _call.get()
        embeds = kwargs.get("inputs_embeds")
        if call is None or embeds is None:
            return None
        call.length = embeds.shape[1]
        call.cache = kwargs.get(self._cache_argument)
        held = [] if call.cache is None else call.cache.layers
        call.active = any(isinstance(layer, caches.ReducedMixin) for layer in held)
        placeholders = {} if self.paused or call.length == 1 else self._placeholders(call)
        if placeholders:
            call.spans = place_items(placeholders, call.items)
        elif not call.active:
            return None

        kept = _survivors_of_encoding(embeds, placeholders)
        if call.spans and kept is None:
            self._check_encoded(call.spans)
        if kept is None and not self._reduces_later(call.spans) and not call.active:
            call.spans = []
            return None

        self._check_arguments(kwargs, call.length, "the decoder")
        kwargs = dict(kwargs)
        self._read_cache(call, kwargs)
        self._read_mask(call, kwargs, embeds)
        call.active = True
        if kwargs.get("position_ids") is None:
            positions = torch.arange(call.past, call.past + call.length, device=embeds.device)
            kwargs["position_ids"] = positions.unsqueeze(0)
        moved = {"inputs_embeds": embeds, "position_ids": kwargs["position_ids"]}
        if call.spans:
            call.report = CallReport(self.adapter.model_type, embeds.shape[0], call.length, call.spans)
            if any(step.stage is Stage.DECODER_LAYER for _, step in self._current_steps()):
                capturing.set(call.capture)
            if kept is not None:
                before = call.spans
                moved = self._shorten(call, kept, moved)
                stage, method = self._encoding_stage()
                call.report.add(stage, method, None, before, call.spans)
            for method, step in self._steps_at(Stage.EMBEDS):
                moved = self._run_step(call, method, step, moved)
        # Every layer gets its mask from `_enter_layer`: one rule, and the decoder has none to build.
        return args, kwargs | moved | {"attention_mask": None}

    def _placeholders(self, call: Call) -> dict[str, torch.Tensor]:
        """Return which tokens of the call stand for media, by modality, without the modalities that do not occur."""
        found = {}
        for modality, media in self.adapter.media.items():
            token = getattr(self.config, media.token_id, None)
            if call.ids is not None and token is not None:
                mask = call.ids == token
            elif call.type_ids is not None:
                mask = call.type_ids == media.type_id
            else:
                continue
            if mask.any():
                found[modality] = mask
        return found

    def _check_encoded(self, spans: list[Span]) -> None:
        """Raise if a method that acts while media are encoded did not see these."""
        for stage in (Stage.PROJECTOR, Stage.FEATURES):
            for method, _ in self._steps_at(stage):
                for span in spans:
                    if method.count(span.length) != span.length:
                        raise UnsupportedInputError(
                            f"{method.name} acts while media are encoded, but these {span.length} {span.item.modality} "
                            "tokens were encoded without it; encode them through the model after tokred.apply"
                        )

    def _reduces_later(self, spans: list[Span]) -> bool:
        """Return whether a step at or inside the decoder removes tokens of these items."""
        for method, step in self._current_steps():
            if step.stage in (Stage.EMBEDS, Stage.DECODER_LAYER):
                for group in _groups(spans, getattr(method, "scope", "item")):
                    length = sum(span.length for span in group)
                    if self._count(method, length) != length:
                        return True
        return False

    def _encoding_stage(self) -> tuple[Stage, str]:
        """Return the stage and the method that shortened the features of this call."""
        for stage in (Stage.FEATURES, Stage.PROJECTOR):
            for method, _ in self._steps_at(stage):
                return stage, method.name
        return Stage.FEATURES, "encoded earlier"

    @staticmethod
    def _check_arguments(arguments: dict[str, Any], length: int, where: str) -> None:
        """Refuse an argument that would stay at full length while everything else gets shorter."""
        for name, value in arguments.items():
            if name in DECODER_ARGUMENTS or name in ("hidden_states", "position_embeddings"):
                continue
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and length in tensor.shape:
                    raise UnsupportedFamilyError(
                        f"{where} gets the argument {name!r} of shape {tuple(tensor.shape)}, which follows the "
                        f"sequence of {length} tokens and is not known to tokred"
                    )

    def _read_cache(self, call: Call, kwargs: dict[str, Any]) -> None:
        """Find the call's cache, making it as stock would where there is none yet."""
        use_cache = kwargs.get("use_cache")
        use_cache = self.decoder.config.use_cache if use_cache is None else use_cache
        if call.cache is None and use_cache:
            from transformers import DynamicCache

            call.cache = kwargs[self._cache_argument] = DynamicCache(config=self.decoder.config)
        if call.cache is not None:
            caches.check_cache(call.cache)
            call.past = call.cache.get_seq_length()

    def _read_mask(self, call: Call, kwargs: dict[str, Any], embeds: torch.Tensor) -> None:
        """Sort the mask of the call into padding and a mask given in full."""
        mask = kwargs.get("attention_mask")
        if isinstance(mask, dict):
            raise UnsupportedCacheError(
                "masks prepared for a static or compiled cache cannot be shortened; leave `cache_implementation` at "
                "its default"
            )
        total = call.past + call.length
        if mask is None:
            positions = kwargs.get("position_ids")
            if call.cache is None and positions is not None and _is_packed(positions, embeds.shape[0]):
                raise UnsupportedInputError("packed sequences (position_ids that restart) cannot be shortened")
        elif mask.dim() == 4:
            call.mask = mask
        elif mask.shape[1] != total:
            raise UnsupportedInputError(f"attention_mask has {mask.shape[1]} columns for {total} tokens")
        else:
            call.valid = mask.to(embeds.device, torch.bool)

    def _shorten(self, call: Call, kept: torch.Tensor, moved: dict[str, Any]) -> dict[str, Any]:
        """Take the survivors of everything that has a sequence axis, and note the new places of the media.

        Args:
            call: the call.
            kept: which places survive, bool of shape (B, P).
            moved: hidden states (B, P, D) and what goes with them.
        """
        fill_right = None
        if call.valid is not None:
            # Padding leaves too: a row that loses few tokens would otherwise keep all rows as long as it was.
            valid = call.valid[:, call.past :]
            fill_right = ~valid[:, -1]
            kept = kept & (valid if call.block is None else call.block.gather(valid))
        reduction = Reduction(kept, fill_right)
        call.block = reduction if call.block is None else call.block.then(reduction)
        call.segment = caches.new_segment()
        call.spans = [
            Span(span.sample, *reduction.interval(span.sample, span.start, span.stop), span.item) for span in call.spans
        ]
        return {name: _gather_argument(name, value, reduction) for name, value in moved.items()}

    def _run_step(self, call: Call, method: Method, step: Step, moved: dict[str, Any]) -> dict[str, Any]:
        """Let a step choose among the media tokens of the call, and shorten what moves with them.

        Args:
            call: the call.
            method: the method of the step.
            step: the step.
            moved: the hidden states first, (B, P, D), then what goes with them.
        """
        name, hidden = next(iter(moved.items()))
        batch, length = hidden.shape[:2]
        kept = torch.ones((batch, length), dtype=torch.bool, device=hidden.device)
        if call.block is not None:
            kept = call.block.keep >= 0
        changed = None
        before = call.spans
        for bucket in self._buckets(call, method, step, hidden.device):
            site = _Site(self, call, step, hidden, bucket)
            selection = step.select(site.context())
            samples, places = site.samples.unsqueeze(1), site.places
            kept[samples, places] = False
            kept[samples, places.gather(1, selection.keep)] = True
            if selection.rows is not None:
                changed = hidden.clone() if changed is None else changed
                changed[samples, places.gather(1, selection.keep)] = selection.rows
            if selection.merged_into is not None and call.report is not None:
                call.report.merge(site.samples, site.original(places), selection.merged_into)
        if changed is not None:
            moved = moved | {name: changed}
        if not kept.all():
            moved = self._shorten(call, kept, moved)
        if call.report is not None:
            call.report.add(step.stage, method.name, step.layer, before, call.spans)
        return moved

    def _buckets(
        self, call: Call, method: Method, step: Step, device: torch.device
    ) -> list[list[tuple[list[Span], torch.Tensor | None]]]:
        """Return the groups of media that a step chooses from, equally long ones together."""
        buckets: dict[tuple[int, int], list[tuple[list[Span], torch.Tensor | None]]] = {}
        for group in _groups(call.spans, getattr(method, "scope", "item")):
            length = sum(span.length for span in group)
            if method.count(length) == length:
                continue
            text = self._text_after(call, group, device) if Need.TEXT in step.needs else None
            buckets.setdefault((length, -1 if text is None else len(text)), []).append((group, text))
        return list(buckets.values())

    @staticmethod
    def _text_after(call: Call, group: list[Span], device: torch.device) -> torch.Tensor:
        """Return the places of the text tokens after a group of media, int64 of shape (T,)."""
        sample, stop = group[-1].sample, group[-1].stop
        size = call.length if call.block is None else call.block.keep.shape[1]
        text = torch.arange(size, device=device) >= stop
        if call.block is not None:
            text &= call.block.keep[sample] >= 0
        if call.valid is not None:
            tokens = torch.arange(size, device=device) if call.block is None else call.block.keep[sample].clamp(min=0)
            text &= call.valid[sample, call.past :][tokens]
        for span in call.spans:
            if span.sample == sample:
                text[span.start : span.stop] = False
        return text.nonzero()[:, 0]

    @_timed
    def _enter_layer(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = _call.get()
        if call is None or not call.active:
            return None
        index = self._layer_index[module]
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        kwargs |= call.replaced
        for method, step in self._steps_at(Stage.DECODER_LAYER, index) if call.spans else ():
            self._check_arguments(kwargs, hidden.shape[1], f"decoder layer {index}")
            moved = {"hidden_states": hidden} | {
                name: kwargs[name] for name in ("position_embeddings", "position_ids") if kwargs.get(name) is not None
            }
            moved = self._run_step(call, method, step, moved)
            hidden = moved.pop("hidden_states")
            call.replaced = moved
            kwargs |= moved
            if index == self._last_site:
                capturing.set(None)
                call.capture.attention.clear()
        kwargs["attention_mask"] = self._mask(call, index, hidden)
        if "flash" in (self.decoder.config._attn_implementation or ""):
            # Flash kernels read gaps in the positions as borders between packed sequences.
            kwargs["position_ids"] = None
        if call.block is not None and call.cache is not None:
            layer = caches.reduced_layer(call.cache, index, hidden.shape[0], hidden.device)
            layer.announce(call.block.keep, call.block.filled, call.length, call.segment)
        if call.report is not None:
            call.report.saw(hidden.shape[1], call.spans)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": hidden}

    def _mask(self, call: Call, index: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a layer: stock's for the unpruned sequence, at the keys and queries that are there."""
        layer = None if call.cache is None or len(call.cache.layers) <= index else call.cache.layers[index]
        reduced = layer if isinstance(layer, caches.ReducedMixin) else None
        past = reduced.physical_length if reduced else 0 if layer is None else layer.get_seq_length()
        key = (reduced.segments if reduced else (), past, call.segment, hidden.shape[1])
        if key not in call.masks:
            filled = bool(reduced and reduced.filled) or bool(call.block and call.block.filled)
            columns = None
            if filled or call.valid is not None or call.mask is not None:
                columns = self._columns(call, reduced, past, hidden)
            call.masks[key] = self._build_mask(call, columns, past, hidden)
        mask, call.valid_keys = call.masks[key]
        return mask

    @staticmethod
    def _columns(call: Call, reduced: caches.ReducedMixin | None, past: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logical index of every key that a layer will hold, -1 for fill, int64 of shape (B, K)."""
        batch, device = hidden.shape[0], hidden.device
        held = reduced.indices() if reduced else torch.arange(past, device=device).expand(batch, -1)
        if call.block is None:
            coming = torch.arange(call.past, call.past + call.length, device=device).expand(batch, -1)
        else:
            coming = torch.where(call.block.keep < 0, -1, call.block.keep + call.past)
        return torch.cat([held.to(device), coming], dim=1)

    def _build_mask(
        self, call: Call, columns: torch.Tensor | None, past: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the mask and which keys are valid, bool of shape (B, K), None for all."""
        valid = None
        if columns is not None:
            valid = columns >= 0
            if call.valid is not None:
                valid &= call.valid.gather(1, columns.clamp(min=0))
            if call.mask is not None:
                mask = call.mask.expand(hidden.shape[0], -1, -1, -1)
                mask = mask if call.block is None else call.block.gather(mask.transpose(1, 2)).transpose(1, 2)
                index = columns.clamp(min=0)[:, None, None].expand(-1, *mask.shape[1:3], -1)
                barred = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
                return mask.gather(-1, index).masked_fill(~valid[:, None, None], barred), valid
        from transformers.masking_utils import create_causal_mask

        lengths: Any = {self._mask_cache_argument: _Lengths(past)}
        mask = create_causal_mask(
            config=self.decoder.config, inputs_embeds=hidden, attention_mask=valid, position_ids=None, **lengths
        )
        return mask, valid

    @_timed
    def _leave_decoder(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = _call.get()
        if call is None or not call.active:
            return None
        if call.report is not None:
            self.statistics.add(call.report.finish(call.block))
        if call.block is None:
            return None
        if call.labels is not None:
            call.labels[call.block.dropped()] = -100
        if isinstance(output, tuple):
            return call.block.expand(output[0]), *output[1:]
        output.last_hidden_state = call.block.expand(output.last_hidden_state)
        return output


@dataclass
class _Site:
    """A bucket of equally long groups of media at the site of a step inside or before the decoder."""

    session: Session
    call: Call
    step: Step
    hidden: torch.Tensor
    bucket: list[tuple[list[Span], torch.Tensor | None]]

    def __post_init__(self) -> None:
        device = self.hidden.device
        self.samples = torch.tensor([group[0].sample for group, _ in self.bucket], device=device)
        self.places = torch.tensor(
            [[place for span in group for place in range(span.start, span.stop)] for group, _ in self.bucket],
            device=device,
        )
        texts = [text for _, text in self.bucket if text is not None]
        self.text_places = torch.stack(texts) if texts else None

    def context(self) -> Context:
        """Return what the step sees."""
        text = None if self.text_places is None else self.original(self.text_places)
        return Context(self._rows(self.places), self.step.needs, self._observe, self.original(self.places), text)

    def original(self, places: torch.Tensor) -> torch.Tensor:
        """Return the positions in the unpruned call of places of the bucket's samples, (G, n)."""
        block = self.call.block
        return places if block is None else block.keep[self.samples.unsqueeze(1), places]

    def _rows(self, places: torch.Tensor) -> torch.Tensor:
        return self.hidden[self.samples.unsqueeze(1), places]

    def _observe(self, need: Need, text: bool) -> torch.Tensor:
        places = self.text_places if text and self.text_places is not None else self.places
        if need is Need.NORMED_HIDDEN:
            return self.session.decoder.norm(self._rows(places))  # type: ignore[operator]
        assert self.step.layer is not None
        seen = self.call.capture.attention[self.session._attention(self.step.layer - 1)]
        keys = places + seen.key.shape[2] - self.hidden.shape[1]
        if need is Need.LAYER_KEYS:
            return seen.key[self.samples.unsqueeze(1), :, keys].flatten(2)
        rows = seen.rows(self._last_places(seen), self.call.valid_keys)[self.samples]
        return rows.gather(2, keys.unsqueeze(1).expand(-1, rows.shape[1], -1))

    def _last_places(self, seen: Seen) -> torch.Tensor:
        """Return the place of each sample's last token among the queries, int64 of shape (B,)."""
        batch, _, queries, _ = seen.query.shape
        if self.call.valid_keys is None:
            return torch.full((batch,), queries - 1, device=seen.query.device)
        order = torch.arange(queries, device=seen.query.device)
        return (order * self.call.valid_keys[:, -queries:]).argmax(1)


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return positional and keyword arguments of a forward by name."""
    if not args:
        return kwargs
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


def _groups(spans: list[Span], scope: str) -> list[list[Span]]:
    """Return the spans that share a budget: each on its own, or all of a sample."""
    if scope == "item":
        return [[span] for span in spans]
    samples: dict[int, list[Span]] = {}
    for span in spans:
        samples.setdefault(span.sample, []).append(span)
    return list(samples.values())


def _positions(hidden: torch.Tensor) -> torch.Tensor:
    """Return the positions of tokens that stand in no sequence yet, int64 of shape (G, N)."""
    return torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)


def _no_observation(need: Need, text: bool) -> NoReturn:
    raise UnsupportedFamilyError(f"{need} cannot be observed at the features")


def _carriers(rows: torch.Tensor, keep: torch.Tensor, length: int) -> torch.Tensor:
    """Return rows (G, k, D) at the places `keep` (G, k) of `length`, and NaN, which cannot be mistaken, elsewhere."""
    full = rows.new_full((rows.shape[0], length, rows.shape[2]), torch.nan)
    return full.scatter(1, keep.unsqueeze(-1).expand(-1, -1, rows.shape[2]), rows)


def _survivors_of_encoding(embeds: torch.Tensor, placeholders: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return which tokens are no carriers, bool of shape (B, L), or None if there is no carrier."""
    if not placeholders:
        return None
    media = functools.reduce(torch.logical_or, placeholders.values()).to(embeds.device)
    kept = ~(media & embeds[..., 0].isnan())
    return None if kept.all() else kept


def _gather_argument(name: str, value: Any, reduction: Reduction) -> Any:
    if name == "position_ids":
        return reduction.gather(value, -1)
    if name == "position_embeddings":
        return tuple(reduction.gather(part, -2) for part in value)
    return reduction.gather(value, 1)


def _is_packed(positions: torch.Tensor, batch: int) -> bool:
    from transformers.masking_utils import find_packed_sequence_indices

    if positions.dim() == 3:
        if positions.shape[0] != 4:
            return False
        positions = positions[0]
    return find_packed_sequence_indices(positions.expand(batch, -1)) is not None
