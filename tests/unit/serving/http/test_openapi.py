"""The OpenAPI document is true: schemathesis makes requests from it, and every answer is one that it tells of."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from serving_cases import engines, serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
QUICK: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
    "database": None,
}


@pytest.fixture(scope="module")
def address(folders: dict[str, Path]) -> Iterator[str]:
    """A service whose first model does all but one thing, so that most requests get as far as a model."""
    order = ["encoder", "classification", "tagging", "spans"]
    with engines({name: folders[name] for name in order}) as models, serving(models) as found:
        yield found


@pytest.fixture(scope="module")
def document(address: str) -> Any:
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


def _asked(document: Any, examples: int) -> set[int]:
    """The statuses of requests made from the document, good ones and bad ones, to all endpoints."""
    found: set[int] = set()
    for result in document.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=examples, **QUICK)
            def ask(case: schemathesis.Case) -> None:
                found.add(case.call_and_validate(checks=CHECKS).status_code)

            with suppress(Unsatisfiable):  # nothing can be wrong with a request that has nothing in it
                ask()
    return found


def test_no_request_of_the_document_breaks_the_service(document: Any) -> None:
    assert {200, 404, 422} <= _asked(document, 5)


@pytest.mark.slow
def test_many_requests_of_the_document(document: Any) -> None:
    assert {200, 404, 422} <= _asked(document, 300)


def test_every_endpoint_has_an_example_and_says_what_may_go_wrong(document: Any) -> None:
    raw = document.raw_schema
    for path, methods in raw["paths"].items():
        for method, details in methods.items():
            assert details["summary"], path
            if path != "/health":
                assert "401" in details["responses"], path
            if method == "post":
                assert {"400", "413", "422", "429", "503"} <= set(details["responses"]), path
                name = details["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/")[-1]
                fields = raw["components"]["schemas"][name]
                assert all("examples" in fields["properties"][field] for field in fields["required"]), name
