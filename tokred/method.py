"""What a method is: hyper-parameters, the sites where it acts, and a pure function that chooses tokens."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import yaml

from .errors import ParameterError, UndeclaredObservationError, UnsupportedFamilyError
from .kernels import gather
from .positions import POLICIES


class Stage(enum.StrEnum):
    """Where in a model a step acts."""

    ENCODER_BLOCK = "encoder_block"
    PROJECTOR = "projector"
    FEATURES = "features"
    EMBEDS = "embeds"
    DECODER_LAYER = "decoder_layer"


class Need(enum.StrEnum):
    """What a step observes besides the hidden states of its site."""

    CLS_ROW = "cls_row"
    """Attention of the CLS query in the tower layer whose output is the feature, (G, heads, N + 1)."""
    CLS_JOINT_ROW = "cls_joint_row"
    """The same if all heads of that layer were one, (G, 1, N + 1)."""
    TOWER_KEYS = "tower_keys"
    """Head mean of the raw keys of that tower layer, (G, N + 1, head_dim); at `Stage.ENCODER_BLOCK` of the block at the
    site, (G, T, head_dim)."""
    TOWER_HEAD_KEYS = "tower_head_keys"
    """Raw keys of that tower layer, all heads side by side, (G, N + 1, heads * head_dim)."""
    CLS_HIDDEN = "cls_hidden"
    """Hidden state of the CLS token at the output of that tower layer, (G, 1, D)."""
    COLUMN_SUM = "column_sum"
    """Attention that the tokens receive in a tower layer: mean over heads, sum over all queries, (G, N)."""
    LAST_ROW = "last_row"
    """Attention of the last prompt token in the decoder layer before the site, (G, heads, N)."""
    NEXT_ROW = "next_row"
    """Attention that the last prompt token would pay in the decoder layer at the site, (G, heads, N)."""
    TEXT_ROWS = "text_rows"
    """Attention of the text tokens after the item in the decoder layer before the site, (G, heads, T, N); for the text,
    (G, heads, T, T). Goes with `TEXT`."""
    LAYER_KEYS = "layer_keys"
    """Keys of the decoder layer before the site after RoPE, all kv heads side by side, (G, N, kv_heads * head_dim)."""
    ACTIVE_NEURONS = "active_neurons"
    """Which neurons of the gated FFN in the decoder layer before the site are active, act(gate) * up > 0, bool
    (G, N, neurons)."""
    EMBEDDINGS = "embeddings"
    """What the decoder received of all the tokens that the items had when it began, (G, M, D) with M >= N, inside the
    decoder; for the text, (G, T, D)."""
    NORMED_HIDDEN = "normed_hidden"
    """The model's final norm applied to the hidden states that enter the site, (G, N, D)."""
    TEXT = "text"
    """The tokens after the media item that belong to no medium; other needs are then served for them too."""
    GRID = "grid"
    """Frame, view, row and column of the tokens, int64 of shape (G, N, 4); row and column are -1 for a separator."""

    def at(self, layer: int) -> Observation:
        """Return this need for another tower layer than the one whose output is the feature (0-based)."""
        return Observation(self, layer)


@dataclass(frozen=True)
class Observation:
    """A need at a layer of the tower.

    Args:
        need: what is observed.
        layer: the tower layer, 0-based; None is the layer that the need names.
    """

    need: Need
    layer: int | None = None

    def __str__(self) -> str:
        return str(self.need) if self.layer is None else f"{self.need} of layer {self.layer}"


TOWER_NEEDS = frozenset(
    {
        Need.CLS_ROW,
        Need.CLS_JOINT_ROW,
        Need.TOWER_KEYS,
        Need.TOWER_HEAD_KEYS,
        Need.CLS_HIDDEN,
        Need.COLUMN_SUM,
    }
)
"""The needs that are observed in the tower."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide where a method acts.

    Args:
        num_layers: number of decoder layers, 0 for an image encoder that stands alone.
        tower_layers: number of tower layers, 0 if the family does not say where they are.
        rowwise_projector: whether the projector treats every token alone, so that tokens can leave before it.
        feature_layers: number of tower layers up to the one whose output is the feature; None for all.
    """

    num_layers: int
    tower_layers: int = 0
    rowwise_projector: bool = False
    feature_layers: int | None = None


