"""A program that never comes back."""


def main(args: object) -> None:
    """For ever."""
    while True:
        pass
