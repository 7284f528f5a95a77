"""Every error a user can cause, with one shape: what was expected, what was found, what to do."""

from __future__ import annotations


class SpectralFairseqError(Exception):
    """Base of all errors raised on purpose by this package.

    Args:
        expected: what would have been right.
        found: what was there instead.
        remedy: the step that mends it, as an imperative sentence.
    """

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(f"expected {expected}; found {found}. {remedy}")

    def __reduce__(self) -> tuple:
        # BaseException pickles self.args, which is the one formatted message: workers could
        # not send such an error back to the parent process.
        return type(self), (self.expected, self.found, self.remedy)


class ConfigurationError(SpectralFairseqError, ValueError):
    """A flag, or a combination of flags, that cannot be trained."""


class UnsupportedError(SpectralFairseqError, ValueError):
    """A feature of the host that does not work together with the one asked for."""


class CheckpointError(SpectralFairseqError, ValueError):
    """A checkpoint that is missing, damaged, unsafe to load, or of another kind than needed."""


class DataError(SpectralFairseqError, ValueError):
    """A data folder, dictionary or table whose content cannot be used."""


class MissingDataError(DataError, FileNotFoundError):
    """A data folder, dictionary or split that does not exist; still a ``FileNotFoundError``."""


class OutputError(SpectralFairseqError, OSError):
    """A file that could not be written: the disk is full, say; still an ``OSError``."""