@dataclass(frozen=True)
class Selection:
    """Which tokens of equally long items survive, and what they now hold.

    Args:
        keep: positions inside the item, ascending in each row, int64 of shape (G, k). Items that keep fewer than k have
            -1 behind their survivors. At `Stage.ENCODER_BLOCK` the order is free, but the tokens before the patches
            stay in front, every token is kept or merged, and all items keep k.
        rows: new hidden states of the survivors, (G, k, D), anything behind -1; None leaves them as they are.
        merged_into: for each token of the item the position of the survivor that absorbed it, -1 for none,
            int64 of shape (G, N); None if nothing was merged.
    """

    keep: torch.Tensor
    rows: torch.Tensor | None = None
    merged_into: torch.Tensor | None = None

    def rows_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the survivors, (G, k, D), of items with hidden states (G, N, D) so far."""
        return gather(hidden, self.keep.clamp(min=0)) if self.rows is None else self.rows

    def spread(self, rows: torch.Tensor, length: int, fill: float) -> torch.Tensor:
        """Return rows (G, k, D) at their positions in items of `length` tokens, with `fill` elsewhere."""
        # What stands behind the survivors goes to a place of its own, which is cut off.
        full = rows.new_full((rows.shape[0], length + 1, *rows.shape[2:]), fill)
        places = self.keep.masked_fill(self.keep < 0, length)
        full.scatter_(1, places.view(*places.shape, *(1,) * (rows.dim() - 2)).expand_as(rows), rows)
        return full[:, :length]

    def mask(self, length: int) -> torch.Tensor:
        """Return which of the `length` tokens of each item survive, bool of shape (G, length)."""
        return self.spread(torch.ones_like(self.keep, dtype=torch.bool), length, False)


class Context:
    """What a step sees of a group of media items of one length.

    At `Stage.ENCODER_BLOCK` the items are the pictures of the batch with all their tokens, T, in place of N.

    Args:
        hidden: hidden states of the items at the site, (G, N, D).
        needs: the observations that the step declared.
        provider: computes an observation when it is read; takes it and whether the text is meant.
        positions: original positions of the tokens in their sequences, (G, N); at the stages before the decoder, where
            no sequence exists yet, positions inside the item.
        text_positions: original positions of the text tokens after the items, (G, T).
        total: number of tokens that the items have in the prompt, or patches that the pictures have, of which N are
            left; None is N.
        prefix: at `Stage.ENCODER_BLOCK` the number of tokens before the patches, such as CLS, else 0.
        sizes: at `Stage.ENCODER_BLOCK` how many tokens each one stands for, float32 of shape (G, T); else None.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        needs: frozenset[Need | Observation],
        provider: Callable[[Observation, bool], torch.Tensor],
        positions: torch.Tensor,
        text_positions: torch.Tensor | None = None,
        total: int | None = None,
        prefix: int = 0,
        sizes: torch.Tensor | None = None,
    ):
        self.hidden = hidden
        self.prefix = prefix
        self.sizes = sizes
        self.total = hidden.shape[1] if total is None else total
        self.positions = positions
        self._text_positions = text_positions
        self._observations = frozenset(map(_observation, needs))
        self._provider = provider

    @property
    def text_positions(self) -> torch.Tensor:
        """Original positions of the text tokens after the items, (G, T); the step must declare `Need.TEXT`."""
        self._declared(Need.TEXT)
        if self._text_positions is None:
            raise UndeclaredObservationError("no text follows tokens that stand in no sequence yet")
        return self._text_positions

    def observe(self, need: Need | Observation) -> torch.Tensor:
        """Return an observation for the media tokens, shaped as `Need` says.

        Raises:
            UndeclaredObservationError: the step did not list the need.
        """
        return self._provider(self._declared(need), False)

    def observe_text(self, need: Need | Observation) -> torch.Tensor:
        """Return an observation for the text tokens after the item: as `observe`, with T in the place of N.

        Raises:
            UndeclaredObservationError: the step did not list the need, or not `Need.TEXT`.
        """
        self._declared(Need.TEXT)
        return self._provider(self._declared(need), True)

    def _declared(self, need: Need | Observation) -> Observation:
        observation = _observation(need)
        if observation not in self._observations:
            declared = ", ".join(sorted(map(str, self._observations))) or "none"
            raise UndeclaredObservationError(
                f"the step did not declare observation {observation} (declared: {declared})"
            )
        return observation


def _observation(need: Need | Observation) -> Observation:
    return need if isinstance(need, Observation) else Observation(need)


