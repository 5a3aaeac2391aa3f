"""Which steps of which methods act where, and whether they do at the moment."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from .errors import ParameterError
from .method import Method, ModelShape, Stage, Step

logger = logging.getLogger("tokred")


def policy_of(method: Method) -> str:
    """Return which position ids the survivors of a method get, one of `positions.POLICIES`."""
    return getattr(method, "positions", "keep")


class Plan:
    """The steps of a handle's methods on one model.

    Args:
        methods: the methods, in the order in which their steps run.
        shape: the sizes of the model.

    Raises:
        ParameterError: a method's layer lies outside the model.

    Attributes:
        methods: as given.
        steps: all steps with their methods, in the order in which a token meets them.
        paused: whether no step acts for now.
    """

    def __init__(self, methods: tuple[Method, ...], shape: ModelShape):
        self.methods = methods
        self.paused = False
        self._shape = shape
        self._override: ContextVar[tuple[Method, ...] | None] = ContextVar("tokred_override", default=None)
        self._warned_of_clamp = False
        self.steps = self._steps_of(methods)

    def _steps_of(self, methods: Sequence[Method]) -> list[tuple[Method, Step]]:
        steps = [(method, step) for method in methods for step in method.plan(self._shape)]
        return sorted(steps, key=lambda pair: pair[1].order)

    def current(self) -> list[tuple[Method, Step]]:
        """Return the steps that act now."""
        if self.paused:
            return []
        override = self._override.get()
        return self.steps if override is None else self._steps_of(override)

    def at(self, stage: Stage, layer: int | None = None) -> list[tuple[Method, Step]]:
        """Return the steps that act now at one site."""
        return [(method, step) for method, step in self.current() if (step.stage, step.layer) == (stage, layer)]

    def acts(self, *stages: Stage) -> bool:
        """Return whether a step acts now on one of some stages."""
        return any(step.stage in stages for _, step in self.current())

    def renumbers(self) -> bool:
        """Return whether a step that acts now gives the survivors new position ids."""
        return any(policy_of(method) == "renumber" for method, _ in self.current())

    def count(self, method: Method, length: int) -> int | None:
        """Return how many of `length` media tokens a method keeps, warning once if it wants more than there are."""
        wanted = getattr(method, "num_tokens", None)
        if wanted is not None and wanted > length and not self._warned_of_clamp:
            self._warned_of_clamp = True
            logger.warning(
                "%s: num_tokens=%d is more than the %d tokens of an item: all are kept", method.name, wanted, length
            )
        return method.count(length)

    @contextmanager
    def override(self, methods: tuple[Method, ...]) -> Iterator[None]:
        """Use other parameters in the calls of this context, on the same sites.

        Raises:
            ParameterError: a method would act on a site to which nothing is attached.
        """
        attached = {(step.stage, step.layer) for _, step in self.steps}
        for method, step in self._steps_of(methods):
            if (step.stage, step.layer) not in attached:
                raise ParameterError(f"{method.name}: a site cannot be moved while attached (layer={step.layer})")
        token = self._override.set(methods)
        try:
            yield
        finally:
            self._override.reset(token)
