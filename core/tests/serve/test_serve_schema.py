"""The server's own OpenAPI against the server: nothing that a generator thinks of is a 5xx."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

schemathesis = pytest.importorskip("schemathesis", reason="the extra `testing` is not installed")

KEY = {"Authorization": "Bearer let-me-in"}


@pytest.fixture(scope="module")
def schema(serving: Any) -> Any:
    described = httpx.get(f"{serving.url}/openapi.json", headers=KEY).json()
    return schemathesis.openapi.from_dict(described)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=str)
def test_nothing_is_a_5xx(serving: Any, schema: Any, mode: Any) -> None:
    seen: set[int] = set()
    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) >= 7
    with httpx.Client(base_url=serving.url, headers=KEY, timeout=20) as client:
        for operation in operations:
            if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                continue  # there is nothing to get wrong
            many = 30 if operation.body else 5
            strategy = operation.as_strategy(generation_mode=mode)

            @seed(1)
            @settings(
                max_examples=many,
                deadline=None,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy)
            def attempt(case: Any) -> None:
                if isinstance(case.body, dict) and len(str(case.body.get("prompt"))) < 90:
                    case.body.setdefault("max_tokens", 3)  # so that the answers take no time
                request = case.as_transport_kwargs(base_url=serving.url)
                response = client.request(
                    request["method"],
                    request["url"],
                    params=request.get("params"),
                    json=request.get("json"),
                    content=None if "json" in request else request.get("data"),
                    headers=KEY | {"content-type": "application/json"},
                )
                seen.add(response.status_code)
                assert response.status_code < 500, (request, response.text)
                if response.status_code >= 400:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}

            attempt()
    assert mode is schemathesis.GenerationMode.NEGATIVE or 200 in seen
    info = httpx.get(f"{serving.url}/server_info", headers=KEY).json()
    assert info["now"]["free_pages"] == info["kv"]["pages"]