@dataclass(frozen=True)
class Step:
    """One site at which a method acts.

    Args:
        stage: the kind of site.
        select: pure function from a context to the surviving tokens.
        needs: what `select` observes.
        layer: for `Stage.DECODER_LAYER`, the layer whose input is reduced (0-based, at least 1); for
            `Stage.ENCODER_BLOCK`, the block between whose attention and MLP tokens are merged (0-based).
        count: returns how many of the tokens that are left survive, for the number of tokens in the prompt and of those
            that are left; None is the method's count of the latter. For methods of several steps.
    """

    stage: Stage
    select: Callable[[Context], Selection]
    needs: frozenset[Need | Observation] = frozenset()
    layer: int | None = None
    count: Callable[[int, int], int | None] | None = None
    proportional: bool = False

    @property
    def observations(self) -> frozenset[Observation]:
        """What `select` observes, with the layers."""
        return frozenset(map(_observation, self.needs))

    def observes(self, *needs: Need) -> bool:
        """Return whether the step observes one of these needs, at whichever layer."""
        return any(observation.need in needs for observation in self.observations)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the order in which steps meet a token."""
        return list(Stage).index(self.stage), self.layer or 0


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base class of all methods: a frozen set of hyper-parameters.

    A subclass sets `name` and `source`, validates its own fields in `_validate`, and says in `plan` where it acts.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    """The paper, and the section of the specification, that the method follows."""

    def __post_init__(self) -> None:
        self._validate()

    def _validate(self) -> None:
        """Raise `ParameterError` for a field outside its range."""

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        """Return the sites at which this method acts on a model of the given shape.

        Raises:
            ParameterError: a site lies outside the model.
        """
        raise NotImplementedError

    def count(self, length: int) -> int | None:
        """Return how many of `length` media tokens survive the last step, None if only known afterwards."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters with the method's name under `"method"`."""
        return {"method": self.name} | dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build the method from what `to_dict` returned.

        Raises:
            ParameterError: the dict names another method or an unknown parameter.
        """
        parameters = dict(data)
        name = parameters.pop("method", cls.name)
        if name != cls.name:
            raise ParameterError(f"these are parameters of {name!r}, not of {cls.name!r}")
        return cls.from_parameters(parameters)

    @classmethod
    def from_parameters(cls, parameters: dict[str, Any]) -> Self:
        """Build the method from keyword parameters, naming the allowed ones when one is unknown."""
        allowed = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(parameters) - set(allowed))
        if unknown:
            raise ParameterError(f"{cls.name} has no parameter {', '.join(map(repr, unknown))}; it has {allowed}")
        return cls(**parameters)

    def to_yaml(self) -> str:
        """Return the parameters as YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Build the method from what `to_yaml` returned."""
        return cls.from_dict(yaml.safe_load(text))


@dataclass(frozen=True, kw_only=True)
class BudgetMethod(Method):
    """A method that keeps a given share, or number, of the visual tokens.

    Args:
        keep: share of the visual tokens that survive, in (0, 1]. At least one token of an item always survives.
        num_tokens: number of tokens that survive, at least 1; overrides `keep`. More than exist keeps all of them.
        scope: `"item"` applies the budget to each image, `"total"` to all visual tokens of a sample together.
        positions: `"keep"` leaves every survivor its position id, `"renumber"` closes the gaps, from the step on where
            tokens leave. Tasks that ask where something is suffer from the latter (GAP, arXiv 2506.21873,
            specs/vision.md section 14).
    """

    scopes: ClassVar[tuple[str, ...]] = ("item", "total")
    """The scopes that the method knows."""
    adaptive: ClassVar[bool] = False
    """Whether `keep` may be None: without a budget the method finds the number of survivors by itself."""
    keep: float = 0.25
    num_tokens: int | None = None
    scope: str = "item"
    positions: str = "keep"

    def _validate(self) -> None:
        number = isinstance(self.keep, int | float) and math.isfinite(self.keep)
        if not (number and 0 < self.keep <= 1) and not (self.adaptive and self.keep is None):
            raise ParameterError(f"keep={self.keep!r} is not a share in (0, 1]")
        if self.num_tokens is not None and (not isinstance(self.num_tokens, int) or self.num_tokens < 1):
            raise ParameterError(f"num_tokens={self.num_tokens!r} is not a positive integer")
        if self.scope not in self.scopes:
            raise ParameterError(f"scope={self.scope!r} of {self.name} is not one of {self.scopes}")
        if self.positions not in POLICIES:
            raise ParameterError(f"positions={self.positions!r} is not one of {POLICIES}")

    def count(self, length: int) -> int:
        """Return the number of survivors among `length` tokens: `keep * length` rounded half to even, at least 1."""
        if self.num_tokens is not None:
            return min(self.num_tokens, length)
        return min(length, max(1, round(self.keep * length)))

    def _pre_decoder_step(self, select: Callable[[Context], Selection]) -> Step:
        """The site of a method that looks at visual tokens only: the features, or all media of a sample together."""
        return Step(Stage.FEATURES if self.scope == "item" else Stage.EMBEDS, select)


def check_layer(layer: int, shape: ModelShape, name: str) -> None:
    """Raise unless `layer` is a decoder layer with another one before it.

    Raises:
        UnsupportedFamilyError: the model has no decoder.
        ParameterError: the layer lies outside.
    """
    if not shape.num_layers:
        raise UnsupportedFamilyError(f"{name} acts inside a decoder, and an image encoder alone has none")
    if not 1 <= layer < shape.num_layers:
        raise ParameterError(
            f"{name}: layer={layer} lies outside 1..{shape.num_layers - 1} of a decoder with {shape.num_layers} layers"
        )
