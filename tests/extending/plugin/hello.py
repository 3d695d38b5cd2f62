"""A command of another distribution."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HelloCommand:
    """Greet somebody."""

    whom: str = "world"
    """Whom to greet."""

    def run(self):
        """Run the command."""
        print(f"hello, {self.whom}")
        return 0
