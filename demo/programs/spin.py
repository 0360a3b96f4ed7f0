"""A program that never ends and never awaits."""


def main(args: object) -> None:
    """Compute without end."""
    while True:
        pass
