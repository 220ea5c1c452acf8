"""Prints where the version that runs it was found."""

import fairlane

print(fairlane.__file__)
