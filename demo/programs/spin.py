"""A program that never ends and never awaits."""


def main(args: object) -> None:
    """Compute without ever returning or awaiting."""
    while True:
        pass
