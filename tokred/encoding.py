"""What happens while media are encoded: methods that act before and after the projector."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .adapters.base import Cells, ModelAdapter
from .call import Encoding, current_call, current_encoding
from .errors import UndeclaredObservationError, UnsupportedInputError
from .hooks import Attachments
from .layout import MediaItem
from .method import TOWER_NEEDS, Context, Method, Need, Observation, Selection, Stage, Step
from .observe import Capture, capturing, tap
from .plan import Plan


class EncoderHooks:
    """The hooks on a model's tower, projector and methods that encode media.

    Args:
        base: the base model.
        adapter: its family.
        plan: the steps.
    """

    def __init__(self, base: nn.Module, adapter: ModelAdapter, plan: Plan):
        self._base = base
        self._config: Any = base.config
        self._adapter = adapter
        self._plan = plan

    def attach(self, attachments: Attachments) -> None:
        """Add the hooks."""
        for modality in self._adapter.media:
            self._wrap_encoder(modality, attachments)
        steps = [step for _, step in self._plan.steps]
        if any(step.stage is Stage.PROJECTOR for step in steps):
            projector = self._base.get_submodule(self._adapter.projector)  # type: ignore[arg-type]
            attachments.before(projector, self._enter_projector)
            attachments.after(projector, self._leave_projector)
        observed = {observation for step in steps for observation in step.observations}
        for block in dict.fromkeys(self._block(one) for one in observed if one.need in TOWER_NEEDS - {Need.CLS_HIDDEN}):
            attachments.add(tap(self._attention(block)))
        for block in dict.fromkeys(self._block(one) for one in observed if one.need is Need.CLS_HIDDEN):
            attachments.after(block, self._leave_block)

    def _wrap_encoder(self, modality: str, attachments: Attachments) -> None:
        name = self._adapter.media[modality].encode
        original = getattr(self._base, name)
        signature = inspect.signature(original)
        leave = attachments.hook(self._leave_encoder)

        @functools.wraps(original)
        def encode(*args: Any, **kwargs: Any) -> Any:
            encoding = Encoding()
            outer = current_encoding.set(encoding), capturing.set(encoding.capture)
            try:
                output = original(*args, **kwargs)
            finally:
                current_encoding.reset(outer[0])
                capturing.reset(outer[1])
            return leave(modality, signature.bind(*args, **kwargs).arguments, encoding, output)

        setattr(self._base, name, encode)
        attachments.add(lambda: delattr(self._base, name))

    def _block(self, observation: Observation) -> nn.Module:
        """Return the tower block in which something is observed."""
        layer = observation.layer
        if layer is None:
            layer = self._adapter.feature_layer(self._config)  # type: ignore[misc]
        return self._base.get_submodule(f"{self._adapter.tower_layers}.{layer}")

    def _attention(self, block: nn.Module) -> nn.Module:
        return block.get_submodule(self._adapter.tower_attention)

    def _leave_block(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        capture = capturing.get()
        if capture is not None:
            capture.outputs[module] = output[0] if isinstance(output, tuple) else output

    def _enter_projector(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        encoding = current_encoding.get()
        steps = self._plan.at(Stage.PROJECTOR)
        if encoding is None or not steps:
            return None
        hidden, *rest = args
        [(method, step)] = steps
        if self._plan.count(method, hidden.shape[1]) == hidden.shape[1]:
            return None
        observe = functools.partial(self._observe_tiles, hidden, encoding.capture)
        context = Context(hidden, step.needs, observe, _positions(hidden))
        selection = step.select(context)
        encoding.projected, encoding.length = selection, hidden.shape[1]
        return (selection.rows_of(hidden), *rest), kwargs

    def _observe_tiles(
        self, hidden: torch.Tensor, capture: Capture, observation: Observation, text: bool
    ) -> torch.Tensor:
        """Return an observation of what the projector takes, for all tiles."""
        if observation.need is Need.GRID:
            cells = self._adapter.tile_cells(self._config)  # type: ignore[misc]
            return cells.to(hidden.device).expand(len(hidden), -1, -1)
        block = self._block(observation)
        if observation.need is Need.CLS_HIDDEN:
            return capture.outputs[block][:, :1]
        [seen] = capture.attention[self._attention(block)]
        if observation.need is Need.TOWER_KEYS:
            return seen.key.mean(dim=1)
        if observation.need is Need.TOWER_HEAD_KEYS:
            return seen.joined().key.squeeze(1)
        if observation.need is Need.COLUMN_SUM:
            return seen.column_sums()[:, 1:]
        if observation.need is Need.CLS_JOINT_ROW:
            seen = seen.joined()
        return seen.rows(torch.zeros(len(hidden), dtype=torch.long, device=hidden.device))

    def _observe_items(
        self,
        capture: Capture,
        grid: Any,
        cells: Sequence[Cells | None],
        features: Sequence[torch.Tensor],
        observation: Observation,
    ) -> Sequence[torch.Tensor]:
        """Return an observation of what a method that encodes media returns, item by item."""
        if observation.need is Need.GRID:
            if None in cells:
                raise UnsupportedInputError("a method needs the grids of the media, and these came without them")
            return [cell().to(features[0].device) for cell in cells if cell is not None]
        if observation.need is not Need.COLUMN_SUM or self._adapter.merged_patches is None:
            raise UndeclaredObservationError(f"{observation} cannot be observed at stage {Stage.FEATURES}")
        seen = capture.attention[self._attention(self._block(observation))]
        patches = torch.cat([part.column_sums()[0] for part in seen])
        merged = patches.view(-1, self._adapter.merged_patches(self._config)).mean(dim=1)
        if self._adapter.tower_order is not None:
            order = self._adapter.tower_order(self._config, grid).to(merged.device)
            merged = torch.empty_like(merged).index_copy_(0, order, merged)
        return merged.split([len(feature) for feature in features])

    def _leave_projector(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        encoding = current_encoding.get()
        if encoding is None or encoding.projected is None:
            return None
        return _carriers(encoding.projected, output, encoding.length)

    def _leave_encoder(self, modality: str, arguments: dict[str, Any], encoding: Encoding, output: Any) -> Any:
        features = getattr(output, "pooler_output", None)
        if features is None:
            raise UnsupportedInputError("a model with a tokred handle encodes media with return_dict=True only")
        lengths = [len(feature) for feature in features]
        media = self._adapter.media[modality]
        grid = arguments.get(media.grid or "")
        cells = self._adapter.cells(self._config, modality, grid, lengths)
        merged: list[torch.Tensor | None] = [None] * len(lengths)
        absorbed = None if encoding.projected is None else encoding.projected.merged_into
        # Where an item is made of several tiles, the tile's tokens are not the item's.
        if absorbed is not None and lengths == [encoding.length] * len(absorbed):
            merged = list(absorbed)
        for method, step in self._plan.at(Stage.FEATURES):
            observe = functools.cache(functools.partial(self._observe_items, encoding.capture, grid, cells, features))
            features, merged = self._reduce_features(method, step, observe, features, merged)
        output.pooler_output = features
        # A plain attribute: `generate` hands the same object to the prefill, and no field of the output changes.
        items = [MediaItem(modality, *parts) for parts in zip(lengths, cells, merged, strict=True)]
        output.tokred_items = items
        call = current_call.get()
        if call is not None:
            call.items[modality] = items
        return output

    def _reduce_features(
        self,
        method: Method,
        step: Step,
        observe: Callable[[Observation], Sequence[torch.Tensor]],
        features: Sequence[torch.Tensor],
        merged: list[torch.Tensor | None],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        features, merged = list(features), list(merged)
        buckets: dict[int, list[int]] = {}
        for index, feature in enumerate(features):
            if self._plan.count(method, len(feature)) != len(feature):
                buckets.setdefault(len(feature), []).append(index)
        for length, members in buckets.items():
            hidden = torch.stack([features[index] for index in members])
            of_members = functools.partial(_of_members, observe, members)
            selection = step.select(Context(hidden, step.needs, of_members, _positions(hidden)))
            spread = _carriers(selection, selection.rows_of(hidden), length)
            for place, (index, feature) in enumerate(zip(members, spread, strict=True)):
                features[index] = feature
                if selection.merged_into is not None:
                    merged[index] = selection.merged_into[place]
        return features, merged


def _positions(hidden: torch.Tensor) -> torch.Tensor:
    """Return the positions of tokens that stand in no sequence yet, int64 of shape (G, N)."""
    return torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)


def _of_members(
    observe: Callable[[Observation], Sequence[torch.Tensor]], members: list[int], observation: Observation, text: bool
) -> torch.Tensor:
    """Return an observation of some items of one length."""
    values = observe(observation)
    return torch.stack([values[index] for index in members])


def _carriers(selection: Selection, rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return the survivors' rows at their places among `length`, and NaN, which cannot be mistaken, elsewhere."""
    return selection.spread(rows, length, torch.nan)
