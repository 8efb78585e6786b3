"""The one error of reading a model's files."""

from __future__ import annotations


class ArtefactError(ValueError):
    """A model's files cannot be used. The message is one line, meant for a person, and names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
