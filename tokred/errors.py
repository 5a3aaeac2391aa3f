"""Errors of tokred: every one derives from `TokredError` and from the builtin that fits."""


class TokredError(Exception):
    """Base class of every error that tokred raises on purpose."""


class ParameterError(TokredError, ValueError):
    """A parameter of a method, or of `apply`, is out of its range."""


class UnknownMethodError(TokredError, KeyError):
    """No registered method has this name."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr, quotes included


class UnsupportedModelError(TokredError, TypeError):
    """No adapter fits this model."""


class UnsupportedFamilyError(TokredError, TypeError):
    """The model's family cannot provide what the method needs, or passes an argument that tokred does not know."""


class UnsupportedCacheError(TokredError, TypeError):
    """The cache holds a layer class that cannot be shortened."""


class UnsupportedAttentionError(TokredError, TypeError):
    """The attention type of a layer would not be exact on a shortened sequence."""


class UnsupportedInputError(TokredError, ValueError):
    """The inputs of this call leave out what the method needs."""


class AlreadyCompiledError(TokredError, RuntimeError):
    """The model is already compiled: hooks added now would never run."""


class StageTakenError(TokredError, RuntimeError):
    """Another method already acts on this stage of the model."""


class StaleCacheError(TokredError, RuntimeError):
    """A shortened cache reached a model on which no tokred handle is active."""


class LiveHandleError(TokredError, RuntimeError):
    """A model cannot be copied or pickled while a handle is attached to it."""


class UndeclaredObservationError(TokredError, RuntimeError):
    """A method read an observation that its step did not declare."""


class RemovedHandleError(TokredError, RuntimeError):
    """The handle was removed from its model and has nothing left to act on."""


class RegistrationError(TokredError, ValueError):
    """A method or an adapter cannot be registered under this name."""
