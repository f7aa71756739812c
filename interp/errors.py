"""The errors of this package: each message says what was wrong, what was expected and what to do."""


class InterpError(ValueError):
    """Base of all errors that a user's input can cause in ``interp``."""


class ModelError(InterpError):
    """A model configuration or input that can't be."""


class CheckpointError(InterpError):
    """A checkpoint folder that is missing, foreign, truncated, corrupt or too new."""


class TrainingError(InterpError):
    """Training settings that can't be, or a run that diverged."""
