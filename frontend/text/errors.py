"""What can be wrong with a conversation or its template; each is one client's 400."""

from __future__ import annotations


class TemplateError(ValueError):
    """The conversation cannot be rendered. The message is one line, for people."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(" ".join(message.split()))
        self.param = param
        """Path of the field at fault, such as "messages[2].role", when there is one."""


class NoTemplateError(TemplateError):
    """The model has no chat template."""


class TemplateLimitError(TemplateError):
    """Rendering went past its time or size limit."""
