"""The checks, one module per area, in the order in which they are shown."""

from __future__ import annotations

from headrace.lint.areas import (
    auth,
    budget,
    choices,
    connections,
    errors,
    features,
    fields,
    lifecycle,
    logprobs,
    malformed,
    messages,
    models,
    parity,
    prompts,
    routes,
    stops,
    streams,
    text,
    tokens,
    unknown_fields,
    usage,
)
from headrace.lint.verdicts import Check, checks_of


def all_checks() -> list[Check]:
    """Every check there is."""
    modules = (
        connections,
        routes,
        models,
        errors,
        malformed,
        auth,
        fields,
        unknown_fields,
        messages,
        prompts,
        budget,
        streams,
        parity,
        choices,
        stops,
        text,
        logprobs,
        usage,
        tokens,
        features,
        lifecycle,
    )
    return [check for module in modules for check in checks_of(module)]
