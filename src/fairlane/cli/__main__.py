"""`python -m fairlane.cli`."""

from fairlane.cli.program import main

if __name__ == "__main__":
    main()
