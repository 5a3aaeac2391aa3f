"""What happens in the calls of a model with a handle: hooks that shorten sequences and keep everything in step."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import torch
from torch import nn

from . import cache as caches
from . import kernels
from .adapters.base import DECODER_ARGUMENTS, ModelAdapter, cache_argument
from .call import Call, Encoding, current_call, current_encoding, labels_of_call
from .errors import (
    LiveHandleError,
    ParameterError,
    StageTakenError,
    UnsupportedAttentionError,
    UnsupportedFamilyError,
    UnsupportedInputError,
)
from .layout import MediaItem, Span, place_items
from .masks import layer_mask, read_mask
from .method import Context, Method, ModelShape, Need, Stage, Step
from .observe import Capture, capturing, tap
from .reduction import Reduction
from .report import CallReport, Statistics
from .sites import Site, buckets_of, groups_of

logger = logging.getLogger("tokred")


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
        self.decoder: Any = self.base.get_submodule(adapter.decoder)
        self.layers = cast(nn.ModuleList, self.decoder.layers)
        self.methods = methods
        self.paused = False
        self.statistics = Statistics()
        self._override: ContextVar[tuple[Method, ...] | None] = ContextVar("tokred_override", default=None)
        self._undo: list[Callable[[], None]] = []
        self._warned_of_clamp = False
        self._cache_argument = cache_argument(self.decoder.forward)
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
                f"the decoder has layers of type {', '.join(sorted(kinds)) or 'sliding_attention'}; so far only "
                "full_attention is exact on a shortened sequence"
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
            logger.warning(
                "%s: num_tokens=%d is more than the %d tokens of an item: all are kept", method.name, wanted, length
            )
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
            outer = current_encoding.set(encoding), capturing.set(Capture())
            try:
                output = original(*args, **kwargs)
            finally:
                current_encoding.reset(outer[0])
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
        encoding = current_encoding.get()
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
        encoding = current_encoding.get()
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
        absorbed = None if encoding.projected is None else encoding.projected.merged_into
        # Where an item is made of several tiles, the tile's tokens are not the item's.
        if absorbed is not None and lengths == [encoding.length] * len(absorbed):
            merged = list(absorbed)
        for method, step in self._steps_at(Stage.FEATURES):
            features, merged = self._reduce_features(method, step, features, merged)
        output.pooler_output = features
        # A plain attribute: `generate` hands the same object to the prefill, and no field of the output changes.
        items = [MediaItem(modality, *parts) for parts in zip(lengths, cells, merged, strict=True)]
        output.tokred_items = items
        call = current_call.get()
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
        labels_of_call.set(labels)
        return (), arguments | {"labels": labels}

    @_timed
    def _enter_base(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # PyTorch runs no hook when Ctrl-C ends a call, which may have left one behind.
        self._end_call()
        arguments = _arguments(module, args, kwargs)
        labels = labels_of_call.get()
        labels_of_call.set(None)
        call = Call(self, current_call.get(), arguments.get("input_ids"), arguments.get("mm_token_type_ids"), labels)
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
        current_call.set(call)
        caches.handle_is_active.set(True)

    @torch.compiler.disable
    def _leave_base(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._end_call()

    def _end_call(self) -> None:
        """Forget the running call of this session, if there is one."""
        call = current_call.get()
        if call is not None and call.session is self:
            current_call.set(call.outer)
            caches.handle_is_active.set(call.outer is not None)
            capturing.set(None)

    # The decoder

    @_timed
    def _enter_decoder(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = current_call.get()
        embeds = kwargs.get("inputs_embeds")
        if call is None or embeds is None:
            return None
        call.length = embeds.shape[1]
        call.cache = kwargs.get(self._cache_argument)
        held = [] if call.cache is None else call.cache.layers
        call.active = any(isinstance(layer, caches.ReducedMixin) for layer in held)
        # Media encoded before a pause may hold carriers, which have to leave now too.
        placeholders = {} if call.length == 1 else self._placeholders(call)
        if placeholders:
            call.spans = place_items(placeholders, call.items)
        elif not call.active:
            if call.length > 1 and not self.paused:
                self.statistics.add_idle()
            return None

        kept = _survivors_of_encoding(embeds, placeholders)
        if call.spans and kept is None:
            self._check_encoded(call.spans)
        if kept is None and not self._reduces_later(call.spans) and not call.active:
            call.spans = []
            return None

        kwargs = dict(kwargs)
        self._read_cache(call, kwargs)
        if call.spans:
            # Only now can something get shorter: later tokens, one by one, change no length but their own.
            self._check_arguments(kwargs, call.length, "the decoder")
            if call.cache is not None:
                caches.check_cache(call.cache)
        read_mask(call, kwargs, embeds)
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
                call.report.add(*self._encoding_stage(), None, before, call.spans)
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
                for group in groups_of(spans, getattr(method, "scope", "item")):
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
            if name in DECODER_ARGUMENTS:
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
            call.past = call.cache.get_seq_length()

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
        for bucket in buckets_of(call, method, step, hidden.device):
            site = Site(self.decoder.norm, self._attention, call, step, hidden, bucket)
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

    @_timed
    def _enter_layer(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = current_call.get()
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
        kwargs["attention_mask"] = layer_mask(call, self.decoder.config, index, hidden)
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

    @_timed
    def _leave_decoder(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = current_call.get()
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


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return positional and keyword arguments of a forward by name."""
    if not args:
        return kwargs
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


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
