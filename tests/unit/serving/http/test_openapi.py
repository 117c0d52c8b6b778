"""The OpenAPI document matches the service: schemathesis generates requests and checks every response."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schema_hooks  # noqa: F401  # registers the formats
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.config import SchemathesisConfig
from serving_cases import schedulers, serving

load_all_checks()
APPLIED: list[Any] = CHECKS.get_all()
TRIAL = Path(__file__).parents[3] / "chaos"
QUICK: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
    "database": None,
}


@pytest.fixture(scope="module")
def address(folders: dict[str, Path]) -> Iterator[str]:
    """A service whose models support most operations; tests/chaos/schema_trial.py has one for each kind of model."""
    order = ["encoder", "pairs"]
    with schedulers({name: folders[name] for name in order}) as models, serving(models) as url:
        yield url


@pytest.fixture(scope="module")
def document(address: str) -> Any:
    config = SchemathesisConfig.from_path(TRIAL / "schemathesis.toml")
    return schemathesis.openapi.from_url(f"{address}/openapi.json", config=config)


def _statuses(document: Any, examples: int) -> set[int]:
    """Return the statuses of valid and invalid generated requests to all endpoints."""
    statuses: set[int] = set()
    for result in document.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=examples, **QUICK)
            def call(case: schemathesis.Case) -> None:
                statuses.add(case.call_and_validate(checks=APPLIED).status_code)

            with suppress(Unsatisfiable):  # an endpoint without parameters has no invalid requests
                call()
    return statuses


def test_generated_requests_conform(document: Any) -> None:
    assert {200, 404, 422} <= _statuses(document, 5)


@pytest.mark.slow
def test_many_generated_requests_conform(document: Any) -> None:
    assert {200, 404, 422} <= _statuses(document, 300)


def test_endpoints_have_examples_and_error_responses(document: Any) -> None:
    raw = document.raw_schema
    for path, methods in raw["paths"].items():
        for method, details in methods.items():
            assert details["summary"], path
            if path not in ("/", "/health") or method == "post":
                assert "401" in details["responses"], path
            if method == "post":
                assert {"400", "413", "422", "429", "503"} <= set(details["responses"]), path
                schema = details["requestBody"]["content"]["application/json"]["schema"]
                for body in schema.get("anyOf", [schema]):
                    assert all("examples" in body["properties"][field] for field in body["required"]), path
