"""What can be wrong with a model, as one line for a person."""

from __future__ import annotations


class ModelError(ValueError):
    """The model cannot be served as asked: an unknown family, a broken checkpoint, an option that contradicts it."""
