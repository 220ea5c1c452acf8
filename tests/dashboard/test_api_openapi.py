"""`openapi.json` says what is served, and all of it.

`python -m tests.dashboard.test_api_openapi` writes it into the docs.
"""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from jsonschema import Draft202012Validator

from fairlane import App
from fairlane.dashboard.access import OPEN_TO_VIEWERS, Role
from fairlane.dashboard.api import OPERATIONS
from fairlane.dashboard.api_openapi import describe_api
from fairlane.dashboard.api_shapes import ErrorAnswer
from fairlane.dashboard.refusals import CODES
from tests.dashboard.harness import Site
from tests.dashboard.world import API, operation_at

DESCRIPTION = Path(__file__).resolve().parents[2] / "docs" / "reference" / "openapi.json"


def written() -> str:
    return json.dumps(describe_api(), indent=1, ensure_ascii=False) + "\n"


def test_the_description_in_the_docs_is_the_one_that_is_served() -> None:
    assert DESCRIPTION.read_text() == written(), "run `python -m tests.dashboard.test_api_openapi`"


async def test_it_is_served_for_the_place_where_it_is_mounted(site: Site) -> None:
    served = (await site.program().get(f"{API}/openapi.json")).json()
    assert served == {**json.loads(written()), "servers": [{"url": API}]}


def test_every_operation_is_described_and_nothing_else_is() -> None:
    described = {
        (method, path): operation["operationId"]
        for path, methods in describe_api()["paths"].items()
        for method, operation in methods.items()
    }
    assert described == {(each.method.lower(), each.path): each.name for each in OPERATIONS}
    assert len({each.name for each in OPERATIONS}) == len(OPERATIONS)


def test_every_operation_is_one_of_operations() -> None:
    operations = App("sqlite://").operations
    acts = {each.act: attrgetter(each.act)(operations) for each in OPERATIONS if each.role is Role.OPERATOR}
    assert len(acts) == 17
    assert all(map(callable, acts.values()))


def test_viewers_may_send_exactly_what_changes_nothing() -> None:
    for each in OPERATIONS:
        if each.method == "POST":
            assert (f"/api{each.path}" in OPEN_TO_VIEWERS) == (each.role is Role.VIEWER), each.name


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    document = describe_api()
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == set(schemas)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_what_is_sent_and_what_is_answered_share_no_name() -> None:
    """They are described one after the other: one of two by the same name would be lost."""
    sent = [each.body for each in OPERATIONS if each.body is not None] + [each.query for each in OPERATIONS]
    told = [each.answer for each in OPERATIONS] + [ErrorAnswer]
    names = [set(msgspec.json.schema_components(several)[1]) for several in (sent, told)]
    assert names[0] & names[1] == set()


def test_members_are_described_with_the_words_of_their_declaration() -> None:
    schemas = describe_api()["components"]["schemas"]
    assert schemas["Change"]["properties"]["reason"]["description"] == (
        "Why. It is recorded, with who and when; only a dry run needs none."
    )
    assert schemas["SetLimit"]["properties"]["reason"]["description"] == (
        "Why. It is recorded, with who and when; only a dry run needs none."
    )
    assert "Of the ready ones" in schemas["QueueView"]["properties"]["held_jobs"]["description"]


def test_what_is_always_answered_is_required() -> None:
    schemas: dict[str, Any] = describe_api()["components"]["schemas"]
    assert schemas["ErrorShown"]["required"] == ["code", "message"]
    assert set(schemas["Hint"]["required"]) == set(schemas["Hint"]["properties"])
    assert "required" not in schemas["Change"] or schemas["Change"]["required"] == []


def test_nothing_that_is_sent_may_have_members_besides() -> None:
    schemas = describe_api()["components"]["schemas"]
    for each in OPERATIONS:
        if each.body is not None:
            assert schemas[each.body.__name__]["additionalProperties"] is False, each.name


def test_the_reference_names_every_operation_and_every_code() -> None:
    page = (DESCRIPTION.parent / "http-api.md").read_text()
    assert [each.name for each in OPERATIONS if f"`{each.method} /api{each.path}`" not in page] == []
    assert [code for code in CODES.values() if f"`{code}`" not in page] == []


def test_a_path_with_a_name_is_not_taken_for_one_with_a_variable() -> None:
    found = operation_at("POST", "/jobs/cancel")
    assert found is not None
    assert found["operationId"] == "cancel_jobs"


if __name__ == "__main__":
    DESCRIPTION.write_text(written())
