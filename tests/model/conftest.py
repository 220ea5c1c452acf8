from __future__ import annotations

import pytest

# Their asserts are the test: let them tell what they have found.
pytest.register_assert_rewrite("tests.model.life", "tests.model.model")
