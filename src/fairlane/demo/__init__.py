"""The product in under a minute: one whale, a hundred small tenants, three policies, and figures from what ran."""

__all__: list[str] = []
