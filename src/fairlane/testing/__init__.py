"""What a program that uses Fairlane needs in its own tests."""

__all__: list[str] = []
