"""What happens in the decoder: hooks that shorten the sequence and keep everything in step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from . import cache as caches
from .adapters.base import DECODER_ARGUMENTS, ModelAdapter, cache_argument
from .call import Call, Opening, current_call
from .errors import UnsupportedFamilyError, UnsupportedInputError
from .hooks import Attachments, arguments_of
from .layout import Span, place_items
from .masks import layer_mask, read_mask
from .method import Method, Need, Stage, Step
from .observe import Capture, Seen, capturing, seen_ahead, tap
from .plan import Plan, policy_of
from .positions import renumber
from .reduction import Reduction
from .report import CallReport, Statistics
from .sites import Site, buckets_of, groups_of, last_places


class DecoderHooks:
    """The hooks on the decoder and its layers.

    Args:
        base: the base model.
        adapter: its family.
        plan: the steps.
        statistics: what is told about every call.
    """

    def __init__(self, base: nn.Module, adapter: ModelAdapter, plan: Plan, statistics: Statistics):
        self._config: Any = base.config
        self._adapter = adapter
        self._plan = plan
        self._statistics = statistics
        self._decoder: Any = base.get_submodule(adapter.decoder)
        self._layers = cast(nn.ModuleList, self._decoder.layers)
        self._cache_argument = cache_argument(self._decoder.forward)
        self._layer_index = {layer: index for index, layer in enumerate(self._layers)}
        self._last_site = max((step.layer for _, step in plan.steps if step.layer is not None), default=0)

    def attach(self, attachments: Attachments) -> None:
        """Add the hooks."""
        attachments.before(self._decoder, self._enter_decoder)
        attachments.after(self._decoder, self._leave_decoder)
        attachments.before(self._decoder.rotary_emb, self._enter_rotary)
        for layer in self._layers:
            attachments.before(layer, self._enter_layer)
        for before in self._layers_before(Need.LAST_ROW, Need.TEXT_ROWS, Need.LAYER_KEYS):
            attachments.add(tap(self._attention(before)))
        for before in self._layers_before(Need.ACTIVE_NEURONS):
            attachments.before(self._ffn(before), self._enter_ffn)

    def _layers_before(self, *needs: Need) -> list[int]:
        """Return the layers before the sites of the steps that observe one of these needs."""
        steps = [step for _, step in self._plan.steps if step.observes(*needs)]
        return sorted({step.layer - 1 for step in steps if step.layer is not None})

    def _attention(self, layer: int) -> nn.Module:
        return self._layers[layer].get_submodule(self._adapter.attention)

    def _ffn(self, layer: int) -> nn.Module:
        return self._layers[layer].get_submodule(self._adapter.ffn)  # type: ignore[arg-type]

    def _enter_ffn(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        capture = capturing.get()
        if capture is not None:
            capture.neurons[module] = args[0] > 0

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
            if call.length > 1 and not self._plan.paused:
                self._statistics.add_idle()
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
        call.renumbers = any(getattr(layer, "shift", None) is not None for layer in held)
        call.renumbers |= bool(call.spans) and self._plan.renumbers()
        if call.renumbers and kwargs["position_ids"].dim() == 3:
            # A fourth row, in front, counts the tokens for packed sequences, which are refused.
            kwargs["position_ids"] = kwargs["position_ids"][-3:]
        moved = {"inputs_embeds": embeds, "position_ids": kwargs["position_ids"]}
        if call.spans:
            call.report = CallReport(self._adapter.model_type, embeds.shape[0], call.length, call.spans)
            if any(step.stage is Stage.DECODER_LAYER for _, step in self._plan.current()):
                capturing.set(call.capture)
            if kept is not None:
                before = call.spans
                steps = self._encoding_steps()
                policy = "renumber" if any(policy_of(method) == "renumber" for method, _ in steps) else "keep"
                moved = self._shorten(call, kept, moved, policy)
                call.report.add_encoding([(method.name, step) for method, step in steps], before, call.spans)
            for method, step in self._plan.at(Stage.EMBEDS):
                moved = self._run_step(call, method, step, moved)
            if any(step.observes(Need.EMBEDDINGS) for _, step in self._plan.current()):
                call.opening = Opening(moved["inputs_embeds"], call.block, call.spans)
        if self._sees_everything(call, held):
            call.active = False
        # Every layer gets its mask from `_enter_layer`: one rule, and the decoder has none to build.
        return args, kwargs | moved | {"attention_mask": None}

    def _sees_everything(self, call: Call, held: list[Any]) -> bool:
        """Return whether a call brings one token that may look at every key there is, so that no layer needs a mask."""
        return (
            call.length == 1
            and call.valid is None
            and call.mask is None
            and not call.renumbers
            and self._decoder.config._attn_implementation == "sdpa"
            and not any(getattr(layer, "filled", False) for layer in held)
        )

    def _placeholders(self, call: Call) -> dict[str, torch.Tensor]:
        """Return which tokens of the call stand for media, by modality, without the modalities that do not occur."""
        found = {}
        for modality, media in self._adapter.media.items():
            token = getattr(self._config, media.token_id, None)
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
        for method, _ in self._encoding_steps():
            for span in spans:
                count = method.count(span.length)
                # A count that depends on the item may be all of it, if the item was seen.
                if count != span.length and not (count is None and span.item.left):
                    raise UnsupportedInputError(
                        f"{method.name} acts while media are encoded, but these {span.length} {span.item.modality} "
                        "tokens were encoded without it; encode them through the model after tokred.apply"
                    )

    def _reduces_later(self, spans: list[Span]) -> bool:
        """Return whether a step at or inside the decoder removes tokens of these items."""
        for method, step in self._plan.current():
            if step.stage in (Stage.EMBEDS, Stage.DECODER_LAYER):
                for group in groups_of(spans, getattr(method, "scope", "item")):
                    length = sum(span.length for span in group)
                    if self._plan.count(method, length) != length:
                        return True
        return False

    def _encoding_steps(self) -> list[tuple[Method, Step]]:
        """Return the steps that act while media are encoded, of those inside the tower the last one."""
        inside = [pair for pair in self._plan.current() if pair[1].stage is Stage.ENCODER_BLOCK][-1:]
        return inside + [step for stage in (Stage.PROJECTOR, Stage.FEATURES) for step in self._plan.at(stage)]

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
        use_cache = self._decoder.config.use_cache if use_cache is None else use_cache
        if call.cache is None and use_cache:
            from transformers import DynamicCache

            call.cache = kwargs[self._cache_argument] = DynamicCache(config=self._decoder.config)
        if call.cache is not None:
            call.past = call.cache.get_seq_length()

    def _shorten(self, call: Call, kept: torch.Tensor, moved: dict[str, Any], policy: str) -> dict[str, Any]:
        """Take the survivors of everything that has a sequence axis, and note the new places of the media.

        Args:
            call: the call.
            kept: which places survive, bool of shape (B, P).
            moved: hidden states (B, P, D) and what goes with them.
            policy: which position ids the survivors get, one of `positions.POLICIES`.
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
        before = call.spans
        call.spans = [
            Span(span.sample, *reduction.interval(span.sample, span.start, span.stop), span.item) for span in before
        ]
        shortened = {name: _gather_argument(name, value, reduction) for name, value in moved.items()}
        if call.renumbers:
            # Inside the decoder its ids are gone, and the embeddings are made anew from `call.position_ids`.
            inside = call.position_ids is not None
            ids: Any = call.position_ids if inside else moved["position_ids"]
            if policy == "keep":
                ids = reduction.gather(ids, -1)
            else:
                ids, shift = renumber(ids, before, call.spans, reduction)
                call.shift = shift if call.shift is None else call.shift + shift
            if inside:
                call.position_ids = ids
            else:
                shortened["position_ids"] = ids
        return shortened

    def _run_step(
        self,
        call: Call,
        method: Method,
        step: Step,
        moved: dict[str, Any],
        ahead: Callable[[], tuple[Seen, torch.Tensor | None]] | None = None,
    ) -> dict[str, Any]:
        """Let a step choose among the media tokens of the call, and shorten what moves with them.

        Args:
            call: the call.
            method: the method of the step.
            step: the step.
            moved: the hidden states first, (B, P, D), then what goes with them.
            ahead: returns what the attention kernel of the layer at the site would receive if nothing left, with the
                last token of each sample as the only query, and which keys are valid.
        """
        name, hidden = next(iter(moved.items()))
        batch, length = hidden.shape[:2]
        kept = torch.ones((batch, length), dtype=torch.bool, device=hidden.device)
        if call.block is not None:
            kept = call.block.keep >= 0
        changed = None
        before = call.spans
        for bucket in buckets_of(call, method, step, hidden.device):
            site = Site(self._decoder.norm, self._attention, self._ffn, call, step, hidden, bucket, ahead)
            selection = step.select(site.context())
            samples, places = site.samples.unsqueeze(1), site.places
            kept[samples, places] = selection.mask(places.shape[1])
            if selection.rows is not None:
                changed = hidden.clone() if changed is None else changed
                changed[samples, places] = selection.spread(selection.rows, places.shape[1], 0.0)
            if selection.merged_into is not None and call.report is not None:
                call.report.merge(site.samples, site.original(places), selection.merged_into)
        if changed is not None:
            moved = moved | {name: changed}
        if not kept.all():
            moved = self._shorten(call, kept, moved, policy_of(method))
        if call.report is not None:
            call.report.add(method.name, step, before, call.spans)
        return moved

    def _enter_layer(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = current_call.get()
        if call is None or not call.active:
            return None
        index = self._layer_index[module]
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        kwargs |= call.replaced
        for method, step in self._plan.at(Stage.DECODER_LAYER, index) if call.spans else ():
            self._check_arguments(kwargs, hidden.shape[1], f"decoder layer {index}")
            moved = {"hidden_states": hidden} | {
                name: kwargs[name] for name in ("position_embeddings", "position_ids") if kwargs.get(name) is not None
            }
            rotary = kwargs.get("position_embeddings")
            ahead = functools.cache(functools.partial(self._look_ahead, call, index, hidden, rotary))
            moved = self._run_step(call, method, step, moved, ahead)
            hidden = moved.pop("hidden_states")
            call.replaced = moved
            kwargs |= moved
            if index == self._last_site:
                capturing.set(None)
                call.capture, call.opening = Capture(), None
        if call.position_ids is not None:
            kwargs["position_embeddings"] = self._position_embeddings(call, index, hidden)
        kwargs["attention_mask"], call.valid_keys = layer_mask(call, self._decoder.config, index, hidden)
        if "flash" in (self._decoder.config._attn_implementation or ""):
            # Flash kernels read gaps in the positions as borders between packed sequences.
            kwargs["position_ids"] = None
        if call.block is not None and call.cache is not None:
            layer = caches.reduced_layer(call.cache, index, hidden.shape[0], hidden.device)
            layer.announce(call.block.keep, call.block.filled, call.length, call.segment, call.shift)
        if call.report is not None:
            call.report.saw(hidden.shape[1], sum(span.length for span in call.spans))
        if args:
            return (hidden, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": hidden}

    def _look_ahead(
        self, call: Call, index: int, hidden: torch.Tensor, rotary: Any
    ) -> tuple[Seen, torch.Tensor | None]:
        """Return what a layer's attention kernel would receive for each sample's last token, and the valid keys."""
        if call.position_ids is not None:
            rotary = self._position_embeddings(call, index, hidden)
        _, valid = layer_mask(call, self._decoder.config, index, hidden)
        layer = caches.layer_of(call.cache, index)
        cached = None if layer is None or layer.get_seq_length() == 0 else layer.keys
        last = last_places(valid, hidden)
        return seen_ahead(self._layers[index], self._attention(index), hidden, rotary, last, cached), valid

    def _enter_rotary(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = current_call.get()
        if call is not None and call.renumbers and call.position_ids is None:
            call.position_ids = arguments_of(module, args, kwargs)["position_ids"]

    def _position_embeddings(self, call: Call, index: int, hidden: torch.Tensor) -> Any:
        """Return the rotary embeddings of the tokens that reach a layer."""
        layer = caches.layer_of(call.cache, index)
        reduced = layer if isinstance(layer, caches.ReducedMixin) else None
        key = (reduced.segments if reduced else (), call.segment)
        if key not in call.rotary:
            ids: Any = call.position_ids
            if reduced is not None and reduced.shift is not None:
                ids = ids - reduced.shift.unsqueeze(1)
            call.rotary[key] = self._decoder.rotary_emb(hidden, ids)
        return call.rotary[key]

    def _leave_decoder(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = current_call.get()
        if call is None or not call.active:
            return None
        if call.report is not None:
            self._statistics.add(call.report.finish(call.block))
        if call.block is None:
            return None
        if call.labels is not None:
            call.labels[call.block.dropped()] = -100
        if isinstance(output, tuple):
            return call.block.expand(output[0]), *output[1:]
        output.last_hidden_state = call.block.expand(output.last_hidden_state)
        return output


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
