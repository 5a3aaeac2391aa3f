"""What happens while media are encoded: methods that act before and after the projector."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from . import kernels
from .adapters.base import Cells, ModelAdapter
from .call import Encoding, current_call, current_encoding
from .errors import UndeclaredObservationError, UnsupportedInputError
from .hooks import Attachments
from .layout import MediaItem
from .method import TOWER_NEEDS, Context, Method, Need, Observation, Stage, Step
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
        if any(step.stage in (Stage.ENCODER_BLOCK, Stage.PROJECTOR) for step in steps):
            projector = self._base.get_submodule(self._adapter.projector)  # type: ignore[arg-type]
            attachments.before(projector, self._enter_projector)
            attachments.after(projector, self._leave_projector)
        # Steps inside the tower see to their own observations.
        outside = [step for step in steps if step.stage is not Stage.ENCODER_BLOCK]
        observed = {observation for step in outside for observation in step.observations}
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
        if encoding is None:
            return None
        hidden, *rest = args
        if encoding.order is not None:
            return (kernels.gather(hidden, encoding.order), *rest), kwargs
        steps = self._plan.at(Stage.PROJECTOR)
        if not steps:
            return None
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
        return encoding.projected.spread(output, encoding.length, torch.nan)

    def _leave_encoder(self, modality: str, arguments: dict[str, Any], encoding: Encoding, output: Any) -> Any:
        features = getattr(output, "pooler_output", None)
        if features is None:
            raise UnsupportedInputError("a model with a tokred handle encodes media with return_dict=True only")
        lengths = [len(feature) for feature in features]
        grid = arguments.get(self._adapter.media[modality].grid or "")
        cells = self._adapter.cells(self._config, modality, grid, lengths)
        encoded = [_Encoded(feature) for feature in features]
        if self._plan.acts(Stage.ENCODER_BLOCK, Stage.PROJECTOR):
            _read_projected(encoded, encoding)
        for method, step in self._plan.at(Stage.FEATURES):
            observe = functools.cache(functools.partial(self._observe_items, encoding.capture, grid, cells, features))
            self._reduce_features(method, step, observe, encoded)
        output.pooler_output = [item.feature for item in encoded]
        # A plain attribute: `generate` hands the same object to the prefill, and no field of the output changes.
        items = [
            MediaItem(modality, length, cell, item.merged_into, tuple(item.left))
            for length, cell, item in zip(lengths, cells, encoded, strict=True)
        ]
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
        encoded: list[_Encoded],
    ) -> None:
        """Let a step choose among the tokens of each item that an earlier one has left."""
        buckets: dict[int, list[int]] = {}
        for index, item in enumerate(encoded):
            if self._plan.count(method, len(item.rows)) != len(item.rows):
                buckets.setdefault(len(item.rows), []).append(index)
            else:
                item.left.append(len(item.rows))
        for members in buckets.values():
            items = [encoded[index] for index in members]
            hidden = torch.stack([item.rows for item in items])
            positions = torch.stack([item.positions for item in items])
            of_members = functools.partial(_of_members, observe, members, positions)
            selection = step.select(Context(hidden, step.needs, of_members, positions))
            rows = selection.rows_of(hidden)
            for place, item in enumerate(items):
                merged_into = None if selection.merged_into is None else selection.merged_into[place]
                item.reduce(selection.keep[place], rows[place], merged_into)


class _Encoded:
    """One encoded item on its way through the steps.

    Args:
        feature: what the model made of it, (N, D).

    Attributes:
        feature: the tokens that are left at their places, NaN, which cannot be mistaken, elsewhere.
        positions: places of those tokens, int64 of shape (n,).
        rows: their hidden states, (n, D).
        merged_into: for each of the N tokens the one that absorbed it, -1 for none; None if none was.
        left: how many tokens were left after each step so far.
    """

    def __init__(self, feature: torch.Tensor):
        self.feature = self.rows = feature
        self.positions = torch.arange(len(feature), device=feature.device)
        self.merged_into: torch.Tensor | None = None
        self.left: list[int] = []

    def reduce(self, keep: torch.Tensor, rows: torch.Tensor, merged_into: torch.Tensor | None) -> None:
        """Keep some of the tokens that are left.

        Args:
            keep: which, ascending, then -1, int64 of shape (k,).
            rows: their new hidden states, (k, D).
            merged_into: which of the tokens that were left absorbed each of them, -1 for none, int64 of shape (n,).
        """
        if merged_into is not None:
            targets = torch.full((len(self.feature),), -1, device=keep.device)
            absorbed = torch.where(merged_into < 0, -1, self.positions[merged_into.clamp(min=0)])
            if self.merged_into is not None:
                # What was absorbed before goes where its absorber goes.
                targets.copy_(self.merged_into)
                chain = torch.full_like(targets, -1).index_copy_(0, self.positions, absorbed)
                moved = torch.where(targets < 0, -1, chain[targets.clamp(min=0)])
                targets = torch.where(moved < 0, targets, moved)
            self.merged_into = targets.index_copy_(0, self.positions, absorbed)
        kept = keep >= 0
        self.positions, self.rows = self.positions[keep[kept]], rows[kept]
        self.feature = torch.full_like(self.feature, torch.nan).index_copy_(0, self.positions, self.rows)
        self.left.append(len(self.rows))

    def read(self) -> None:
        """Take the tokens that are no carriers as those that are left."""
        self.positions = (~self.feature[:, 0].isnan()).nonzero()[:, 0]
        self.rows = self.feature[self.positions]
        self.left.append(len(self.rows))


def _read_projected(encoded: list[_Encoded], encoding: Encoding) -> None:
    """Note what the steps before the projector left of the items, which are made of one or several tiles each."""
    for item in encoded:
        item.read()
    absorbed = None if encoding.projected is None else encoding.projected.merged_into
    # Where an item is made of several tiles, the tile's tokens are not the item's.
    if absorbed is not None and [len(item.feature) for item in encoded] == [encoding.length] * len(absorbed):
        for item, one in zip(encoded, absorbed, strict=True):
            item.merged_into = one


def _positions(hidden: torch.Tensor) -> torch.Tensor:
    """Return the positions of tokens that stand in no sequence yet, int64 of shape (G, N)."""
    return torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)


def _of_members(
    observe: Callable[[Observation], Sequence[torch.Tensor]],
    members: list[int],
    positions: torch.Tensor,
    observation: Observation,
    text: bool,
) -> torch.Tensor:
    """Return an observation of some items at the positions (G, n) of the tokens that are left of them."""
    values = observe(observation)
    return torch.stack([values[index][places] for index, places in zip(members, positions, strict=True)])
