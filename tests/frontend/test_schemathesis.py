"""schemathesis over /openapi.json: whatever the description allows or forbids, no 5xx and no undescribed answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from frontend.http.route_table import ROUTES
from tests.frontend.fake_scheduler import Script
from tests.frontend.harness import Bench

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
PATHS = {spec.path for spec in ROUTES}


def try_out(base_url: str, description: dict[str, Any], mode: GenerationMode, examples: int) -> Counter[int]:
    """Call every route with generated requests; how often each status came."""
    schema = schemathesis.openapi.from_dict(description)
    statuses: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path not in PATHS:
            continue  # an alias: the same handler
        takes_body = bool(operation.body)
        if mode is GenerationMode.NEGATIVE and not takes_body:
            continue  # there is nothing to do wrong

        @seed(0)
        @settings(
            max_examples=examples if takes_body else 2,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def attempt(case: schemathesis.Case) -> None:
            response = case.call(base_url=base_url)
            statuses[response.status_code] += 1
            late = response.status_code == 504 and isinstance(case.body, dict) and "timeout" in case.body
            checks = [check for check in CHECKS if not (late and check is not_a_server_error)]
            case.validate_response(response, checks=checks)

        attempt()
    return statuses


async def conforms(live: Bench, mode: GenerationMode, examples: int) -> Counter[int]:
    # Longer than the context, so that it also ends when its end tokens do not count.
    live.scheduler.script = lambda submit: Script([*b"ok", 258] * 400, steps=(8,))
    description = (await live.client.get("/openapi.json")).json()
    for schema in description["components"]["schemas"].values():
        properties = schema.get("properties", {})
        if "x-headrace-class" in properties.get("model", {}):
            properties["model"] = {"enum": ["llama-8b", "alias", "nobody"]}
    base_url = f"http://127.0.0.1:{live.port}"
    statuses = await asyncio.to_thread(try_out, base_url, {**description, "servers": []}, mode, examples)
    assert (await live.client.get("/health")).status_code == 200
    await live.until(lambda: not live.scheduler.jobs, "nothing left running")
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_every_answer_is_described(live: Bench, mode: GenerationMode) -> None:
    statuses = await conforms(live, mode, 10)
    assert statuses[400] > 10 and (statuses[200] > 20 or mode is GenerationMode.NEGATIVE), statuses


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_every_answer_is_described_at_length(live: Bench, mode: GenerationMode) -> None:
    await conforms(live, mode, 1500)
